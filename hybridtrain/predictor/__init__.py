"""Forecasters of the training loss and the monitor of divergence: they see scalars, never weights."""
