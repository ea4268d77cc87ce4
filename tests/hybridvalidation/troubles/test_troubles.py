"""What logs show: each trouble is found in a log that has it, and in no sound one."""

import json
import math
import time
from pathlib import Path

import pytest

from hybridtrain.errors import ConfigError
from hybridtrain.virtual_gpu.card import MARGIN_TOLD
from hybridvalidation.cli.main import main
from hybridvalidation.troubles import diagnose, read_log, troubles, troubles_page

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 23.64 GiB of "
    "which 1.20 GiB is free. Of the allocated memory 18.50 GiB is allocated by PyTorch, and 3.45 GiB is reserved by "
    "PyTorch but unallocated."
)


def ours(losses: list[float], speeds: list[float] | None = None) -> str:
    """Return a log.jsonl of a run of ours."""
    rows = zip(losses, speeds or [1000.0] * len(losses), strict=True)
    return "\n".join(
        json.dumps({"step": step, "loss": loss, "lr": 1e-3, "tokens_per_s": speed})
        for step, (loss, speed) in enumerate(rows, 1)
    )


FALLING = [5 * math.exp(-step / 20) + 2 + 0.05 * (-1) ** step for step in range(60)]
LOGS = {
    "fragmented": OOM.format(asked="2.00 GiB"),
    "card-too-small": "Traceback:\n" + OOM.format(asked="8.00 GiB"),
    "plan-too-large": "NVIDIA GeForce RTX 4090: does not fit, 30 GiB of 23.52 GiB used",
    "host-too-small": "host memory: 3.00 GiB more for optim_state exceed the limit of 60.00 GiB (held: nothing)",
    "cannot-pin": "host memory: 3.00 GiB could not be pinned (CUDA error 2, out of memory)",
    "disk-full": "OSError: [Errno 28] No space left on device: 'run/state.pt'",
    "loss-no-number": ours([*FALLING[:20], math.nan]),
    "loss-rises": ours(FALLING + [loss + 0.5 for loss in FALLING[-20:]]),
    "loss-spikes": ours([*FALLING[:40], 9.0, *FALLING[40:]]),
    "slower-at-once": ours(FALLING, [1000.0] * 30 + [500.0] * 30),
    "slowing-down": ours(FALLING, [1000.0 - 10 * step for step in range(60)]),
    "bound-by-the-bus": "a step takes 7.68 s, bound by transfer",
    "no-compiler": "8-bit update on the CPU: no C compiler found: plain torch, about 100 times slower (install gcc)",
    "triton-missing": "Triton: cannot run here: kernels are torch's own ops, slower",
    "runs-on-the-processor": "AssertionError: Torch not compiled with CUDA enabled",
    "card-not-read": "NVML does not start (Driver Not Loaded); install the NVIDIA driver",
    "empty-profile": "step,phase,elapsed_s,source,used_bytes\n",
    "process-memory-only": "memory profile: 2 snapshots of 2 steps (every step), from process RSS",
    "logger-missing": "TensorBoard: 1 fault\n  it cannot be imported (No module named 'tensorboard')".replace(
        "\n ", ""
    ),
}
NOT_IN_A_LOG = {"worse-than-exact"}
"""What a user notices, and no log shows."""


def names(log: str) -> list[str]:
    return [answer.trouble.name for answer in diagnose(log)]


@pytest.mark.parametrize("name", LOGS)
def test_a_log_says_what_is_wrong(name: str) -> None:
    answer = next(answer for answer in diagnose(LOGS[name]) if answer.trouble.name == name)
    assert answer.line is not None or answer.found.startswith("the figures say: ")
    assert answer.trouble.do


def test_every_trouble_has_a_log_here() -> None:
    assert {trouble.name for trouble in troubles()} == set(LOGS) | NOT_IN_A_LOG


@pytest.mark.parametrize(
    "log",
    [
        ours(FALLING),
        "\n".join(f"{{'loss': {loss:.4f}, 'grad_norm': 0.9, 'epoch': 0.1}}" for loss in FALLING),
        "step 1 loss 2.5 lr 1e-3 1,000 tok/s 3 GiB",
        "NVIDIA GeForce RTX 4090: fits, 3 GiB of 23.52 GiB used",
        f"NVIDIA GeForce RTX 4090: {MARGIN_TOLD} (1.18 GiB), 23 GiB of 23.52 GiB used",
        "",
    ],
    ids=["ours", "transformers", "short", "a plan", "a tight plan", "empty"],
)
def test_a_sound_log_shows_nothing(log: str) -> None:
    assert names(log) == []


def test_other_trainers_losses_are_read_too() -> None:
    lines = [f"{{'loss': {loss:.4f}, 'grad_norm': 0.9}}" for loss in FALLING]
    assert "loss-no-number" in names("\n".join([*lines, "{'loss': nan, 'grad_norm': nan}"]))
    assert "loss-no-number" in names("step 12: train_loss=inf")
    assert names('{"step": 2, "loss": 2.0}\n{"step": 3, "phase": "full", "loss": null}') == ["loss-no-number"]
    assert names('{"step": 3, "phase": "predict", "loss": null}') == []


def test_a_failed_allocation_is_told_with_its_bytes() -> None:
    pieces, small = diagnose(OOM.format(asked="2.00 GiB"))
    assert (pieces.trouble.name, small.trouble.name) == ("fragmented", "card-too-small")
    assert "3.45 GiB" in pieces.found
    assert names(OOM.format(asked="8.00 GiB")) == ["card-too-small"]


def test_losses_beside_others_of_the_same_line_do_not_count() -> None:
    assert names('{"step": 1, "loss": 2.0, "forecast_loss": NaN}') == []


def test_the_page_has_every_trouble_and_command() -> None:
    page = troubles_page()
    for trouble in troubles():
        assert f"### {trouble.name.replace('-', ' ')}" in page
        assert all(command in page for command in trouble.commands)


def test_the_command_reads_a_runs_folder_and_tells_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text(LOGS["loss-no-number"])
    assert main(["doctor", "--from", str(tmp_path)]) == 0
    assert "lower optimizer.lr" in capsys.readouterr().out
    assert main(["doctor", "--from", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["troubles"]
    assert (found["trouble"], found["topic"]) == ("loss-no-number", "Accuracy")
    (tmp_path / "log.jsonl").write_text(ours(FALLING))
    assert main(["doctor", "--from", str(tmp_path)]) == 0
    assert f"nothing wrong found in {len(FALLING)} losses and {len(FALLING)} speeds" in capsys.readouterr().out
    sound = tmp_path / "sound.txt"
    sound.write_text("all is well")
    assert main(["doctor", "--from", str(sound)]) == 1
    assert "nothing in it is known" in capsys.readouterr().out
    assert main(["doctor", "--from", str(tmp_path / "none")]) == 2
    with pytest.raises(ConfigError, match="is no file"):
        read_log(tmp_path / "none")


def test_a_number_of_many_digits_is_read_once() -> None:
    def seconds(count: int) -> float:
        log, begin = f'{{"step": 1, "loss": {count * "9"}, "x": 1}}', time.process_time()
        for _ in range(20):
            diagnose(log)
        return time.process_time() - begin

    few, many = (min(seconds(count) for _ in range(3)) for count in (250, 2000))
    assert many < 64 * few  # 8 times the digits; trying each from each on takes 512 times as long
