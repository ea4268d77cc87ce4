"""One executor for every plan: an explicit loop over blocks, with autograd inside each block."""
