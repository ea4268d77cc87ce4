"""Experiments, one file each: their cases, records, and table rows."""
