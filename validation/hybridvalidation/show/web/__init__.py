"""Everything that records say, as a folder of pages for a browser, that needs no network."""
