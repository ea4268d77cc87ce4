"""Which program made the records, and when."""

from hybridvalidation.show.kinds import Section
from hybridvalidation.show.tables import made_by

SECTION = Section(
    order=50,
    parts=lambda view: [made_by((kind, record) for (kind, _), record in sorted(view.run.records.items()))],
)
