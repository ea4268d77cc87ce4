"""Everything a CUDA card can tell within a few minutes."""
