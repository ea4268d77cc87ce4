"""Weights from Hugging Face's folders and into them."""
