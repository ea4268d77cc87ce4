"""What pages of the guide take from the program and its records when the site is built: nothing is typed by hand."""
