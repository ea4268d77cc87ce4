"""Check of the atlas: the commands of a few cells are run again. Which ones, a digest of the program decides."""

from pathlib import Path

from hybridtrain.config.encode import encode
from hybridtrain.errors import ConfigError
from hybridtrain.progress import progress_bar
from hybridtrain.run.program import program_digest
from hybridvalidation.experiments.atlas import Atlas, Cell, chosen_cells, read_atlas
from hybridvalidation.experiments.atlas_runs import CheckJob, answer_of_command
from hybridvalidation.gate.gate import Comparison, Finding, GateExit, Order
from hybridvalidation.scenario_files import ScenarioFiles

NAME = "atlas"
_MADE_AGAIN = 6
"""Cells; a second or two each."""


def read_cells(files: ScenarioFiles, order: Order, results: Path) -> Atlas | None:
    """Return the atlas where it is to be compared; raises ``ConfigError`` where it was asked for and has no records."""
    if order.names and NAME not in order.names:
        return None
    found = read_atlas(files.folder, results / "records")
    if found is None and order.names:
        raise ConfigError("gate", [f"{NAME}: it has no records; make them: hybridtrain atlas --record"])
    return found


def compare_atlas(atlas: Atlas, order: Order) -> Comparison:
    """Run a few cells' commands again, and compare. Another program chooses others; outdated models are left out."""
    outdated = atlas.outdated()
    known = [cell for name, record in atlas.records.items() if name not in outdated for cell in record.cells()]
    cells, findings = chosen_cells(known, _MADE_AGAIN, program_digest()), list[Finding]()
    with progress_bar(cells, desc="fit", unit="cell", shown=order.progress) as bar:
        for cell in cells:
            bar.set_postfix_str(cell.name)
            bar.update()
            key = atlas.records[cell.model].key
            job = CheckJob(atlas=key, cell=cell, host_memory=atlas.file.host_memory, in_full=False)
            findings += _findings(cell, answer_of_command(job))
    subject = f"{len(cells)} cells of the atlas"
    return Comparison(subject=subject, findings=findings, notes=_notes(atlas), accept=list)


def _findings(old: Cell, new: Cell) -> list[Finding]:
    if old == new:
        return []
    was, now = encode(old), encode(new)
    changes = "; ".join(f"{name}: {was[name]} -> {now[name]}" for name in was if was[name] != now[name])
    code = GateExit.OVER_BUDGET if old.fits and not new.fits else GateExit.REGRESSED
    if not (old.fits and not new.fits) and new.device_mib <= old.device_mib and new.tokens_per_s >= old.tokens_per_s:
        code = GateExit.IMPROVED
    message = f"{changes}; if it is meant, make the atlas again: hybridtrain atlas --record"
    return [Finding(scenario=NAME, stack=old.name, exit=code, message=message, settled_by_accept=False)]


def _notes(atlas: Atlas) -> list[str]:
    outdated, models = len(atlas.outdated()), len(atlas.file.models)
    others = models - len(atlas.records) + outdated
    if not others:
        return []
    note = f"atlas: {others} of {models} models have no record, or one of an earlier time model"
    return [f"{note}; hybridtrain atlas --record"]
