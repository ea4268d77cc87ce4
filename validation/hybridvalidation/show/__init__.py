"""From records to tables, plots, reports and files of other viewers."""
