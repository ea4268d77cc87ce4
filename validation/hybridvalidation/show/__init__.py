"""From records to tables, pages and the HTML site."""
