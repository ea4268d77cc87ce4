"""Pictures to point at and zoom into, one idea a file."""
