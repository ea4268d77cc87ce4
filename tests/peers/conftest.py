"""What the scripts of others are given: a tokenizer of 64 words, made here, and the command that runs them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["[UNK]", "<s>", "</s>", *(f"w{number}" for number in range(61))]
_COMMAND = "from hybridtrain.cli.main import main; raise SystemExit(main())"


@pytest.fixture
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


@pytest.fixture
def virtual(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a script under ``hybridtrain virtual`` in an empty folder, in a process of its own; return its --json."""

    def run(*script: str) -> dict[str, Any]:
        command = [sys.executable, "-c", _COMMAND, "virtual", "--card", "rtx-4090", "--json", "--", *script]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return run
