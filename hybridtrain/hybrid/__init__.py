"""Hybrid predictive training: the cycle of WARMUP, FULL, PREDICT and CORRECT around the trainer."""
