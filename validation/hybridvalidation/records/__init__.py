"""Records of runs: one line each, written once."""
