"""CUDA of a virtual card for unmodified code."""
