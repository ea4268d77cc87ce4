"""Regression gate: plans against records, kernels and other projects' models against baselines."""
