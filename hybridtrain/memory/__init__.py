"""Stores and codecs, which own all tensors of a step."""
