"""``bench kernels``: the cases of every op, and the command end to end on the processor."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench_cases import CPU, H200, record, result, times
from hybridtrain.cli.main import main
from hybridtrain.virtual_gpu.cards.card import card_catalogue
from hybridvalidation.kernel_bench import bench as command
from hybridvalidation.kernel_bench.bench import BenchOutcome
from hybridvalidation.kernel_bench.case import KernelCase, Mode, model_batches, own_providers
from hybridvalidation.kernel_bench.cases import OPS, plan_cases
from hybridvalidation.kernel_bench.record import KernelRecord, append_kernel, read_kernels
from hybridvalidation.kernel_bench.table import card_peaks
from hybridvalidation.records.outcome import Outcome

CUDA = torch.device("cuda")
CASES = {case.name: case for case in plan_cases(CPU, only=(), modes=(), quick=True)}
ONE_PASS = [
    case
    for case in CASES.values()
    if case.mode is Mode.FORWARD
    and case.op not in {"linear_cross_entropy", "adamw_int8", "adamw_int8_rounded", "rssm_gru"}
]
"""Ops that read every input and write every output once, none of them in place."""


def test_each_op_comes_once_before_any_comes_twice() -> None:
    for device in (CPU, CUDA):
        cases = plan_cases(device, only=(), modes=(), quick=False)
        assert [case.op for case in cases[: len(OPS)]] == list(OPS)
        assert len({case.name for case in cases}) == len(cases)  # names tell cases apart in baselines


def test_only_modes_and_quick_choose_cases() -> None:
    found = plan_cases(CUDA, only=("swiglu", "causal_attention"), modes=("backward",), quick=True)
    assert [(case.op, case.mode) for case in found] == [
        ("causal_attention", Mode.BACKWARD), ("swiglu", Mode.BACKWARD)
    ]  # fmt: skip
    assert len(plan_cases(CUDA, only=("swiglu",), modes=(), quick=False)) == 2 * 3  # two LLaMA shapes, three modes


def test_shapes_come_from_the_models() -> None:
    assert [workload.name for workload in model_batches(CUDA)] == [
        "llama-7b B2 T2048", "gpt2-1b B4 T1024", "llama-1b B4 T2048", "gpt2-small B8 T1024"
    ]  # fmt: skip


def test_every_provider_is_there_on_a_card_or_says_why_not() -> None:
    names = {case.op: [one.name for one in case.providers] for case in plan_cases(CUDA, only=(), modes=(), quick=True)}
    assert names["adamw_int8_rounded"] == ["triton", "torch"]
    assert names["causal_attention"] == ["triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "unfused"]
    assert names["linear_cross_entropy"] == ["triton", "torch", "eager", "liger"]
    assert names["adamw_int8"] == ["triton", "bitsandbytes", "torch", "torchao"]
    assert names["rssm_gru"] == ["triton", "torch", "cpu"]
    assert names["swiglu"][1:] == ["eager", "liger"]


@pytest.mark.parametrize("case", ONE_PASS, ids=lambda case: case.name)
def test_the_least_traffic_is_inputs_and_outputs(case: KernelCase) -> None:
    inputs = case.make_inputs(CPU)
    ours = next(one for one in case.providers if one.is_ours)
    outputs = ours.setup(inputs)()
    # Small tensors are left out: weights of norms, tables of angles (at 64 tokens up to 5 %).
    total = sum(tensor.nbytes for tensor in (*inputs.args, *outputs))
    assert case.num_bytes == pytest.approx(total, rel=0.05)


@pytest.mark.sample(one_in=2)
@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith(("causal_attention", "linear_cross_entropy"))]
)
def test_the_least_arithmetic_is_what_torch_counts(name: str) -> None:
    case = CASES[name]
    inputs = case.make_inputs(CPU)
    run = next(one for one in case.providers if one.name == "cpu").setup(inputs)
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() == case.flops


def test_the_cards_that_are_measured_are_in_the_catalogue() -> None:
    assert H200 in {card.name for card in card_catalogue().values()}


def bench(tmp_path: Path, *arguments: str) -> int:
    return main(["bench", "kernels", "--results", str(tmp_path), *arguments])


def test_end_to_end_on_the_processor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ops = ("--quick", "--only", "layer_norm,int8_dequantize")
    assert bench(tmp_path, *ops, "--modes", "forward", "--accept") == 0
    shown = capsys.readouterr()
    assert "no CUDA card" in shown.err
    assert "layer_norm `liger` is missing" in shown.out
    made = read_kernels(tmp_path / "records")
    assert [found.op for found in made] == ["int8_dequantize", "layer_norm"]
    for found in made:
        assert found.evidence == "executed"
        assert {one.provider for one, _ in found.timed()} >= {"cpu"}
        assert all(one.error is not None and one.times is not None for one, _ in found.timed())
    table = (tmp_path / "tables" / "kernels.md").read_text()
    assert table.count("| layer_norm") == 2 + 2 * len(made[1].timed())  # two tables, each too wide for one
    # What was just accepted is what the newest records say.
    assert bench(tmp_path, *ops, "--recorded", "--check", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["exit"], told["findings"], len(told["records"])) == (0, [], 2)
    assert len(read_kernels(tmp_path / "records")) == 2  # nothing was run


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_end_to_end_on_a_card(tmp_path: Path) -> None:
    assert bench(tmp_path, "--quick", "--only", "swiglu,int8_dequantize,state_encoding", "--minutes", "3") == 0
    made = read_kernels(tmp_path / "records")
    assert {found.op for found in made} == {"swiglu", "int8_dequantize", "state_encoding"}
    for found in made:
        assert found.is_on_card
        assert found.driver
        peaks = card_peaks(found.card, [])
        for one, taken in found.timed():
            assert one.peak_bytes is not None
            share = None if peaks is None else peaks.share(found, taken.q50_s)
            # Faster than the data sheet would mean that something was not done, or came from a cache.
            assert share is None or share <= 1.05


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the command find these records in place of a run."""

    def give(*records: KernelRecord, **changes: object) -> None:
        def run_cases(bench: command.Bench, *_: object, **__: object) -> BenchOutcome:
            for made in records:
                bench.on_record(made)
            return replace(BenchOutcome(records=list(records)), **changes)

        monkeypatch.setattr(command, "run_cases", run_cases)

    return give


FAST, SLOW = times(1e-3), times(2e-3)
GOOD = record(result("triton", FAST), result("bitsandbytes", SLOW))


def test_exit_codes_of_the_check(tmp_path: Path, measured: Callable[..., None]) -> None:
    measured(GOOD)
    assert bench(tmp_path) == 0
    assert bench(tmp_path, "--check") == 6  # no baseline yet
    assert bench(tmp_path, "--check", "--accept") == 0
    assert bench(tmp_path, "--check") == 0
    measured(record(result("triton", SLOW)))
    assert bench(tmp_path, "--check") == 4
    assert bench(tmp_path) == 0  # nobody asked


@pytest.mark.parametrize("outcome", [Outcome.WRONG, Outcome.ERROR])
def test_a_fault_of_ours_fails_and_one_of_others_does_not(
    tmp_path: Path, measured: Callable[..., None], capsys: pytest.CaptureFixture[str], outcome: Outcome
) -> None:
    measured(record(result("triton", FAST), result("bitsandbytes", outcome=outcome, message="no")))
    assert bench(tmp_path, "--accept") == 0
    measured(record(result("triton", outcome=outcome, message="no"), result("bitsandbytes", FAST)))
    assert bench(tmp_path, "--check") == 1
    assert f"adamw_int8 gpt2-1b block float32 forward: triton is {outcome}: no" in capsys.readouterr().out


def test_a_lost_card_fails_and_tells_what_was_not_run(
    tmp_path: Path, measured: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(GOOD, lost_card="adamw_int8", not_run=["swiglu tiny", "rotary tiny"])
    assert bench(tmp_path) == 1
    shown = capsys.readouterr().out
    assert "the card stopped answering after adamw_int8" in shown
    assert "not run: 2 cases (swiglu tiny, rotary tiny)" in shown


def test_choosing_works_from_records_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = tmp_path / "choices.toml"
    choices.write_text("")
    monkeypatch.setattr(command, "CHOICES", choices)
    append_kernel(tmp_path / "records", GOOD)
    append_kernel(tmp_path / "records", replace(GOOD, choice="undecided", results=GOOD.results[:1]))
    assert bench(tmp_path, "--recorded", "--choose") == 0
    assert 'op = "adamw_int8"' not in choices.read_text()  # the newest record of the case has another key
    append_kernel(tmp_path / "records", GOOD)
    assert bench(tmp_path, "--recorded", "--choose") == 0
    assert 'op = "adamw_int8"\ncard = "NVIDIA H200"\nprovider = "triton"' in choices.read_text()
    shown = capsys.readouterr().out
    assert "default order kept: undecided on NVIDIA H200" in shown
    assert "chosen: adamw_int8 on NVIDIA H200: triton" in shown


@pytest.mark.parametrize(
    ("arguments", "description"),
    [
        (["--only", "swiglo"], "op 'swiglo' is unknown; did you mean 'swiglu'?"),
        (["--modes", "back"], "mode 'back' is unknown"),
        (["--only", ""], "op '' is unknown"),
        (["--minutes", "0"], "0 must be a finite number above 0"),
        (["--minutes", "soon"], "'soon' must be a number above 0"),
        (["--shapes", "all"], "option '--shapes' is not one of --accept,"),
    ],
)
def test_wrong_arguments_are_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], description: str
) -> None:
    assert bench(tmp_path, *arguments) == 2
    shown = capsys.readouterr()
    assert description in shown.err
    assert not shown.out
    assert not list(tmp_path.iterdir())


def test_what_is_benched_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "these arguments are missing: WHAT" in capsys.readouterr().err
    assert main(["bench", "trainers"]) == 2
    assert 'Choose from: "kernels", "attention".' in capsys.readouterr().err


def test_a_damaged_record_file_is_told_before_anything_runs(
    tmp_path: Path, measured: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    measured(GOOD)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "kernels.jsonl").write_text('{"op":\n')
    assert bench(tmp_path) == 1
    assert "kernels.jsonl:1: not a record of this version" in capsys.readouterr().err


def test_forced_names_are_only_those_of_cards() -> None:
    assert [one.name for one in own_providers("k", lambda _: tuple, CUDA)] == ["triton", "torch"]
