"""Forecasters of the training loss: one file each, one line in catalogue.py. They see scalars, never weights."""
