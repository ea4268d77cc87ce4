"""A model of torch's caching allocator, traces replayed through it, and its snapshots."""
