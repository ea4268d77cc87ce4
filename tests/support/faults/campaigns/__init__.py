"""One campaign a file, found by being there."""
