"""The command, run in this process."""

import json
from typing import Any

import pytest

from hybridtrain.cli.main import main


class Command:
    """Runs the command in this process and keeps what it wrote."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: str) -> int:
        code = main(arguments)
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Run with ``--json`` and return the one object on standard output; nothing else may be written."""
        assert self(*arguments, "--json") == code, self.out + self.err
        assert self.err == ""
        assert self.out.count("\n") == 1
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found
