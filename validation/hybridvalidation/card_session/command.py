"""The ``evidence`` verb: everything a CUDA card can tell within a few minutes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hybridtrain.errors import HybridTrainError
from hybridtrain.memory.tier import available_host_bytes
from hybridtrain.profiler.nvml import DeviceReadError, identify_device, open_device_reader
from hybridtrain.units import GIB, format_bytes
from hybridvalidation.card_session.child import WorkerProcess
from hybridvalidation.card_session.parts import PAIR_STACKS, all_parts, choose_parts
from hybridvalidation.card_session.record import EvidenceRecord, append_evidence, read_evidence
from hybridvalidation.card_session.runner import EvidenceRun, Session
from hybridvalidation.card_session.table import write_evidence
from hybridvalidation.records.environment import read_environment
from hybridvalidation.scenario_files import ScenarioFiles, default_folder

NO_CARD = (
    "no CUDA card: nothing was measured; run this on a machine with one, with a torch built for CUDA (nvidia-smi must "
    "list the card)"
)
_BUSY_BYTES = GIB
"""More than this in use by others disturbs times; a desktop takes less."""
_UNKNOWN_HOST_BYTES = 16 * GIB
"""Where the system does not say what is available."""


class NoCard(HybridTrainError):  # noqa: N818  a state of the machine; the name is part of the answer
    """There is no card to measure on, or too little of it is free."""


def measure_card(
    *, minutes: float, only: Sequence[str], scenarios: Path | None, results: Path, say: Callable[[str], None]
) -> tuple[list[EvidenceRecord], list[Path]]:
    """Measure, record each part at once and write the table.

    Args:
        minutes: Parts that do not fit any more are recorded as skipped.
        only: Names of parts; empty: all.
        scenarios: Folder of scenario files; None: the default one.
        results: Folder of records and tables.
        say: Told of every part.

    Returns:
        The records made and the files written.

    Raises:
        NoCard: nothing was measured.
        ConfigError: a part is unknown, a file is faulty.
    """
    files = ScenarioFiles(scenarios or default_folder())
    stacks = [files.stack(name) for name in files.stack_names() if name in PAIR_STACKS]
    parts = choose_parts(list(all_parts(stacks)), only)
    if not torch.cuda.is_available():
        raise NoCard(NO_CARD)
    records = results / "records"
    earlier = read_evidence(records)  # a damaged file is told now, not after the run
    made: list[EvidenceRecord] = []

    def on_record(record: EvidenceRecord) -> None:
        append_evidence(records, record)
        made.append(record)
        write_evidence([*earlier, *made], results)

    session = _session(minutes, on_record, say)
    smallest = min((part.cap_bytes for part in parts), default=0)
    used = session.used_bytes() or 0
    if session.total_bytes - used < smallest * 9 // 10:
        raise NoCard(
            f"{format_bytes(used)} of the {format_bytes(session.total_bytes)} of {session.card} are in use, and the "
            f"smallest part wants {format_bytes(smallest)}: nothing was measured; end the other programs, or take a "
            f"larger card"
        )
    if used > _BUSY_BYTES:
        say(f"other programs hold {format_bytes(used)} of {session.card}: times will be longer than on an idle card")
    EvidenceRun(session).run(parts)
    return made, [records / "evidence.jsonl", *write_evidence([*earlier, *made], results)]


def _session(minutes: float, on_record: Callable[[EvidenceRecord], None], say: Callable[[str], None]) -> Session:
    properties = torch.cuda.get_device_properties(0)  # makes no context: the card stays as it is
    return Session(
        card=properties.name, total_bytes=properties.total_memory, used_bytes=_used_bytes,
        host_bytes=available_host_bytes() or _UNKNOWN_HOST_BYTES,
        environment=read_environment(),
        budget_s=60 * minutes, start=WorkerProcess, on_record=on_record, say=say,
    )  # fmt: skip


def _used_bytes() -> int | None:
    """Return the memory of the whole card in use, None where neither NVML nor nvidia-smi answers."""
    try:
        reader = open_device_reader(identify_device(0))
    except DeviceReadError:
        return None
    try:
        return reader.read().used_bytes
    finally:
        reader.close()
