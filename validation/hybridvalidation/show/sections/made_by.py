"""Which program made the records, and when."""

from hybridvalidation.records.makers import made_by
from hybridvalidation.show.kinds import Section

SECTION = Section(
    order=50,
    parts=lambda view: [made_by((kind, record) for (kind, _), record in sorted(view.run.records.items()))],
)
