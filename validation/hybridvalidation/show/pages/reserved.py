"""Snapshots of real cards, replayed in the allocator model."""

from hybridvalidation.experiments.snapshots import write_reserved
from hybridvalidation.show.kinds import Page

PAGE = Page(order=7, group="Evidence", write=lambda files, results: write_reserved(files.folder, results))
