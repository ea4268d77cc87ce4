"""The memory plan: one small table of tensor classes, and the claims that fill it."""
