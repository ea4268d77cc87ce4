"""The dictionaries of a torch memory snapshot, as in ``torch.cuda.memory._snapshot``. Sizes are bytes."""

from typing import Literal, NotRequired, TypedDict

from hybridtrain.virtual_gpu.allocator_events import Action


class Frame(TypedDict):
    """One stack frame."""

    filename: str
    line: int
    name: str


class SnapshotBlock(TypedDict):
    """A run of bytes in a segment."""

    address: int
    size: int
    requested_size: int
    state: str
    frames: list[Frame]


class SnapshotSegment(TypedDict):
    """Reserved memory in one piece, with blocks that cover it without gaps."""

    device: int
    address: int
    total_size: int
    allocated_size: int
    active_size: int
    requested_size: int
    stream: int
    segment_type: Literal["small", "large"]
    segment_pool_id: tuple[int, int]
    is_expandable: bool
    frames: list[Frame]
    blocks: list[SnapshotBlock]


class TraceEntry(TypedDict):
    """One event. ``size`` is what was requested, or the size of the segment; ``oom`` has no address."""

    action: Action
    addr: NotRequired[int]
    device_free: NotRequired[int]
    size: int
    stream: int
    time_us: int
    compile_context: str
    user_metadata: str
    pool_id: tuple[int, int]
    frames: list[Frame]
    category: NotRequired[str]


class AllocatorSettings(TypedDict):
    """Settings shown by the viewer; -1 stands for an unlimited ``max_split_size``, as torch writes it."""

    PYTORCH_CUDA_ALLOC_CONF: str
    max_split_size: int
    garbage_collection_threshold: float
    expandable_segments: bool
    pinned_num_register_threads: int
    release_lock_on_cudamalloc: bool
    pinned_use_cuda_host_register: bool
    graph_capture_record_stream_reuse: bool
    roundup_power2_divisions: dict[str, int]


class Annotation(TypedDict):
    """A named moment on the time axis."""

    device: int
    time_us: int
    name: str
    stage: str


class Snapshot(TypedDict):
    """The whole file."""

    segments: list[SnapshotSegment]
    device_traces: list[list[TraceEntry]]
    allocator_settings: AllocatorSettings
    external_annotations: list[Annotation]
