"""The ``evidence`` verb: everything a CUDA card can tell within a few minutes."""

import argparse
import json
import sys
from collections.abc import Callable

import torch

from hybridtrain.config.encode import encode
from hybridtrain.memory.tier import available_host_bytes
from hybridtrain.profiler.nvml import DeviceReadError, identify_device, open_device_reader
from hybridtrain.units import GIB, format_bytes
from hybridvalidation.card_session.child import WorkerProcess
from hybridvalidation.card_session.parts import PAIR_STACKS, all_parts, choose_parts
from hybridvalidation.card_session.record import EvidenceRecord, append_evidence, read_evidence
from hybridvalidation.card_session.runner import EvidenceRun, Session
from hybridvalidation.card_session.table import evidence_table, newest_evidence, write_evidence
from hybridvalidation.records.environment import read_environment
from hybridvalidation.records.outcome import Outcome
from hybridvalidation.scenario_files import ScenarioFiles, default_folder
from hybridvalidation.show.tables import TERMINAL

NO_CARD = (
    "no CUDA card: nothing was measured; run this on a machine with one, with a torch built for CUDA (nvidia-smi must "
    "list the card)"
)
_BUSY_BYTES = GIB
"""More than this in use by others disturbs times; a desktop takes less."""
_UNKNOWN_HOST_BYTES = 16 * GIB
"""Where the system does not say what is available."""


def evidence_command(options: argparse.Namespace) -> int:
    """Measure, record each part at once, write the table; 1 without a card or when a part failed."""
    files = ScenarioFiles(options.scenarios or default_folder())
    stacks = [files.stack(name) for name in files.stack_names() if name in PAIR_STACKS]
    parts = choose_parts(list(all_parts(stacks)), options.only)
    if not torch.cuda.is_available():
        return _refuse(options, NO_CARD)
    records = options.results / "records"
    earlier = read_evidence(records)  # a damaged file is told now, not after the run
    made: list[EvidenceRecord] = []

    def on_record(record: EvidenceRecord) -> None:
        append_evidence(records, record)
        made.append(record)
        write_evidence([*earlier, *made], options.results)

    def say(text: str) -> None:
        if not options.json:
            sys.stderr.write(text + "\n")

    session = _session(options.minutes, on_record, say)
    smallest = min((part.cap_bytes for part in parts), default=0)
    used = session.used_bytes() or 0
    if session.total_bytes - used < smallest * 9 // 10:
        return _refuse(
            options,
            f"{format_bytes(used)} of the {format_bytes(session.total_bytes)} of {session.card} are in use, and the "
            f"smallest part wants {format_bytes(smallest)}: nothing was measured; end the other programs, or take a "
            f"larger card",
        )
    if used > _BUSY_BYTES:
        say(f"other programs hold {format_bytes(used)} of {session.card}: times will be longer than on an idle card")
    EvidenceRun(session).run(parts)
    paths = [records / "evidence.jsonl", *write_evidence([*earlier, *made], options.results)]
    if options.json:
        summary = {"records": [encode(record) for record in made], "files": [path.as_posix() for path in paths]}
        sys.stdout.write(json.dumps(summary, allow_nan=False) + "\n")
    else:
        written = ", ".join(path.as_posix() for path in paths)
        sys.stdout.write(f"{evidence_table(newest_evidence(made), TERMINAL)}\n\nWritten: {written}\n")
    return 1 if any(record.outcome is Outcome.ERROR for record in made) else 0


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


def _refuse(options: argparse.Namespace, message: str) -> int:
    if options.json:
        sys.stdout.write(json.dumps({"error": "NoCard", "message": message, "faults": []}) + "\n")
    else:
        sys.stderr.write(f"hybridtrain: {message}\n")
    return 1
