"""Tokens to train on: the embedded corpus, text files and token files, and the batches cut from them."""
