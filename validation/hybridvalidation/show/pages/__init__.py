"""Pages of records that belong to no scenario."""
