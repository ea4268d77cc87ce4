"""Experiments, one file each: their cases, their records, and the rows that tables are made of."""
