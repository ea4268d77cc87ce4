"""Measurements of a CUDA card within a few minutes."""
