"""The card that is not there: allocator, snapshots and traces of a planned run, without a GPU."""
