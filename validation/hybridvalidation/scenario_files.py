"""Finding and reading scenario, stack and target files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridtrain.config.decode import load_toml
from hybridtrain.errors import ConfigError, unknown_name
from hybridtrain.phase import Phase
from hybridtrain.stacks import StackFiles, stack_folder
from hybridvalidation.scenario import Scenario, Target, TargetFile


@dataclass(frozen=True, slots=True)
class ScenarioFiles(StackFiles):
    """A folder with scenario files, ``stacks/`` and optionally ``targets.toml``."""

    def scenario_names(self) -> list[str]:
        """Return the names of all scenario files."""
        return sorted(path.stem for path in self.folder.glob("*.toml") if path.stem != "targets")

    def scenario(self, name: str) -> Scenario:
        """Read a scenario by name, or by path ending in ``.toml``; checks stacks and targets too.

        Raises:
            ConfigError: every fault at once.
        """
        path = self.path_of(name, self.folder, self.scenario_names(), "scenario")
        scenario = load_toml(Scenario, path)
        faults = [
            f"$.stacks: {unknown_name('stack', stack, self.stack_names())}"
            for stack in scenario.stacks
            if stack not in self.stack_names()
        ]
        known = self.targets()
        faults += [
            f"$.targets[{position}].id: {unknown_name('target', target.id, known)}"
            for position, target in enumerate(scenario.targets)
            if target.id not in known
        ]
        faults += self._batch_faults(scenario) if not faults else []
        if faults:
            raise ConfigError(str(path), faults)
        return scenario

    def targets(self) -> dict[str, Target]:
        """Read all stated figures; none without ``targets.toml``."""
        path = self.folder / "targets.toml"
        targets = {target.id: target for target in load_toml(TargetFile, path).target} if path.exists() else {}
        if faults := [fault for target in targets.values() for fault in _range_faults(target)]:
            raise ConfigError(str(path), faults)
        return targets

    def _batch_faults(self, scenario: Scenario) -> list[str]:
        faults = []
        for name in scenario.stacks:
            steps = self.stack(name).plan().for_phase(Phase.FULL).grad_accum_steps
            sizes = {"workload": scenario.workload_of(name).batch_size}
            if scenario.accuracy is not None and scenario.trains(name):
                sizes["accuracy"] = scenario.accuracy.batch_size
            faults += [
                f"$.{where}.batch_size: {size} must be a multiple of the accumulation steps of stack '{name}' ({steps})"
                for where, size in sizes.items()
                if size % steps
            ]
        return faults


def scenario_folder(folder: Path | None) -> ScenarioFiles:
    """Return the files of a given or the default folder; raises ``ConfigError`` if it is missing."""
    return ScenarioFiles(stack_folder(folder).folder)


def _range_faults(target: Target) -> Iterator[str]:
    """Yield the faults of a stated range beside its bound."""
    ends = (target.low, target.high)
    if ends == (None, None):
        return
    if target.low is None or target.high is None or not target.low < target.high:
        yield f"$.target '{target.id}': low {target.low}, high {target.high}: give both, low below high, or neither"
    elif target.direction in {"min", "max"} and not target.low <= (target.value or 0.0) <= target.high:
        yield f"$.target '{target.id}': value {target.value:g} must be within its stated range"
    elif target.direction == "equal":
        yield f"$.target '{target.id}': low, high: an equality has no range; remove both"
