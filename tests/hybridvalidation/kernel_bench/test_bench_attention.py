"""``hybridtrain bench attention``, end to end."""

import json
from pathlib import Path

import pytest

from hybridtrain.cli.main import main
from hybridvalidation.kernel_bench.attention_lengths import read_attention


def test_it_plans_records_and_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "flash-attention-saving" in text
    assert len(read_attention(tmp_path / "records")) == 1
    assert "gpt2-small at 1024 tokens" in (tmp_path / "tables" / "attention.md").read_text()
    assert main(["bench", "attention", "--json", "--results", str(tmp_path)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert {verdict["target"] for verdict in content["verdicts"]} == {"flash-attention-saving", "flash-attention-cost"}
    assert len(read_attention(tmp_path / "records")) == 2


def test_a_damaged_record_is_told_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records" / "attention.jsonl"
    path.parent.mkdir()
    path.write_text('{"half":\n')
    assert main(["bench", "attention", "--results", str(tmp_path)]) == 1
    assert "attention.jsonl" in capsys.readouterr().err
    assert path.read_text() == '{"half":\n'
