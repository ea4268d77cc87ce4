"""What children are asked to do in tests of the processes themselves."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """A job, and an answer."""

    values: tuple[float, ...]
    name: str = ""


def double(job: Numbers) -> Numbers:
    sys.stdout.write("doubling\n")
    sys.stderr.write(f"{job.name}\n")
    return Numbers(values=tuple(2 * value for value in job.values), name=os.environ.get("OMP_NUM_THREADS", ""))


def fail(job: Numbers) -> Numbers:
    raise ValueError(f"no such file: {Path(__file__)} {job.name}")


def die(_job: Numbers) -> Numbers:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def sleep(job: Numbers) -> Numbers:
    Path(job.name).write_text(str(os.getpid()))
    time.sleep(600)
    return job
