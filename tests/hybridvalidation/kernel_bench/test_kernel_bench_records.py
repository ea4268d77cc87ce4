"""What follows from the records of kernels: table, speed gate, choices. Pure functions, no clock."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from bench_cases import H200, record, result, times
from hybridkernels import provider as chooser
from hybridtrain.config.decode import decode
from hybridtrain.config.encode import encode
from hybridtrain.errors import ConfigError, RecordError
from hybridtrain.stacks import default_folder
from hybridvalidation.experiments.card_session.record import Ceilings, EvidenceRecord
from hybridvalidation.gate.gate import GateExit
from hybridvalidation.judge.verdict import Status
from hybridvalidation.kernel_bench.case import Clock, Mode
from hybridvalidation.kernel_bench.compare import (
    CHOICES,
    Choice,
    UndecidedOp,
    accept_speed,
    baseline_path,
    check_speed,
    choose,
    read_baseline,
    write_choices,
)
from hybridvalidation.kernel_bench.record import (
    KernelRecord,
    append_kernel,
    newest_kernels,
    read_kernels,
)
from hybridvalidation.kernel_bench.table import (
    absent_lines,
    card_peaks,
    case_table,
    judge_kernels,
    processor_speedups,
    write_kernels,
)
from hybridvalidation.records.outcome import Evidence, Outcome
from hybridvalidation.scenario_files import ScenarioFiles

FAST, SLOW = times(1e-3), times(2e-3)
TARGETS = ScenarioFiles(default_folder()).targets()


def test_records_come_back_equal(tmp_path: Path) -> None:
    made = record(result("triton", FAST), result("bitsandbytes", outcome=Outcome.SKIPPED, message="gone"))
    append_kernel(tmp_path, made)
    append_kernel(tmp_path, replace(made, mode=Mode.BOTH))
    assert read_kernels(tmp_path) == [made, replace(made, mode=Mode.BOTH)]


def test_another_schema_is_refused() -> None:
    with pytest.raises(ConfigError, match="schema: 3 must be 2"):
        decode(KernelRecord, encode(record(result("triton", FAST))) | {"schema": 3}, source="a file")


def test_the_newest_record_of_a_case_and_card_counts() -> None:
    old, other_card = record(result("triton", SLOW)), record(result("triton", SLOW), card="another")
    new = record(result("triton", FAST))
    assert newest_kernels([old, other_card, new]) == [new, other_card]


def test_only_sound_results_are_ranked() -> None:
    made = record(
        result("torch", SLOW), result("triton", FAST), result("bitsandbytes", outcome=Outcome.SKIPPED),
        result("reference", times(1e-9), outcome=Outcome.WRONG),
    )  # fmt: skip
    assert [found.provider for found, _ in made.timed()] == ["triton", "torch"]


# The speed gate.


def accepted(folder: Path, *records: KernelRecord) -> Path:
    accept_speed(records, folder)
    return folder


def test_the_same_times_pass(tmp_path: Path) -> None:
    made = record(result("triton", FAST), result("torch", SLOW))
    check = check_speed([made], accepted(tmp_path, made))
    assert (check.exit_code, check.num_compared, check.num_new, check.findings) == (GateExit.OK, 2, 0, [])


@pytest.mark.parametrize(
    ("now", "code"),
    [
        (times(1.11e-3, spread=0.02), GateExit.REGRESSED),
        (times(1.09e-3, spread=0.01), GateExit.OK),  # beyond noise, but less than 10 %
        (times(1.30e-3, spread=0.25), GateExit.OK),  # more than 10 %, but within noise: 0.975 to 1.625 ms
        (times(0.70e-3, spread=0.02), GateExit.OK),  # faster is no fault
    ],
)
def test_a_slowdown_fails_and_noise_passes(tmp_path: Path, now: object, code: GateExit) -> None:
    folder = accepted(tmp_path, record(result("triton", FAST), result("torch", SLOW)))
    check = check_speed([record(result("triton", now), result("torch", SLOW))], folder)
    assert check.exit_code is code
    if code is GateExit.REGRESSED:
        (finding,) = check.findings
        assert finding.provider == "triton"
        assert finding.case == "adamw_int8 gpt2-1b block float32 forward"
        assert finding.message == "1 ms -> 1.11 ms, +11.0 %"


def test_becoming_faster_is_told(tmp_path: Path) -> None:
    folder = accepted(tmp_path, record(result("triton", SLOW)))
    (finding,) = check_speed([record(result("triton", FAST))], folder).findings
    assert (finding.exit, finding.message) == (GateExit.IMPROVED, "2 ms -> 1 ms, -50.0 %")


@pytest.mark.parametrize("card", ["NVIDIA H200", "another card"])
def test_without_a_baseline_of_this_card_and_case_nothing_was_measured(tmp_path: Path, card: str) -> None:
    folder = accepted(tmp_path, record(result("triton", FAST), card="NVIDIA H200", shape="another shape"))
    check = check_speed([record(result("triton", FAST), card=card)], folder)
    assert check.exit_code is GateExit.COULD_NOT_MEASURE
    assert card in check.findings[0].message
    assert check_speed([], folder).exit_code is GateExit.COULD_NOT_MEASURE


def test_a_new_provider_beside_known_ones_is_counted_as_new(tmp_path: Path) -> None:
    folder = accepted(tmp_path, record(result("triton", FAST)))
    check = check_speed([record(result("triton", FAST), result("torch", SLOW))], folder)
    assert (check.exit_code, check.num_compared, check.num_new) == (GateExit.OK, 1, 1)


def test_a_regression_outweighs_a_card_without_a_baseline(tmp_path: Path) -> None:
    folder = accepted(tmp_path, record(result("triton", FAST)))
    check = check_speed([record(result("triton", SLOW)), record(result("triton", FAST), card="another")], folder)
    assert check.exit_code is GateExit.REGRESSED


def test_accepting_keeps_the_rows_that_were_not_run(tmp_path: Path) -> None:
    accepted(tmp_path, record(result("triton", FAST), result("torch", SLOW)), record(result("triton", SLOW), shape="b"))
    accepted(tmp_path, record(result("triton", SLOW)), record(result("triton", FAST), card="another"))
    baseline = read_baseline(tmp_path, H200)
    assert baseline is not None
    assert baseline.cases == {
        "adamw_int8 gpt2-1b block float32 forward": {"triton": SLOW, "torch": SLOW},
        "adamw_int8 b float32 forward": {"triton": SLOW},
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels-another.json", "kernels-nvidia-h200.json"]


def test_a_wrong_result_never_becomes_a_baseline(tmp_path: Path) -> None:
    wrong = result("triton", outcome=Outcome.WRONG)
    accepted(tmp_path, record(wrong, result("torch", SLOW)), record(wrong, shape="another"))
    baseline = read_baseline(tmp_path, H200)
    assert baseline is not None
    assert list(baseline.cases.values()) == [{"torch": SLOW}]


def test_a_damaged_baseline_is_named(tmp_path: Path) -> None:
    path = baseline_path(tmp_path, H200)
    path.write_text("{")
    with pytest.raises(RecordError, match=re.escape(str(path))):
        read_baseline(tmp_path, H200)


# Choices.


def test_the_winner_beyond_noise_is_chosen() -> None:
    assert choose([record(result("torch", SLOW), result("triton", FAST))]) == (
        [Choice("adamw_int8", H200, "triton")], []
    )  # fmt: skip


@pytest.mark.parametrize(
    ("results", "why"),
    [
        ((result("triton", FAST), result("torch", times(1.02e-3))), "within noise"),
        ((result("triton", times(1e-3, num_samples=19)), result("torch", SLOW)), "fewer than two"),
        ((result("triton", FAST), result("torch", times(2e-3, num_samples=19))), "fewer than two"),
        ((result("triton", FAST, outcome=Outcome.WRONG), result("torch", SLOW)), "fewer than two"),
        ((result("triton", FAST), result("liger", SLOW)), "fewer than two"),  # the op cannot take Liger
    ],
)
def test_in_doubt_the_default_order_stays(results: tuple[object, ...], why: str) -> None:
    chosen, (undecided,) = choose([record(*results)])
    assert not chosen
    assert why in undecided.reason


def test_every_shape_must_agree() -> None:
    first = record(result("triton", FAST), result("torch", SLOW))
    second = record(result("triton", SLOW), result("torch", FAST), shape="another")
    assert choose([first, replace(second, results=first.results)])[0] == [Choice("adamw_int8", H200, "triton")]
    chosen, (undecided,) = choose([first, second])
    assert not chosen
    assert undecided.reason == "the shapes disagree: torch, triton"


def test_the_whole_step_decides_where_there_is_one() -> None:
    whole = record(result("triton", FAST), result("torch", SLOW), mode=Mode.BOTH)
    half = record(result("triton", SLOW), result("torch", FAST), mode=Mode.BACKWARD)
    assert choose([half, whole])[0] == [Choice("adamw_int8", H200, "triton")]


def test_rows_go_by_key_and_card_and_the_processor_has_none() -> None:
    pair = (result("triton", FAST), result("torch", SLOW))
    records = [
        record(*pair, choice="causal_attention/head64"), record(*pair, choice="causal_attention/head128", shape="wide"),
        record(*pair, card="another"), record(*pair, card="a processor", evidence=Evidence.EXECUTED),
    ]  # fmt: skip
    chosen, undecided = choose(records)
    assert [(row.op, row.card) for row in chosen] == [
        ("adamw_int8", "another"), ("causal_attention/head128", H200), ("causal_attention/head64", H200)
    ]  # fmt: skip
    assert not undecided


def test_only_the_newest_record_decides() -> None:
    old = record(result("triton", FAST), result("torch", SLOW))
    new = record(result("triton", SLOW), result("torch", FAST))
    assert choose([old, new])[0] == [Choice("adamw_int8", H200, "torch")]


def test_rewriting_replaces_what_was_judged_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "choices.toml"
    path.write_text(CHOICES.read_text())
    write_choices([Choice("a", H200, "torch"), Choice("b", H200, "torch"), Choice("c", "old", "torch")], [], path)
    write_choices([Choice("a", H200, "triton")], [UndecidedOp("b", H200, "within noise")], path)
    text = path.read_text()
    assert text.startswith("# The fastest implementation of each op by card, written by")
    assert tomllib.loads(text) == {
        "choice": [
            {"op": "a", "card": H200, "provider": "triton"},
            {"op": "c", "card": "old", "provider": "torch"},
        ]
    }


def test_what_is_written_is_what_ops_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "choices.toml"
    path.write_text("")
    monkeypatch.setattr(chooser, "files", lambda _: tmp_path)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: H200)
    try:
        write_choices([Choice("an_op", H200, "torch")], [], path)
        assert chooser.chosen_provider("an_op", ("triton", "torch"), None) == "torch"  # type: ignore[arg-type]
        write_choices([], [UndecidedOp("an_op", H200, "within noise")], path)
        assert chooser.chosen_provider("an_op", ("triton", "torch"), None) == "triton"  # type: ignore[arg-type]
    finally:
        chooser._choices.cache_clear()


# The table.


PIPES = "pipe"
"""A style that cuts no table."""


def cells(table: str, row: int = 0) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[2 + row].strip("|").split("|")]


def test_the_roofline_is_that_of_the_data_sheet() -> None:
    # 4.8 GB at 4800 GB/s take 1 ms; 10^9 operations at 66.9 TFLOP/s much less.
    made = record(result("triton", times(2e-3)), result("torch", times(4e-3)))
    row = cells(case_table([made], card_peaks(H200, []), PIPES))
    assert row == [
        "adamw_int8", "gpt2-1b block, forward", "triton", "2,000.0", "torch", "4,000.0", "0.50", "2,400.0", "0.5",
        "50 %", "device",
    ]  # fmt: skip


def test_matrix_products_count_against_tensor_cores() -> None:
    made = record(result("triton", times(2e-3)), num_bytes=1, flops=989_400_000_000, uses_tensor_cores=True)
    assert cells(case_table([made], card_peaks(H200, []), PIPES))[-2] == "50 %"
    plain = replace(made, uses_tensor_cores=False, flops=66_900_000_000)
    assert cells(case_table([plain], card_peaks(H200, []), PIPES))[-2] == "50 %"


def test_a_wall_clock_and_an_unknown_card_have_no_share() -> None:
    made = record(result("triton", FAST))
    assert cells(case_table([replace(made, clock=Clock.WALL)], card_peaks(H200, []), PIPES))[-2] == "n/a"
    assert card_peaks("a card of tomorrow", []) is None
    assert cells(case_table([made], None, PIPES))[-2] == "n/a"


def test_an_unknown_card_is_compared_with_its_measured_ceilings() -> None:
    ceilings = Ceilings(
        name="tomorrow", driver="", memory_bytes=1, compute_capability="13.0", num_sms=1, matmul_tflops=100.0,
        device_copy_gbps=2400.0, in_gbps=1.0, out_gbps=1.0, both_in_gbps=1.0, both_out_gbps=1.0, is_pinned=True,
        pin_gbps=1.0, context_bytes=0, context_with_libraries_bytes=0, forward_workspace_bytes=0,
        backward_workspace_bytes=0,
    )  # fmt: skip
    evidence = EvidenceRecord(
        part="ceilings", key="ceilings", description="", outcome=Outcome.OK, started_at="", duration_s=1.0,
        environment=record().environment, card="tomorrow", others_bytes=0, ceilings=ceilings,
        driver="", versions={},
    )  # fmt: skip
    peaks = card_peaks("tomorrow", [evidence])
    assert peaks is not None
    assert "measured" in peaks.source
    made = record(result("triton", times(4e-3)), card="tomorrow")
    assert peaks.share(made, 4e-3) == pytest.approx(0.5)


def test_nobody_wins_within_noise_and_one_alone_is_called_so() -> None:
    assert cells(case_table([record(result("triton", FAST), result("torch", times(1.01e-3)))], None, PIPES))[2] == (
        "none"
    )
    assert cells(case_table([record(result("triton", FAST))], None, PIPES))[2] == "triton, alone"
    lost = record(result("triton", outcome=Outcome.ERROR))
    assert cells(case_table([lost], None, PIPES))[2:5] == ["-", "-", "-"]


def test_who_was_not_timed_is_listed_once_with_reason() -> None:
    gone = result("liger", outcome=Outcome.SKIPPED, message="liger_kernel is not installed")
    wrong = result("triton", outcome=Outcome.WRONG, message="output 0: error 1 is above 0.1")
    lines = absent_lines([record(gone, wrong), record(gone, shape="another")])
    assert lines == [
        "adamw_int8 `liger` is missing: liger_kernel is not installed",
        "adamw_int8 `triton` is wrong: output 0: error 1 is above 0.1 (gpt2-1b block forward)",
    ]


def test_the_processor_is_compared_with_on_cards_only() -> None:
    pair = (result("triton", times(1e-3)), result("cpu", times(12.5e-3)))
    ((_, factor),) = processor_speedups([record(*pair)])
    assert factor == pytest.approx(12.5)
    assert not processor_speedups([record(*pair, evidence=Evidence.EXECUTED)])


def test_speedups_over_the_processor_are_judged_by_the_slowest_shape() -> None:
    pair = (result("triton", times(1e-3)), result("cpu", times(12.5e-3)))
    slower = (result("triton", times(1e-3)), result("cpu", times(4e-3)))
    cases = [record(*pair, op="rssm_gru"), record(*slower, op="rssm_gru", shape="other")]
    rssm, encoding = judge_kernels(cases, TARGETS)
    assert (rssm.status, rssm.value, rssm.evidence) == (Status.REFUTED, 4.0, Evidence.MEASURED)
    assert "other; the least of 2 shapes" in rssm.reason
    assert (encoding.status, encoding.value) == (Status.UNPROVEN, None)
    assert judge_kernels(cases[:1], TARGETS)[0].status is Status.HOLDS
    on_processor = [replace(case, evidence=Evidence.EXECUTED) for case in cases]
    assert judge_kernels(on_processor, TARGETS)[0].status is Status.UNPROVEN


def test_the_file_is_a_function_of_the_records(tmp_path: Path) -> None:
    card = record(result("triton", FAST), result("torch", SLOW))
    processor = record(result("cpu", FAST, is_ours=True), card="a processor", evidence=Evidence.EXECUTED)
    (path,) = write_kernels([processor, card], tmp_path, (), TARGETS)
    text = path.read_text()
    assert path == tmp_path / "tables" / "kernels.md"
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## NVIDIA H200 (measured)", "## a processor (executed)", "## Stated targets",
    ]  # fmt: skip
    assert "triton 3.6.0, driver 580.1" in text
    assert write_kernels([card, processor], tmp_path / "again", (), TARGETS)[0].read_text() == text
    assert write_kernels([], tmp_path / "empty", (), TARGETS) == []
