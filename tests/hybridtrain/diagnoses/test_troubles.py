"""What logs show: each trouble is found in a log that has it, and in no sound one."""

import json
import math
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtrain.cli.main import main
from hybridtrain.diagnoses import diagnose, read_log, troubles, troubles_page, unknown_error
from hybridtrain.diagnoses.allocation import failed_allocation
from hybridtrain.diagnoses.diagnosis import plain_part
from hybridtrain.errors import ConfigError
from hybridtrain.units import format_bytes
from hybridtrain.virtual_gpu.cards.card import MARGIN_TOLD


def pasted(name: str) -> list[tuple[str, str, str]]:
    """Return the logs of a file, each as its likely cause ("healthy": none), its remark and its text.

    Words and figures are made up, in the shapes that torch, transformers, DeepSpeed, torchrun, bash and others print.
    Those held out were written after reports in public before the signs that now find them.
    """
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    parts = re.split(r"^=== ([\w-]+)(.*)\n", text, flags=re.MULTILINE)
    return list(zip(parts[1::3], parts[2::3], parts[3::3], strict=True))


PASTED = pasted("logs.txt") + pasted("runs.txt")


def ours(losses: list[float], speeds: list[float] | None = None) -> str:
    """Return a log.jsonl of a run of ours."""
    rows = zip(losses, speeds or [1000.0] * len(losses), strict=True)
    return "\n".join(
        json.dumps({"step": step, "loss": loss, "lr": 1e-3, "tokens_per_s": speed})
        for step, (loss, speed) in enumerate(rows, 1)
    )


FALLING = [5 * math.exp(-step / 20) + 2 + 0.05 * (-1) ** step for step in range(60)]
LOGS = {
    "plan-too-large": "NVIDIA GeForce RTX 4090: does not fit, 30 GiB of 23.52 GiB used",
    "host-too-small": "host memory: 3.00 GiB more for optim_state exceed the limit of 60.00 GiB (in use: nothing)",
    "cannot-pin": "host memory: 3.00 GiB could not be pinned (CUDA error 2, out of memory)",
    "disk-full": "OSError: [Errno 28] No space left on device: 'run/state.pt'",
    "loss-no-number": ours([*FALLING[:20], math.nan]),
    "loss-rises": ours(FALLING + [loss + 0.5 for loss in FALLING[-20:]]),
    "loss-spikes": ours([*FALLING[:40], 9.0, *FALLING[40:]]),
    "slower-at-once": ours(FALLING, [1000.0] * 30 + [500.0] * 30),
    "slowing-down": ours(FALLING, [1000.0 - 10 * step for step in range(60)]),
    "bound-by-the-bus": "a step takes 7.68 s, bottleneck: transfer",
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


def text_of(cause: str) -> str:
    return next(text for first, _, text in PASTED if first == cause)


def names(log: str) -> list[str]:
    return [answer.trouble.name for answer in diagnose(log)]


@pytest.mark.parametrize("name", LOGS)
def test_a_log_says_what_is_wrong(name: str) -> None:
    answer = next(answer for answer in diagnose(LOGS[name]) if answer.trouble.name == name)
    assert answer.line is not None or answer.found.startswith("the figures say: ")
    assert answer.trouble.do


def test_every_trouble_has_a_log_here() -> None:
    shown = {first for first, _, _ in PASTED} - {"healthy"}
    assert {trouble.name for trouble in troubles()} == {*LOGS, *shown} | NOT_IN_A_LOG


@pytest.mark.parametrize(("first", "text"), [(first, text) for first, _, text in PASTED])
def test_a_pasted_log_shows_its_likely_cause_first_and_a_healthy_one_none(first: str, text: str) -> None:
    found = names(text)
    assert (found == [] and not unknown_error(text, [])) if first == "healthy" else found[:1] == [first]
    assert len(found) <= 3
    assert names(f"\x1b[31m{text}\x1b[0m".replace("\n", "\r\n")) == found


def test_the_first_failure_counts_not_what_it_brought_about() -> None:
    killed, memory = text_of("host-killed"), text_of("first-optimizer-step")
    assert names(memory + killed)[0] == "first-optimizer-step"


def test_what_a_sign_matches_has_its_plain_part() -> None:
    assert plain_part(r"^(?!.*a).*(?:x|y) out of memory(?!s?)\b") == " out of memory"
    assert plain_part(r"ab?c{2} Long[^)]er\.") == " long"
    assert plain_part("one|another") == ""
    lines = {line for log in (*LOGS.values(), *(text for _, _, text in PASTED)) for line in log.splitlines()}
    for sign in (sign for trouble in troubles() for sign in trouble.signs):
        matches, part = re.compile(sign, re.IGNORECASE).search, plain_part(sign)
        assert not [line for line in lines if part not in line.lower() and matches(line)], sign


SIZES = st.integers(2**20, 2**37)


@given(asked=SIZES, capacity=SIZES, free=SIZES, allocated=SIZES, unused=SIZES, gpu=st.integers(0, 15))
def test_both_formats_of_torchs_message_say_the_same(**sizes: int) -> None:
    told = {name: format_bytes(size) for name, size in sizes.items()} | {"gpu": sizes["gpu"]}
    told["reserved"] = format_bytes(sizes["allocated"] + sizes["unused"])
    old = (
        "CUDA out of memory. Tried to allocate {asked} (GPU {gpu}; {capacity} total capacity; {allocated} already "
        "allocated; {free} free; {reserved} reserved in total by PyTorch)"
    )
    new = (
        "CUDA out of memory. Tried to allocate {asked}. GPU {gpu} has a total capacity of {capacity} of which {free} "
        "is free. Of the allocated memory {allocated} is allocated by PyTorch, and {unused} is reserved by PyTorch but "
        "unallocated."
    )
    for message in (old.format(**told), new.format(**told), new.replace("capacity of", "capacty of").format(**told)):
        found = failed_allocation(f"loss 2.0, 12.00 GiB free\n{message}\n{message.replace('allocate ', 'allocate 9')}")
        assert found is not None
        assert found.gpu == sizes["gpu"]
        for name in ("asked", "capacity", "free", "allocated", "unused"):
            # two decimals of each figure; unused is a difference in the old format
            assert getattr(found, name) == pytest.approx(
                sizes[name], abs=0.011 * 2**30 if name == "unused" else None, rel=0.006
            ), name
        assert found.is_fragmented <= (found.unused >= found.asked)


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


def test_the_likely_cause_is_told_with_figures_and_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(text_of("later-step"))
    assert main(["doctor", "--from", str(tmp_path / "log")]) == 0
    first, other = capsys.readouterr().out.split("\n\n")
    assert first.startswith("Out of memory: later step. Many steps fitted before")
    assert "Figures: after 501 steps; asked for 162.00 MiB, GPU 0 has 23.69 GiB, free 101.50 MiB" in first
    assert "$ hybridtrain virtual --card rtx-4090" in first
    assert other.startswith("Or Out of memory: activations. ")
    (tmp_path / "log").write_text(
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 27021361152 bytes."
    )
    assert main(["doctor", "--from", str(tmp_path / "log"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["troubles"]
    assert found["figures"] == "asked for 25.17 GiB"


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
    assert f"no problem found in {len(FALLING)} losses and {len(FALLING)} speeds" in capsys.readouterr().out
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write("\n[rank1]: app.data.BadRow: row 3 has no end\n[rank1]: app.data.RowError: row 3 has no end\n")
    assert main(["doctor", "--from", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "an error that is not among" in out
    assert f"line {len(FALLING) + 2} of the log: [rank1]: app.data.RowError" in out
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write("UserWarning: The dataloader does not have many workers which may be a bottleneck.")
    assert main(["doctor", "--from", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Slow: ")
    assert "RowError" in out.split("\n\n")[-1]
    sound = tmp_path / "sound.txt"
    sound.write_text("all is well")
    assert main(["doctor", "--from", str(sound)]) == 1
    assert "no known problem found. Give" in capsys.readouterr().out
    assert main(["doctor", "--from", str(tmp_path / "none")]) == 2
    with pytest.raises(ConfigError, match="is not a file"):
        read_log(tmp_path / "none")


def test_a_number_of_many_digits_is_read_once() -> None:
    def seconds(count: int) -> float:
        log, begin = f'{{"step": 1, "loss": {count * "9"}, "x": 1}} 5%|# | 1/9 [{count * "9"}', time.process_time()
        for _ in range(20):
            diagnose(log)
        return time.process_time() - begin

    few, many = (min(seconds(count) for _ in range(3)) for count in (250, 2000))
    assert many < 64 * few  # 8 times the digits; trying each from each on takes 512 times as long
