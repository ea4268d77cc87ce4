"""Settings of the CUDA caching allocator and its size rules, each a pure function of a size.

The limits of the settings are those of torch 2.13, the size rules those of
``c10/cuda/CUDACachingAllocator.cpp``, torch main of 2026. All sizes are bytes.
"""

from dataclasses import dataclass, fields

from hybridtrain.units import MIB

MIN_BLOCK_BYTES = 512
SMALL_LIMIT_BYTES = MIB
"""Largest rounded size that the small pool serves."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_LARGE_BYTES = 10 * MIB
"""Rounded size from which a request gets its own segment."""
SEGMENT_STEP_BYTES = 2 * MIB
"""Own-size segments are rounded up to this, the page size of the card."""
_SIZES = frozenset({"large_segment_size", "max_split_size", "max_non_split_rounding"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """The settings of ``PYTORCH_ALLOC_CONF``, with the same limits.

        >>> AllocatorConfig(expandable_segments=True, max_split_size=64 * 2**20).to_environment()
        'expandable_segments:True,max_split_size_mb:64'

    Raises:
        ValueError: A value that torch would refuse too.
    """

    expandable_segments: bool = False
    """Grow one address range per stream and pool page by page, instead of one segment per request."""
    large_segment_size: int = LARGE_SEGMENT_BYTES
    """Size of shared segments for requests from 1 to 10 MiB, and of large expandable pages. Bytes, whole MiB."""
    max_split_size: int | None = None
    """Blocks of this size or more are never split. Bytes, whole MiB; None: no limit."""
    max_non_split_rounding: int = LARGE_SEGMENT_BYTES
    """An unsplittable block may exceed the request by less than this. Bytes, whole MiB."""
    roundup_power2_divisions: int = 0
    """Round sizes up to the next 1/n step between two powers of two; 0 or 1: off."""
    garbage_collection_threshold: float = 0.0
    """Fraction of the capacity above which old cached segments are released before new ones are allocated; 0: off."""

    def __post_init__(self) -> None:
        """Check the settings as torch does."""
        _require_whole_mib("large_segment_size", self.large_segment_size)
        if self.large_segment_size <= MIN_LARGE_BYTES:
            raise ValueError(
                f"large_segment_size: {self.large_segment_size} is too small; allowed are sizes above "
                f"{MIN_LARGE_BYTES}."
            )
        if self.expandable_segments and self.large_segment_size % SEGMENT_STEP_BYTES:
            raise ValueError(
                f"large_segment_size: {self.large_segment_size} cannot be mapped; with expandable_segments it must be "
                f"a multiple of {SEGMENT_STEP_BYTES}, the page size of the card."
            )
        if self.max_split_size is not None:
            _require_whole_mib("max_split_size", self.max_split_size)
            self._require_segment_size("max_split_size", self.max_split_size)
        _require_whole_mib("max_non_split_rounding", self.max_non_split_rounding)
        # The default stays 20 MiB even when larger segments are set, as in torch.
        if self.max_non_split_rounding != LARGE_SEGMENT_BYTES:
            self._require_segment_size("max_non_split_rounding", self.max_non_split_rounding)
        if self.roundup_power2_divisions < 0 or self.roundup_power2_divisions.bit_count() > 1:
            raise ValueError(f"roundup_power2_divisions: {self.roundup_power2_divisions} must be a power of two.")
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise ValueError(
                f"garbage_collection_threshold: {self.garbage_collection_threshold} must be 0 (off) or between 0 and 1."
            )

    def _require_segment_size(self, name: str, value: int) -> None:
        if value < self.large_segment_size:
            raise ValueError(
                f"{name}: {value} is too small; it must be at least large_segment_size, {self.large_segment_size}."
            )

    def allows_reuse(self, size: int, block_size: int) -> bool:
        """Return whether a cached block may serve a rounded size: oversize blocks serve only oversize requests."""
        limit = self.max_split_size
        if limit is None:
            return True
        if size < limit:
            return block_size < limit
        return block_size < size + self.max_non_split_rounding

    def splits(self, size: int, remaining: int, *, is_small: bool) -> bool:
        """Return whether a block that serves ``size`` bytes returns its ``remaining`` bytes to the pool."""
        if is_small or self.expandable_segments:
            return remaining >= MIN_BLOCK_BYTES
        return remaining > SMALL_LIMIT_BYTES and (self.max_split_size is None or size < self.max_split_size)

    def to_environment(self) -> str:
        """Return these settings as ``PYTORCH_ALLOC_CONF``; empty for the defaults."""
        entries = []
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                is_size = item.name in _SIZES
                entries.append(f"{item.name}_mb:{value // MIB}" if is_size else f"{item.name}:{value}")
        return ",".join(entries)


def round_size(size: int, divisions: int = 0) -> int:
    """Return the block size for a request of ``size`` bytes, 1 or more.

    Args:
        size: Requested bytes.
        divisions: ``roundup_power2_divisions``; it acts only on sizes above 512 times itself, so that every
            result stays a multiple of 512.
    """
    if divisions > 1 and size > MIN_BLOCK_BYTES * divisions:
        step = (1 << (size.bit_length() - 1)) // divisions
        return -(-size // step) * step
    return (size + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


def segment_size(size: int, large_segment_size: int = LARGE_SEGMENT_BYTES) -> int:
    """Return the segment size requested from the driver for a rounded ``size``."""
    if size <= SMALL_LIMIT_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return large_segment_size
    return -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


def _require_whole_mib(name: str, value: int) -> None:
    if value <= 0 or value % MIB:
        raise ValueError(f"{name}: {value} is not allowed; torch takes whole MiB, multiples of {MIB}.")
