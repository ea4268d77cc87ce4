"""Cards, the links between them, and how long a step lasts on them."""
