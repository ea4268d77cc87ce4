"""Today against what is kept: records of plans, baselines of kernels, and of other people's models."""
