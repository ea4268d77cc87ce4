"""Stores and codecs: every tensor of a step has one owner here."""
