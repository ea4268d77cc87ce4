"""Pictures of a scenario, one a file."""
