"""Placements and storage formats of tensor classes."""

from enum import StrEnum


class Placement(StrEnum):
    """The place of a tensor class between uses."""

    DEVICE = "device"
    HOST = "host"
    """Pinned memory of the host."""
    DISK = "disk"
    """A file in a folder that the user names."""
    DROPPED = "dropped"
    """Nowhere. The update uses a gradient within the backward pass; other classes are not kept in a phase."""


class Codec(StrEnum):
    """The storage format of a tensor class."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8_BLOCKS = "int8_blocks"
    """8-bit codes with one fp32 scale per 256 elements: of a dynamic map for moments (Dettmers et al., 2110.02861),
    symmetric and evenly spaced for weights."""
    NF4 = "nf4"
    """Frozen weights only: 4-bit codes of normal quantiles, a scale per 64 of them, itself in 8 bits (Dettmers et al.,
    2305.14314)."""
    SPLIT16 = "split16"
    """Master only: the low 16 bits that the bfloat16 weight lacks; together they are the exact fp32 master."""
    ABSENT = "absent"
    """Master and history only: there is none; without a master the stored weights themselves are updated."""
