"""Profiles of memory: bytes, holders, times."""
