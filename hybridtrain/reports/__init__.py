"""The fastest stack that fits."""
