"""Today against committed baselines."""
