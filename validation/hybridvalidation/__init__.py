"""Scenarios in, verdicts out: runs, records, comparisons, tables and plots."""
