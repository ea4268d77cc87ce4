"""Provenance of a record: machine, libraries, commit."""

import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

import hybridtrain
from hybridkernels.adamw_int8 import cpu_backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Provenance of a record. No host names, no paths."""

    python: str
    torch: str
    system: str
    cpu: str
    num_cpus: int
    int8_update: str
    """Backend of the 8-bit update on the CPU."""
    gpu: str
    """Name of the CUDA card, empty without one."""
    cuda: str
    allocator_conf: str
    """PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF."""
    commit: str
    """Commit of the project's checkout; empty outside of one."""
    dirty: bool


def read_environment() -> Environment:
    """Return this process' environment."""
    has_cuda = torch.cuda.is_available()
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        num_cpus=os.cpu_count() or 0,
        int8_update=cpu_backend(),
        gpu=torch.cuda.get_device_name() if has_cuda else "",
        cuda=torch.version.cuda or "",
        allocator_conf=os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "")),
        commit=_git("rev-parse", "HEAD") if is_checkout() else "",
        dirty=bool(uncommitted_files()),
    )


def is_checkout() -> bool:
    """Return whether this program runs from a git checkout, not from installed packages."""
    return bool(_git("ls-files", "hybridtrain/__init__.py"))


def uncommitted_files() -> list[str]:
    """Return the checkout's files outside of results/ that differ from its commit; nothing without a checkout."""
    if not is_checkout():
        return []
    lines = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results").splitlines()
    return [line.split(maxsplit=1)[-1] for line in lines]


def processor_name() -> str:
    """Return name, family, model and stepping of the processor: sold under one name, some differ in instructions."""
    about = _cpu_info()
    return " ".join([_cpu_name(), *(about[name] for name in ("cpu family", "model", "stepping") if name in about)])


def _cpu_name() -> str:
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


@cache
def _cpu_info() -> dict[str, str]:
    """Return what Linux tells of the first core; empty elsewhere."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _git(*arguments: str) -> str:
    return _asked_git(Path(hybridtrain.__file__ or "").parents[1], *arguments)


@cache
def _asked_git(folder: Path, *arguments: str) -> str:
    """Return git's answer about a folder; asked once, because this process keeps the program that it began with."""
    try:
        done = subprocess.run(  # noqa: S603  fixed arguments
            # A run that is stopped kills git, whose lock on the index would stay and keep the user from committing.
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],  # noqa: S607  from the PATH is meant
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def package_version(package: str) -> str:
    """Return an installed package's version; empty if absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
