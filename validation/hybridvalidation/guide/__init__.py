"""Content of the guide that is generated from the program and its records: nothing is typed by hand."""
