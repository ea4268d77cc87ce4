"""Answers of fit, recommend, dry-run and virtual, as text and as JSON; the guide on a terminal."""
