"""What a run left behind: one line each, written once."""
