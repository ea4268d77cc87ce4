"""Regression gate: plans against records, kernels and other people's models against baselines."""
