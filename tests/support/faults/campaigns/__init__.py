"""Campaigns, one per file, discovered by their presence."""
