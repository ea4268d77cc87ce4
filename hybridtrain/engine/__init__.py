"""One executor for every plan: an explicit loop over blocks, autograd inside each block."""
