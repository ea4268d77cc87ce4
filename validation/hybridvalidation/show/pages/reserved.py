"""Snapshots of real cards, replayed in the allocator model."""

from hybridvalidation.show.kinds import Page
from hybridvalidation.snapshots.replayed import write_reserved

PAGE = Page(order=7, group="Evidence", write=lambda files, results: write_reserved(files.folder, results))
