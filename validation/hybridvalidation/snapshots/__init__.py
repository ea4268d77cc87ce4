"""Memory snapshots that others' cards wrote, replayed in the allocator model: are reserved bytes what they were?

public     scenarios/snapshots/public.toml: which files are known, by the digest of their content
replayed   the record of a replay of those at hand, and the page
moves      by how much the reserved bytes of plans move
"""
