"""Cards, the links between them, and the time of a step on them."""
