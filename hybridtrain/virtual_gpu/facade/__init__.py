"""CUDA for code that believes it has a card."""
