"""Stack files: named lists of optimizations, and the folder they are read from."""

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtrain.config.decode import Unions, load_toml
from hybridtrain.errors import ConfigError, PlanConflictError, unknown_name
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.optimizations.grad_accumulation import with_accumulation
from hybridtrain.plan.compose import Optimization, compose
from hybridtrain.plan.memory_plan import MemoryPlan

if TYPE_CHECKING:
    from hybridtrain.trainer_config import TrainerConfig

STACK_UNIONS: Unions = {Optimization: OPTIMIZATIONS}
RESULTS = Path("results")
"""Default folder of records, tables and plots."""


def name_faults(name: str) -> list[str]:
    """Return a fault for a name that is not a valid file name, as records, tables and plots use it."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return []
    return [f"name: '{name}' must consist of letters, digits, '.', '_' and '-', and begin with a letter or digit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One stack file: a named list of optimizations."""

    name: str
    """Name in commands and tables."""
    description: str
    """A description in a line."""
    optimizer: str = "adamw"
    """``kind`` of the optimizer that the stack is meant for, with its default settings."""
    optimizations: tuple[Optimization, ...] = ()
    """Optimizations, a table each, in any order."""

    def __post_init__(self) -> None:
        faults = name_faults(self.name)
        from hybridtrain.optim import OPTIMIZERS  # noqa: PLC0415  needs torch, which names and help do without

        if self.optimizer not in OPTIMIZERS:
            faults.append(f"optimizer: {unknown_name('optimizer', self.optimizer, sorted(OPTIMIZERS))}")
        if faults:
            raise ValueError("\n".join(faults))
        self.plan()

    def plan(self, grad_accum_steps: int | None = None) -> MemoryPlan:
        """Return the composed plan, with another number of micro-batches if one is given.

        Raises:
            PlanConflictError: the stack contradicts itself, or cannot accumulate so many.
        """
        try:
            optimizations = with_accumulation(self.optimizations, grad_accum_steps)
        except ValueError as error:
            raise PlanConflictError(str(error)) from error
        return compose(optimizations)

    def training(self, lr: float | None = None) -> "TrainerConfig":
        """Return the optimizer with its default settings, or at another learning rate."""
        from hybridtrain.optim import OPTIMIZERS  # noqa: PLC0415  as above
        from hybridtrain.trainer_config import TrainerConfig  # noqa: PLC0415  as above

        optimizer = OPTIMIZERS[self.optimizer]
        return TrainerConfig(optimizer=optimizer() if lr is None else optimizer(lr=lr))


def default_folder() -> Path:
    """Return ``scenarios`` of the working folder if it is there, else the project's own."""
    return _own_or_shipped(Path("scenarios"), "stacks")


def evidence_folder(results: Path) -> Path:
    """Return the folder to read records in: the project's own ones where ``results`` is the default and not there."""
    return _own_or_shipped(results, "records") if results == RESULTS else results


def _own_or_shipped(own: Path, holds: str) -> Path:
    """Return a folder, or that of the same name in the checkout or the wheel; ``holds``: what makes it one."""
    return next((folder for folder in (own, *shipped_folders(own.name)) if (folder / holds).is_dir()), own)


def shipped_folders(name: str) -> tuple[Path, Path]:
    """Return where a folder of the project's own may lie: in the checkout, and as the wheel installs it."""
    return Path(__file__).parents[1] / name, Path(sysconfig.get_path("data"), "share", "hybridtrain", name)


@dataclass(frozen=True, slots=True)
class StackFiles:
    """A folder with ``stacks/``."""

    folder: Path

    def stack_names(self) -> list[str]:
        """Return the names of all stack files."""
        return sorted(path.stem for path in (self.folder / "stacks").glob("*.toml"))

    def stack(self, name: str) -> Stack:
        """Read a stack by name, or by path when ``name`` ends in ``.toml``."""
        path = self.path_of(name, self.folder / "stacks", self.stack_names(), "stack")
        return load_toml(Stack, path, unions=STACK_UNIONS)

    def path_of(self, name: str, folder: Path, names: list[str], kind: str) -> Path:
        """Return the path of a file by its name, or the path that ``name`` is; raises ``ConfigError``."""
        if name.endswith(".toml"):
            return Path(name)
        if name not in names:
            raise ConfigError(str(folder), [unknown_name(kind, name, names)])
        return folder / f"{name}.toml"


def stack_folder(folder: Path | None) -> StackFiles:
    """Return the files of a given or the default folder.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = folder or default_folder()
    if not folder.is_dir():
        raise ConfigError(str(folder), ["no such folder; --scenarios names one with scenario files and stacks/"])
    return StackFiles(folder)
