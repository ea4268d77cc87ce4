"""The answer of ``hybridtrain virtual``, as text and as data, from one run in this process."""

import json
from typing import Any
from unittest import mock

from hybridtrain.cli.main import main
from hybridtrain.cli.shared import Answer
from hybridtrain.run import virtual_run
from hybridtrain.run.second_run import Begin, WholeRun, run_whole
from hybridtrain.virtual_gpu import VirtualGpu
from hybridtrain.virtual_gpu.facade.launchers import PythonCommand


def virtual_answer(*arguments: str) -> tuple[str, dict[str, Any]]:
    """Run ``hybridtrain virtual`` and return its answer as it is printed, without and with ``--json``.

    The second run, of a script that fills the card, is made in this process: a new one takes seconds to import torch.
    """
    found: list[Answer] = []

    def keep(answer: Answer, *, as_json: bool) -> int:  # noqa: ARG001  both forms are kept
        found.append(answer)
        return answer.code

    with mock.patch.object(Answer, "show", keep), mock.patch.object(virtual_run, "second_run", _run_here):
        main(["virtual", *arguments])
    (answer,) = found
    return answer.text, json.loads(json.dumps(answer.content, allow_nan=False))


def _run_here(python: PythonCommand, gpu: VirtualGpu, _begin: Begin, failed_step: int) -> WholeRun:
    return run_whole(python, gpu, failed_step)
