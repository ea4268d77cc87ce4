"""Dry runs, arithmetic and searches: what a run would take, before it is made."""
