"""The machine around the card: host memory, its bandwidth, and a disk."""

from dataclasses import dataclass

from hybridtrain.units import GB, GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts about a machine. The defaults are a desktop with two channels of DDR5 and one PCIe 4.0 drive (assumed)."""

    memory_gib: float | None = None
    """None: as much as a run asks for."""
    reserved_gib: float = 4.0
    """Of the memory: what system, libraries and the process itself take beside tensors (assumed)."""
    memory_gbps: float = 60.0
    """GB/s of host memory, read and written together; an update on the host is bound by it."""
    disk_gib: float | None = None
    """Free space; None: as much as a run asks for."""
    disk_gbps: float = 4.0
    """GB/s of the drive, one direction at a time."""

    def __post_init__(self) -> None:
        faults = [
            f"{name}: {value} must be above 0"
            for name in ("memory_gib", "memory_gbps", "disk_gib", "disk_gbps")
            if (value := getattr(self, name)) is not None and value <= 0
        ]
        if self.reserved_gib < 0:
            faults.append(f"reserved_gib: {self.reserved_gib} must be at least 0")
        if self.memory_gib is not None and self.memory_gib <= self.reserved_gib:
            faults.append(f"memory_gib: {self.memory_gib} must be above reserved_gib ({self.reserved_gib})")
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def tensor_bytes(self) -> float:
        """Host memory that tensors may take."""
        return float("inf") if self.memory_gib is None else (self.memory_gib - self.reserved_gib) * GIB

    @property
    def disk_bytes(self) -> float:
        """Space that files may take."""
        return float("inf") if self.disk_gib is None else self.disk_gib * GIB

    @property
    def memory_bytes_per_second(self) -> float:
        """Rate of host memory."""
        return self.memory_gbps * GB

    @property
    def disk_bytes_per_second(self) -> float:
        """Rate of the drive."""
        return self.disk_gbps * GB
