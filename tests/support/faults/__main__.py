"""``python -m faults [NAME ...]``: run campaigns, record their outcomes, rebuild their page."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from faults.campaign import Campaign, Order, campaigns
from hybridtrain.errors import ConfigError, HybridTrainError, unknown_name
from hybridtrain.run.environment import read_environment
from hybridtrain.run.program import program_digest
from hybridvalidation.records.faults import FaultRecord, append_faults
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.report import write_pages


def run_campaign(campaign: Campaign, *, seed: int, count: int, results: Path) -> FaultRecord:
    """Run a campaign in a folder that is removed at its end, and append its record below ``results``."""
    started, begin = datetime.now(UTC), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"hybridtrain-faults-{campaign.name}-") as folder:
        tally = campaign.run(Order(seed=seed, count=count, folder=Path(folder), say=_say))
    record = FaultRecord(
        key=campaign.name, evidence=Evidence.EXECUTED, started_at=started.isoformat(timespec="seconds"),
        duration_s=round(time.perf_counter() - begin, 1), environment=read_environment(),
        program=program_digest(), says=campaign.description, seed=seed, counts=tally.counts,
        num_faults=tally.num_faults, first_faults=tuple(tally.faults),
    )  # fmt: skip
    append_faults(results / "records", record)
    done = f"{tally.num_attempts} attempts in {record.duration_s:.0f} s"
    _say(f"{campaign.name}: {done}, {tally.num_faults} failed")
    return record


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run campaigns; return exit code 1 when an attempt failed, 2 for wrong arguments."""
    known = campaigns()
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--count", type=int, help="attempts; default: those of each campaign's long form")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of records and tables")
    given = parser.parse_args(arguments)
    try:
        if unknown := [name for name in given.names if name not in known]:
            raise ConfigError("faults", [unknown_name("campaign", name, known) for name in unknown])
        done = [
            run_campaign(known[name], seed=given.seed, count=given.count or known[name].count, results=given.results)
            for name in given.names or known
        ]
        paths = write_pages("faults", ScenarioFiles(Path("scenarios")), given.results)
    except HybridTrainError as error:
        _say(f"faults: {error}")
        return 2
    for line in (fault for record in done for fault in record.first_faults):
        _say(line)
    _say(f"Written: {', '.join(map(str, paths))}")
    return 1 if any(record.num_faults for record in done) else 0


if __name__ == "__main__":
    sys.exit(main())
