"""A part on the card: a few steps under a cap, and a profiled step for the overlap of copies."""

import json
import math
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hybridtrain.data.batches import BatchSampler, TokenBatch
from hybridtrain.data.corpus import Corpus
from hybridtrain.memory.cuda_transfer import open_transfer
from hybridtrain.memory.transfer import Transfer
from hybridtrain.models.model_config import model_preset
from hybridtrain.plan.placement import Placement
from hybridtrain.trainer import Trainer
from hybridvalidation.experiments.card_session.parts import Part
from hybridvalidation.experiments.card_session.plan import PlannedPart
from hybridvalidation.experiments.card_session.record import CardMeasurements, CopyOverlap
from hybridvalidation.experiments.measure import DeviceUse, cap_memory, num_alloc_retries, run_step

_NEXT_STEP = 1.2
"""A step starts only if this multiple of the last step's time is left."""
_PROFILED_STEP = 3.0
"""Factor for the profiled step, whose trace must be written and read."""


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """An event on the card; times in seconds."""

    name: str
    category: str
    """Category of torch.profiler: ``kernel``, ``gpu_memcpy``, ``gpu_memset``."""
    start_s: float
    duration_s: float

    @property
    def span(self) -> tuple[float, float]:
        """(start, end)."""
        return (self.start_s, self.start_s + self.duration_s)

    def copies(self, direction: str) -> bool:
        """Return whether the event is a copy over the bus, ``HtoD`` or ``DtoH``."""
        return self.category == "gpu_memcpy" and direction in self.name


def copy_overlap(events: Sequence[DeviceEvent]) -> CopyOverlap | None:
    """Return the overlap of bus copies with kernels; None for a trace without events on the card.

    Fills and device-to-device copies count as kernels.
    """
    if not events:
        return None
    ins = [event for event in events if event.copies("HtoD")]
    outs = [event for event in events if event.copies("DtoH")]
    copies = [*ins, *outs]
    kernels = [event for event in events if not (event.copies("HtoD") or event.copies("DtoH"))]
    kernel_s, copy_s = _busy_s(kernels), _busy_s(copies)
    return CopyOverlap(
        window_s=max(event.span[1] for event in events) - min(event.start_s for event in events), kernel_s=kernel_s,
        copy_in_s=_busy_s(ins), copy_out_s=_busy_s(outs), copy_s=copy_s,
        hidden_s=max(0.0, kernel_s + copy_s - _busy_s(events)),
        pageable_s=_busy_s(event for event in copies if "Pageable" in event.name),
        num_kernels=len(kernels), num_copies=len(copies),
    )  # fmt: skip


def _busy_s(events: Iterable[DeviceEvent]) -> float:
    """Return the seconds in which at least one event ran."""
    total, latest = 0.0, -math.inf
    for begin, end in sorted(event.span for event in events):
        total += max(0.0, end - max(begin, latest))
        latest = max(latest, end)
    return total


def read_chrome_trace(path: Path) -> list[DeviceEvent]:
    """Return the card's events from a file of ``torch.profiler``'s ``export_chrome_trace``."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    return [
        DeviceEvent(str(event["name"]), str(event["cat"]), float(event["ts"]) * 1e-6, float(event["dur"]) * 1e-6)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in {"kernel", "gpu_memcpy", "gpu_memset"}
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """A training job and its deadline."""

    part: Part
    planned: PlannedPart
    cap_bytes: int
    """Cap of the card's memory, CUDA context included."""
    context_bytes: int
    host_limit_bytes: int
    used_before_bytes: int | None
    """Used memory of the whole card before this process; None: unknown."""
    limit_s: float
    """Seconds from the start of the process."""


@dataclass(slots=True)
class TrainedPart:
    """Measurements so far, kept after an error."""

    measured: CardMeasurements = field(default_factory=CardMeasurements)
    remark: str = ""

    def add(self, **figures: Any) -> None:
        """Add figures of ``CardMeasurements``."""
        self.measured = replace(self.measured, **figures)


def train_part(job: TrainJob, corpus: Corpus, trained: TrainedPart, begin_s: float) -> None:
    """Train, and write measurements into ``trained``; the process began at ``begin_s`` of ``time.monotonic``.

    Raises:
        torch.OutOfMemoryError: a request exceeded the cap. HostMemoryError: too little host memory. DivergenceError:
        the loss is not finite.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    use = DeviceUse(device, job.used_before_bytes)
    cap_memory(device, job.cap_bytes - job.context_bytes)
    transfer = open_transfer(
        device, disk_folder=Path(tempfile.gettempdir()), host_limit_bytes=job.host_limit_bytes
    )  # fmt: skip
    try:
        trainer = _train(job, corpus, trained, transfer, begin_s + job.limit_s)
        _read_peaks(trained, use, transfer)  # now: the profiler takes memory of the card too
        if job.part.profiles and not trained.remark:
            try:
                _profile(job, corpus, trained, trainer, begin_s + job.limit_s)
            except Exception as error:  # noqa: BLE001  the steps are measured; some machines refuse profilers
                trained.remark = f"not profiled: {error}"
    except BaseException:
        with suppress(RuntimeError):  # of a device that failed; what failed is told already
            _read_peaks(trained, use, transfer)
        raise
    finally:
        with suppress(RuntimeError):
            transfer.close()
        use.close()


def _train(job: TrainJob, corpus: Corpus, trained: TrainedPart, transfer: Transfer, deadline_s: float) -> Trainer:
    begin = time.perf_counter()
    trainer = Trainer(model_preset(job.part.model), job.planned.stack.plan(), job.planned.stack.training(), transfer)
    torch.cuda.synchronize(transfer.device)
    trained.add(build_s=round(time.perf_counter() - begin, 3))
    for step in range(job.part.num_steps):
        steps = trained.measured.steps
        if steps and time.monotonic() + _NEXT_STEP * steps[-1].seconds > deadline_s:
            trained.remark = f"{len(steps)} of {job.part.num_steps} steps; no time for more"
            break
        trained.add(steps=(*steps, run_step(trainer, _batches(job, corpus, step), transfer.device)))
    return trainer


def _batches(job: TrainJob, corpus: Corpus, step: int) -> list[TokenBatch]:
    planned = job.planned
    sampler = BatchSampler(
        corpus.train, micro_batch_size=planned.micro_batch_size, seq_len=job.part.seq_len, seed=0
    )  # fmt: skip
    return [sampler.batch(step, micro_batch) for micro_batch in range(planned.accum_steps)]


def _profile(job: TrainJob, corpus: Corpus, trained: TrainedPart, trainer: Trainer, deadline_s: float) -> None:
    """Run one more step under the profiler, which records the card's work only."""
    if time.monotonic() + _PROFILED_STEP * trained.measured.steps[-1].seconds > deadline_s:
        trained.remark = "not profiled: no time for it"
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run_step(trainer, _batches(job, corpus, job.part.num_steps), trainer.transfer.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trained.add(overlap=copy_overlap(read_chrome_trace(path)))


def _read_peaks(trained: TrainedPart, use: DeviceUse, transfer: Transfer) -> None:
    """Read the peaks at the end, also after a failed allocation."""
    trained.add(
        outside_bytes=use.outside_bytes(), num_alloc_retries=num_alloc_retries(transfer.device),
        host_bytes=transfer.host_bytes + transfer.tiers.peak_bytes(Placement.HOST),
        disk_bytes=transfer.tiers.peak_bytes(Placement.DISK),
    )  # fmt: skip
