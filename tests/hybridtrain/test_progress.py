"""Progress in a log: lines, seldom, and none beside JSON."""

import io
from itertools import count

import pytest

from hybridtrain.progress import LINE_SECONDS, LineFile, progress_bar


def test_a_log_gets_a_line_now_and_then() -> None:
    out, seconds = io.StringIO(), count()  # a second a reading; two readings for a line
    lines = LineFile(out, clock=lambda: float(next(seconds)))
    for step in range(100):
        lines.write(f"\r step {step}   ")
    told = out.getvalue().splitlines()
    assert 2 <= len(told) <= 100 / LINE_SECONDS + 1
    assert told[0] == f"step {int(LINE_SECONDS) - 1}"


def test_a_bar_leaves_nothing_else_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    bar = progress_bar(range(50), shown=True, unit="step")
    for step in bar:
        bar.set_postfix_str(f"loss {step}")
    assert capsys.readouterr().err == ""


def test_nothing_is_shown_beside_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hybridtrain.progress.LINE_SECONDS", 0.0)
    assert list(progress_bar(range(3), shown=False, unit="step")) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    assert list(progress_bar(range(3), shown=True, unit="step")) == [0, 1, 2]
    assert "3" in capsys.readouterr().err
