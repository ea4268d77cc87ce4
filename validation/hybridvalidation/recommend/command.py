"""The ``recommend`` verb: from arguments to a question, from the answer to text, JSON or a file."""

import re
from collections.abc import Callable
from pathlib import Path

from hybridtrain.atomic_write import replace_file
from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import Workload, check_workload
from hybridtrain.units import GB, GIB
from hybridtrain.virtual_gpu.card import Host, find_card
from hybridvalidation.recommend.report import RecommendReport
from hybridvalidation.recommend.search import Question, recommend
from hybridvalidation.runs.dry_run_report import read_model
from hybridvalidation.scenario import Scenario
from hybridvalidation.scenario_files import ScenarioFiles, default_folder

_UNITS = {"GiB": GIB, "GB": GB}


def recommend_command(
    *, model: str | None, card: str | None, host_memory: str, seq: int, tokens_per_step: int, scenario: str | None,
    write: Path | None, scenarios: Path | None, say: Callable[[str], None],
) -> RecommendReport:  # fmt: skip
    """Search for the fastest stack that fits, and write it to ``write`` if asked to; ``say`` hears what is tried.

    Raises:
        ConfigError: names, files or sizes are wrong, or neither a scenario nor model and card are given.
        OutOfMemoryError: nothing fits.
    """
    if scenario is None:
        question, name = _question(model, card, host_memory, seq, tokens_per_step)
    else:
        question, name = _of_scenario(ScenarioFiles(scenarios or default_folder()).scenario(scenario))
    report = RecommendReport(answer=recommend(question, lambda text: say(f"trying {text}")), model=name)
    if write is not None:
        replace_file(write, report.as_toml(write.stem).encode())
    return report


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


def _of_scenario(scenario: Scenario) -> tuple[Question, str]:
    work = scenario.workload
    return Question(
        scenario.model.resolve(), scenario.card.resolve(), scenario.host, work.seq_len, work.batch_size
    ), scenario.name


def _question(
    model: str | None, card: str | None, host_memory: str, seq: int, tokens_per_step: int
) -> tuple[Question, str]:
    if model is None or card is None:
        names = [name for name, given in (("model", model), ("card", card)) if given is None]
        raise ConfigError("recommend", [f"--{name}: missing; name one, or give --scenario" for name in names])
    shape = read_model(model)
    check_workload(shape, Workload(micro_batch_size=1, seq_len=seq))
    if tokens_per_step % seq:
        raise ConfigError("--tokens-per-step", [f"{tokens_per_step} must be a multiple of --seq ({seq})"])
    return Question(shape, find_card(card), parse_host(host_memory), seq, tokens_per_step // seq), Path(model).stem
