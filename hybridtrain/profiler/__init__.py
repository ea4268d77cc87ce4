"""What is held, by whom, and when."""
