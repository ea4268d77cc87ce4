"""What produces a record: jobs, workers, the runs themselves."""
