"""Sections of a scenario's page, one a file."""
