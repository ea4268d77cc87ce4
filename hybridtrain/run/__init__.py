"""Training, exporting and scripts on the virtual card: what verbs do, and what they leave in folders."""
