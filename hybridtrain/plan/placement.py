"""Placements and storage formats of tensor classes."""

from enum import StrEnum


class Placement(StrEnum):
    """Placement of a tensor class between uses."""

    DEVICE = "device"
    HOST = "host"
    """Pinned memory of the host."""
    DISK = "disk"
    """A file in the user's folder."""
    DROPPED = "dropped"
    """Not stored: gradients are used within the backward pass; other classes are not kept in a phase."""


class Codec(StrEnum):
    """The storage format of a tensor class."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8_BLOCKS = "int8_blocks"
    """8-bit codes with one fp32 scale per 256 elements: dynamic map for moments (Dettmers et al., 2110.02861), even and
    symmetric for weights."""
    NF4 = "nf4"
    """Frozen weights only: 4-bit codes of normal quantiles with an 8-bit scale per 64 (Dettmers et al., 2305.14314)."""
    SPLIT16 = "split16"
    """Master only: the low 16 bits of the fp32 value, which complete the bfloat16 weight exactly."""
    ABSENT = "absent"
    """Master and history only: not stored; without a master the stored weights are updated."""
