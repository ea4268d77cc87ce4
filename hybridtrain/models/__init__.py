"""Decoder-only transformers: shapes, families, layers."""
