"""The report as a folder of HTML pages that needs no network."""
