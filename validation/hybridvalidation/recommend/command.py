"""The ``recommend`` verb: from arguments to a question, from the answer to text, JSON or a file."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

from hybridtrain.atomic_write import replace_file
from hybridtrain.dry_run import Workload, check_workload
from hybridtrain.errors import ConfigError
from hybridtrain.units import GB, GIB
from hybridtrain.virtual_gpu.card import Host, find_card
from hybridvalidation.recommend.report import RecommendReport
from hybridvalidation.recommend.search import Question, recommend
from hybridvalidation.runs.dry_run_report import read_model
from hybridvalidation.scenario_files import ScenarioFiles, default_folder

_UNITS = {"GiB": GIB, "GB": GB}


def recommend_command(options: argparse.Namespace) -> int:
    """Search, print the answer, write the stack if asked to."""
    question, model = _question(options)
    report = RecommendReport(answer=recommend(question, _say(options)), model=model)
    if options.write is not None:
        replace_file(options.write, report.as_toml(options.write.stem).encode())
    sys.stdout.write((json.dumps(report.as_mapping()) if options.json else report.as_text()) + "\n")
    return 0


def parse_size(text: str, path: str) -> int:
    """Return bytes of a size like ``64GiB`` or ``128GB``; raises ``ConfigError``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB)", text)
    if found is None or float(found[1]) <= 0:
        raise ConfigError(path, [f"'{text}' must be a size above 0 with a unit, as 64GiB or 128GB"])
    return int(float(found[1]) * _UNITS[found[2]])


def parse_host(memory: str) -> Host:
    """Return a machine with that much memory; raises ``ConfigError``."""
    size = parse_size(memory, "--host-memory")
    try:
        return Host(memory_gib=size / GIB)
    except ValueError as error:
        raise ConfigError("--host-memory", str(error).splitlines()) from error


def _question(options: argparse.Namespace) -> tuple[Question, str]:
    if options.scenario is not None:
        scenario = ScenarioFiles(options.scenarios or default_folder()).scenario(options.scenario)
        work = scenario.workload
        return Question(
            scenario.model.resolve(), scenario.card.resolve(), scenario.host, work.seq_len, work.batch_size
        ), scenario.name
    missing = [f"--{name}: missing; name one, or give --scenario" for name in ("model", "card")
               if getattr(options, name) is None]  # fmt: skip
    if missing:
        raise ConfigError("recommend", missing)
    model = read_model(options.model)
    check_workload(model, Workload(micro_batch_size=1, seq_len=options.seq))
    if options.tokens_per_step % options.seq:
        raise ConfigError(
            "--tokens-per-step", [f"{options.tokens_per_step} must be a multiple of --seq ({options.seq})"]
        )
    host = parse_host(options.host_memory)
    count = options.tokens_per_step // options.seq
    return Question(model, find_card(options.card), host, options.seq, count), Path(options.model).stem


def _say(options: argparse.Namespace) -> Callable[[str], None]:
    def say(text: str) -> None:
        if not options.json:
            sys.stderr.write(f"trying {text}\n")

    return say
