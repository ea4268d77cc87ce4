"""The kernel gate: real compiles of a small kernel, and faults put into it on purpose."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from hybridkernels.ahead_of_time import CAPABILITIES, KERNELS, CompileCase, KernelResources, compile_ahead
from hybridtrain.cli.main import main
from hybridvalidation.gate import kernel_gate
from hybridvalidation.gate.baseline_file import read_baseline, write_baseline
from hybridvalidation.gate.gate import GateExit, worst_exit
from hybridvalidation.gate.kernel_gate import KernelBaseline, KernelGateResult, run_kernel_gate

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no triton: nothing can be compiled")

FIGURES = KernelResources(registers=40, spill_bytes=0, shared_bytes=1024, code_bytes=5000)
BASELINES = Path("results/baselines")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[KernelResources | str], None]:
    """Stand-in for the compiler: one kernel whose figures the test sets."""

    def with_figures(figures: KernelResources | str) -> None:
        def compile_all(_kernels: object, capabilities: Sequence[int], _jobs: int) -> Any:
            for capability in capabilities:
                yield capability, "mine", {"mine/bf16": figures if capability == 90 else FIGURES}

        monkeypatch.setattr(kernel_gate, "_compile_all", compile_all)
        monkeypatch.setattr(kernel_gate, "find_spec", lambda _: "found")
        monkeypatch.setattr(kernel_gate, "version", lambda _: "9.9.9")

    return with_figures


def run(folder: Path) -> KernelGateResult:
    return run_kernel_gate(folder, lambda _: None, kernels=("mine",))


def accept(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    write_baseline(folder / "kernels.json", run(folder).replacement)


@pytest.mark.parametrize(
    ("change", "code", "description"),
    [
        ({}, GateExit.OK, ""),
        ({"spill_bytes": 64}, GateExit.REGRESSED, "B spilled per thread: 0 -> 64"),
        ({"shared_bytes": 2048}, GateExit.REGRESSED, "B of shared memory per block: 1,024 -> 2,048"),
        ({"registers": 41}, GateExit.REGRESSED, "registers per thread: 40 -> 41"),
        ({"code_bytes": 5001}, GateExit.REGRESSED, "B of code: 5,000 -> 5,001"),
        ({"registers": 32}, GateExit.IMPROVED, "registers per thread: 40 -> 32"),
        (
            {"registers": 32, "spill_bytes": 4},
            GateExit.REGRESSED,
            "registers per thread: 40 -> 32, B spilled per thread",
        ),
    ],
    ids=["same", "spills", "shared", "registers", "code", "better", "better-and-worse"],
)
def test_every_figure_is_held_to_the_baseline(
    change: dict[str, int],
    code: GateExit,
    description: str,
    tmp_path: Path,
    compiled: Callable[[KernelResources | str], None],
) -> None:
    compiled(FIGURES)
    accept(tmp_path)
    compiled(replace(FIGURES, **change))
    findings = run(tmp_path).findings
    assert worst_exit(findings) is code
    assert [(finding.stack, description in finding.message) for finding in findings] == [
        ("sm_90 mine/bf16", True)
    ] * bool(description)


def test_a_kernel_that_does_not_compile_is_named_and_cannot_be_accepted(
    tmp_path: Path, compiled: Callable[[KernelResources | str], None]
) -> None:
    compiled(FIGURES)
    accept(tmp_path)
    compiled("CompilationError: at 7:4")
    (finding,) = run(tmp_path).findings
    assert (finding.stack, finding.exit, finding.message) == (
        "sm_90 mine/bf16", GateExit.COULD_NOT_MEASURE, "CompilationError: at 7:4"
    )  # fmt: skip
    assert not finding.settled_by_accept


def test_kernels_that_come_and_go_are_named(tmp_path: Path, compiled: Callable[[KernelResources | str], None]) -> None:
    compiled(FIGURES)
    accept(tmp_path)
    path = tmp_path / "kernels.json"
    path.write_text(path.read_text().replace("mine/bf16", "mine/fp64"))
    findings = run(tmp_path).findings
    assert {finding.stack.split("/")[1] for finding in findings} == {"bf16", "fp64"}
    assert len(findings) == 2 * len(CAPABILITIES)
    assert worst_exit(findings) is GateExit.COULD_NOT_MEASURE


def test_another_compiler_is_not_compared(tmp_path: Path, compiled: Callable[[KernelResources | str], None]) -> None:
    compiled(FIGURES)
    accept(tmp_path)
    path = tmp_path / "kernels.json"
    path.write_text(path.read_text().replace("9.9.9", "3.0.0"))
    (finding,) = run(tmp_path).findings
    assert finding.exit is GateExit.COULD_NOT_MEASURE
    assert "the baseline is of triton 3.0.0, but 9.9.9 is installed," in finding.message


def test_without_triton_nothing_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_gate, "find_spec", lambda _: None)
    result = run(tmp_path)
    assert worst_exit(result.findings) is GateExit.COULD_NOT_MEASURE
    assert "triton is not installed" in result.findings[0].message
    assert result.replacement is None


def test_a_broken_baseline_is_named(
    tmp_path: Path, compiled: Callable[[KernelResources | str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    compiled(FIGURES)
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines" / "kernels.json").write_text("{}")
    assert main(["gate", "kernels", "--results", str(tmp_path)]) == 1
    assert "kernels.json: damaged baseline" in capsys.readouterr().err


def test_the_verb_writes_what_accept_asks_for(
    tmp_path: Path, compiled: Callable[[KernelResources | str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["gate", "kernels", "--results", str(tmp_path)]
    compiled(FIGURES)
    assert main(command) == GateExit.COULD_NOT_MEASURE
    assert main([*command, "--accept"]) == GateExit.OK
    assert main(command) == GateExit.OK
    assert "gate: ok, 5 compiled kernels on 5 cards compared" in capsys.readouterr().out
    compiled(replace(FIGURES, spill_bytes=8))
    assert main([*command, "--json"]) == GateExit.REGRESSED
    content = json.loads(capsys.readouterr().out)
    assert [finding["stack"] for finding in content["findings"]] == ["sm_90 mine/bf16"]
    assert main([*command, "--accept"]) == 2
    assert "--reason: missing" in capsys.readouterr().err
    assert main([*command, "--accept", "--reason", "a wider tile"]) == GateExit.OK
    assert json.loads((tmp_path / "baselines" / "kernels.json").read_text())["accepted"] == "a wider tile"
    assert not (tmp_path / "kernels.json").exists()


def test_one_card_is_compiled_and_accepted_alone(
    tmp_path: Path, compiled: Callable[[KernelResources | str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--results", str(tmp_path)]
    compiled(FIGURES)
    assert main(["gate", "kernels", *command, "--accept"]) == GateExit.OK
    compiled(replace(FIGURES, spill_bytes=8))  # on sm_90
    assert main(["gate", "kernels/sm_89", *command]) == GateExit.OK
    assert "gate: ok, 1 compiled kernels on 1 cards compared" in capsys.readouterr().out
    assert main(["gate", "kernels/sm_90", *command, "--accept", "--reason", "a test"]) == GateExit.OK
    assert main(["gate", "kernels", *command]) == GateExit.OK, "what the baseline says of other cards stays"
    assert main(["gate", "kernels/sm_91", *command]) == 2
    assert "card of kernels 'kernels/sm_91' is unknown" in capsys.readouterr().err


def trial_case(kernel: Any, constants: dict[str, Any], **options: int) -> CompileCase:
    return CompileCase(
        name="trial", kernel=kernel, arguments={"x_ptr": "*fp32", "out_ptr": "*fp32"}, constants=constants, **options
    )


@needs_triton
def test_a_real_kernel_made_to_spill_or_to_need_shared_memory_shows_it() -> None:
    from kernel_trials import sum_of_squares, transpose  # noqa: PLC0415  triton is optional

    small = compile_ahead(trial_case(sum_of_squares, {"SIZE": 256}), 90)
    assert small.spill_bytes == 0
    spilling = compile_ahead(trial_case(sum_of_squares, {"SIZE": 65536}), 90)
    assert spilling.spill_bytes > 0
    assert spilling.registers > small.registers
    narrow, wide = (compile_ahead(trial_case(transpose, {"SIZE": size}), 90).shared_bytes for size in (16, 64))
    assert 0 < narrow < wide


@needs_triton
def test_more_shared_memory_than_a_card_has_is_refused() -> None:
    from kernel_trials import transpose  # noqa: PLC0415  triton is optional

    case = trial_case(transpose, {"SIZE": 256}, num_warps=16)
    with pytest.raises(RuntimeError, match=r"trial: takes [\d,]+ B of shared memory, but a block on sm_86 has 101,376"):
        compile_ahead(case, 86)


@needs_triton
def test_figures_do_not_depend_on_where_the_source_lies(tmp_path: Path) -> None:
    import kernel_trials  # noqa: PLC0415  triton is optional

    copy = tmp_path / "a_much_longer_name_than_before" / "kernel_trials.py"
    copy.parent.mkdir()
    copy.write_text("\n" * 500 + Path(kernel_trials.__file__).read_text())
    spec = spec_from_file_location("kernel_trials_elsewhere", copy)
    assert spec is not None
    assert spec.loader is not None
    elsewhere = module_from_spec(spec)
    spec.loader.exec_module(elsewhere)
    here, there = (
        compile_ahead(trial_case(module.sum_of_squares, {"SIZE": 512}), 90) for module in (kernel_trials, elsewhere)
    )
    assert here == there


def test_the_committed_baseline_knows_every_kernel_and_card() -> None:
    baseline = json.loads((BASELINES / "kernels.json").read_text(encoding="utf-8"))["resources"]
    assert sorted(baseline) == sorted(f"sm_{capability}" for capability in CAPABILITIES)
    for card, cases in baseline.items():
        assert {name.split("/")[0] for name in cases} >= set(KERNELS), card


def test_a_baseline_is_read_as_it_was_written(
    tmp_path: Path, compiled: Callable[[KernelResources | str], None]
) -> None:
    compiled(FIGURES)
    accept(tmp_path)
    assert read_baseline(tmp_path / "kernels.json", KernelBaseline) == KernelBaseline(
        triton="9.9.9", resources={f"sm_{capability}": {"mine/bf16": FIGURES} for capability in CAPABILITIES}
    )
