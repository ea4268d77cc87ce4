"""Where a record was made: machine, libraries, commit; and a digest of the source that made it."""

import hashlib
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import hybridkernels
import hybridtrain
from hybridkernels.adamw_int8 import cpu_backend

_FIGURE_MODULES = tuple(
    f"runs/{name}.py" for name in ("accuracy", "equivalence", "execute", "figures", "measure", "worker")
)
"""Files of this package that make figures; the others only judge and show them."""


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
    """Of the project's checkout, empty outside of one."""
    dirty: bool
    source_digest: str


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
        commit=_git("rev-parse", "HEAD"),
        dirty=bool(_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")),
        source_digest=source_digest(),
    )


@cache
def source_digest() -> str:
    """Return a digest of every source file that can change a figure: trainer, kernels, and what runs and reads them."""
    digest = hashlib.sha256()
    for name in _FIGURE_MODULES:
        digest.update(f"hybridvalidation/{name}\0".encode())
        digest.update(Path(__file__).parents[1].joinpath(name).read_bytes())
    for package in (hybridkernels, hybridtrain):
        folder = Path(package.__file__ or "").parent
        for path in sorted(folder.rglob("*")):
            if path.suffix in {".py", ".c", ".toml"}:
                digest.update(f"{package.__name__}/{path.relative_to(folder).as_posix()}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*arguments: str) -> str:
    folder = Path(hybridtrain.__file__ or "").parents[1]
    try:
        done = subprocess.run(  # noqa: S603  fixed arguments
            ["git", "-C", str(folder), *arguments],  # noqa: S607  git from the PATH is what is meant
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
