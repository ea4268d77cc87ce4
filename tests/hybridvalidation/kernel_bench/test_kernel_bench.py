"""Running benchmark cases: who is timed, who is not and why, and what survives when the time is over."""

import re
import time
from dataclasses import replace

import pytest
import torch

from bench_cases import CPU, FakeClock, FakeStopwatch, bench, case, doubled, provider, times
from hybridkernels import provider as chooser
from hybridvalidation.kernel_bench import timing
from hybridvalidation.kernel_bench.bench import call, judge, make_bounds, run_case, run_cases
from hybridvalidation.kernel_bench.case import (
    Clock,
    Inputs,
    Mode,
    Run,
    Setup,
    Tensors,
    forced,
    needs_package,
    own_providers,
    trained,
    widened,
)
from hybridvalidation.kernel_bench.record import KernelRecord
from hybridvalidation.kernel_bench.timing import (
    MOST_ROUNDS,
    DeviceStopwatch,
    Stopwatch,
    make_stopwatch,
    quantiles,
    time_in_turn,
)
from hybridvalidation.records.outcome import Evidence, Outcome


def stopwatch(**times_s: float) -> FakeStopwatch:
    return FakeStopwatch(FakeClock(), {name: (seconds,) for name, seconds in times_s.items()})


def outcomes(record: KernelRecord) -> dict[str, Outcome]:
    return {result.provider: result.outcome for result in record.results}


def raising(error: Exception) -> Setup:
    def setup(_: Inputs) -> Run:
        raise error

    return setup


def test_a_wrong_provider_is_recorded_and_never_timed() -> None:
    watch = stopwatch(fast=1e-6, right=1e-3)
    made = run_case(bench(watch), case(watch.provider("fast", doubled(2.01)), watch.provider("right")))
    assert outcomes(made) == {"fast": Outcome.WRONG, "right": Outcome.OK}
    assert "fast" not in watch.given
    wrong = made.results[0]
    assert wrong.times is None
    assert "error 0.03 is above" in wrong.message
    assert [result.provider for result, _ in made.timed()] == ["right"]


@pytest.mark.parametrize(
    ("setup", "description"),
    [
        (lambda i: lambda: (i.args[0].double() * torch.nan,), "not finite"),
        (lambda i: lambda: (i.args[0][:2] * 2,), r"shape \(2,\), expected \(4,\)"),
        (lambda i: lambda: (i.args[0] * 2, i.args[0]), "2 outputs, 1 expected"),
    ],
)
def test_nan_other_shapes_and_other_counts_are_wrong(setup: Setup, description: str) -> None:
    found = case()
    inputs = found.make_inputs(CPU)
    verdict = judge(setup(inputs)(), make_bounds(found, inputs))
    assert re.search(description, verdict.message)


def test_the_bound_is_twice_the_same_dtypes_error_and_one_rounding() -> None:
    # 2 * 3 = 6 is the largest value; the plain formula is off by 0.006 there.
    found = case(same_dtype=doubled(2.002))
    inputs = found.make_inputs(CPU)
    (bound,) = make_bounds(found, inputs)
    assert bound.allowed == pytest.approx(2 * 0.006 + 6 * 2**-24, rel=1e-4)
    assert not judge(doubled(2.0039)(inputs)(), [bound]).message
    assert judge(doubled(2.0041)(inputs)(), [bound]).message


def test_where_plain_torch_is_exact_one_rounding_is_allowed() -> None:
    found = case()
    inputs = found.make_inputs(CPU)
    bounds = make_bounds(found, inputs)
    one_step_up = torch.nextafter(inputs.args[0] * 2, torch.tensor(torch.inf))
    assert bounds[0].allowed == 6 * 2**-24
    assert judge((one_step_up,), bounds).message  # 4 + 2^-21 and 6 + 2^-21: a whole step, not half of one
    assert not judge((inputs.args[0] * 2 + torch.tensor([6 * 2**-24, 0, 0, 0]),), bounds).message


def test_a_missing_provider_is_listed_with_its_reason() -> None:
    watch = stopwatch(right=1e-3)
    absent = provider("absent", raising(AssertionError("must not be set up")), missing="needs a CUDA card")
    made = run_case(bench(watch), case(absent, watch.provider("right")))
    assert outcomes(made) == {"absent": Outcome.SKIPPED, "right": Outcome.OK}
    assert made.results[0].message == "needs a CUDA card"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ImportError("no module"), Outcome.SKIPPED),
        (ValueError("swiglu: 'triton' cannot run here; allowed: torch"), Outcome.SKIPPED),
        (ValueError("a bad shape"), Outcome.ERROR),
        (torch.OutOfMemoryError("CUDA out of memory"), Outcome.ERROR),
    ],
)
def test_a_provider_that_fails_does_not_stop_the_others(error: Exception, outcome: Outcome) -> None:
    watch = stopwatch(right=1e-3)
    made = run_case(bench(watch), case(provider("broken", raising(error)), watch.provider("right")))
    assert outcomes(made) == {"broken": outcome, "right": Outcome.OK}
    assert str(error) in made.results[0].message
    assert made.results[1].times is not None


def test_a_provider_that_breaks_while_it_is_timed_has_no_times() -> None:
    calls = 0

    def setup(inputs: Inputs) -> Run:
        def run() -> Tensors:
            nonlocal calls
            calls += 1
            if calls > 5:
                raise RuntimeError("lost")
            return (inputs.args[0] * 2,)

        return run

    watch = stopwatch(frail=1e-6, right=1e-3)
    made = run_case(bench(watch), case(watch.provider("frail", setup), watch.provider("right")))
    assert outcomes(made) == {"frail": Outcome.ERROR, "right": Outcome.OK}
    assert made.results[0].times is None
    assert made.results[0].message == "RuntimeError: lost"


def test_without_a_definition_nobody_is_judged() -> None:
    watch = stopwatch(right=1e-3)
    made = run_case(bench(watch), case(watch.provider("right"), exact=raising(RuntimeError("too large"))))
    assert made.results[0].outcome is Outcome.ERROR
    assert made.results[0].message == "not judged: RuntimeError: too large"


def test_updates_in_place_are_checked_after_some_calls() -> None:
    def counting(factor: float) -> Setup:
        def setup(inputs: Inputs) -> Run:
            value = inputs.args[0].clone()
            return lambda: (value.mul_(factor),)

        return setup

    found = case(exact=counting(2.0), same_dtype=counting(2.0), checked_calls=3)
    inputs = found.make_inputs(CPU)
    bounds = make_bounds(found, inputs)
    assert bounds[0].largest == 3 * 8
    assert not judge(call(found, counting(2.0)(inputs)), bounds).message


def test_a_run_on_the_processor_is_executed_by_the_wall_clock() -> None:
    watch = stopwatch(right=1e-3)
    made = run_case(bench(watch), case(watch.provider("right"), clock=Clock.DEVICE))
    assert (made.evidence, made.clock) == (Evidence.EXECUTED, Clock.WALL)
    assert made.results[0].peak_bytes is None  # not counted, which is not zero


def test_a_cut_off_run_keeps_its_records() -> None:
    kept: list[KernelRecord] = []

    def on_record(record: KernelRecord) -> None:
        kept.append(record)
        if len(kept) == 2:
            raise KeyboardInterrupt

    watch = stopwatch(right=1e-3)
    cases = [case(watch.provider("right"), shape=f"shape {number}") for number in range(4)]
    with pytest.raises(KeyboardInterrupt):
        run_cases(bench(watch, on_record), cases, limit_s=100)
    assert [record.shape for record in kept] == ["shape 0", "shape 1"]


def test_no_case_begins_that_the_time_is_too_short_for() -> None:
    watch = stopwatch(slow=0.5)  # 0.5 s a call, 1 s a case: rounds until three times the budget, 3.5 s in all
    cases = [case(watch.provider("slow"), shape=f"shape {number}") for number in range(4)]
    found = run_cases(bench(watch), cases, limit_s=10)
    assert len(found.records) == 2  # 10 s - 2 * 3.5 s is less than the third would take
    assert found.not_run == ["swiglu shape 2 float32 forward", "swiglu shape 3 float32 forward"]
    assert watch.clock.now_s <= 10


def test_the_first_case_always_begins() -> None:
    watch = stopwatch(slow=0.5)
    assert len(run_cases(bench(watch), [case(watch.provider("slow"))] * 2, limit_s=0.1).records) == 1


def test_providers_take_turns_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []

    def run(name: str) -> Run:
        def called() -> Tensors:
            order.append(name)
            return ()

        return called

    class Watch:
        def warm_up(self, _: Run) -> None:
            raise AssertionError

        def seconds(self, run: Run) -> float:
            run()
            return 9.0 if len(order) <= 2 else 1.0  # memory is taken in the first round

    found = time_in_turn({"a": run("a"), "b": run("b")}, Watch(), budget_s=1e9, on_fault=lambda *_: None)
    assert order == ["a", "b"] * (MOST_ROUNDS + 1)
    assert found["a"] == times(1.0, spread=0.0, num_samples=MOST_ROUNDS)


@pytest.mark.parametrize(("seconds", "samples"), [(1e-6, 100), (0.03125, 32), (0.1, 20), (0.5, 6), (60.0, 1)])
def test_samples_end_with_the_budget_but_20_are_worth_three_times_of_it(seconds: float, samples: int) -> None:
    watch = FakeStopwatch(FakeClock(), {"it": (seconds,)})
    run = watch.provider("it").setup(Inputs((torch.ones(1),)))
    found = time_in_turn({"it": run}, watch, budget_s=1.0, on_fault=lambda *_: None, now=watch.clock)
    assert found["it"].num_samples == samples


def test_quantiles_are_linear_between_samples() -> None:
    found = quantiles([5.0, 1.0, 2.0, 4.0, 3.0, 6.0])
    assert (found.q20_s, found.q50_s, found.q80_s, found.num_samples) == (2.0, 3.5, 5.0, 6)
    assert quantiles([7.0]) == times(7.0, spread=0.0, num_samples=1)


def test_faster_means_that_the_quantiles_do_not_overlap() -> None:
    assert times(1.0, spread=0.04).is_faster_than(times(1.1, spread=0.04))
    assert not times(1.0, spread=0.05).is_faster_than(times(1.1, spread=0.05))
    assert not times(1.1).is_faster_than(times(1.0))


def test_the_wall_stopwatch_counts_the_call() -> None:
    calls = []
    watch = Stopwatch(CPU)
    watch.warm_up(lambda: tuple(calls))
    assert 0 <= watch.seconds(lambda: (calls.append(1), ())[1]) < 60
    assert calls == [1]


def test_the_device_stopwatch_empties_caches_and_hides_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("record")

        def synchronize(self) -> None:
            order.append("wait")

        def elapsed_time(self, _: "Event") -> float:
            return 2.5  # milliseconds

    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (slept.append(cycles), order.append("sleep")))
    monkeypatch.setattr(timing, "_FLUSH_BYTES", 16)
    watch = DeviceStopwatch(CPU)
    watch._flush.fill_(1)

    def run() -> Tensors:
        order.append("run")
        time.sleep(0.001)  # a slow launch
        return ()

    watch.warm_up(run)
    order.clear()
    assert watch.seconds(run) == 0.0025
    assert order == ["sleep", "record", "run", "record", "wait"]
    assert slept[0] >= 2 * 0.001 * 2.0e9  # twice as long as launching took, at 2 GHz
    assert not watch._flush.any()


def test_where_there_is_no_card_every_clock_is_the_wall_clock() -> None:
    assert type(make_stopwatch(Clock.DEVICE, CPU)) is Stopwatch
    assert type(make_stopwatch(Clock.WALL, torch.device("cuda"))) is Stopwatch


@pytest.mark.parametrize(("mode", "outputs"), [(Mode.FORWARD, 1), (Mode.BACKWARD, 2), (Mode.BOTH, 3)])
def test_modes_give_output_gradients_or_both_again_and_again(mode: Mode, outputs: int) -> None:
    x, y = torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor([5.0, 7.0], requires_grad=True)
    run = trained(torch.mul, mode)(Inputs((x, y), torch.tensor([1.0, 10.0])))
    out, grad_x, grad_y = torch.tensor([10.0, 21.0]), torch.tensor([5.0, 70.0]), torch.tensor([2.0, 30.0])
    expected = {1: [out], 2: [grad_x, grad_y], 3: [out, grad_x, grad_y]}[outputs]
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))


def test_wider_inputs_are_copies_that_keep_integers_and_gradients() -> None:
    seen: list[Inputs] = []

    def setup(inputs: Inputs) -> Run:
        seen.append(inputs)
        return tuple

    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    widened(setup, torch.float64)(Inputs((x, torch.ones(2), torch.ones(2, dtype=torch.int64)), x.detach()))
    dtypes = [arg.dtype for arg in seen[0].args]
    assert dtypes == [torch.float64, torch.float64, torch.int64]
    assert [arg.requires_grad for arg in seen[0].args] == [True, False, False]
    assert seen[0].args[0].is_leaf
    assert seen[0].grad is not None
    assert seen[0].grad.dtype is torch.float64


def choosing(key: str, ran: list[str]) -> Setup:
    """An op that chooses as ours do on CUDA."""

    def setup(inputs: Inputs) -> Run:
        def run() -> Tensors:
            ran.append(chooser.chosen_provider(key, ("triton", "torch"), CPU))
            return (inputs.args[0] * 2,)

        return run

    return setup


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_a_forced_provider_is_the_one_that_runs(name: str) -> None:
    ran: list[str] = []
    run = forced("an_op", name, choosing("an_op", ran))(Inputs((torch.ones(1),)))
    run()
    run()
    assert ran == [name, name]


def test_an_op_that_does_not_ask_is_not_timed_as_what_was_wanted() -> None:
    with pytest.raises(RuntimeError, match="the op makes no choice of provider for 'an_op', so"):
        forced("an_op", "triton", doubled())(Inputs((torch.ones(1),)))


def test_an_op_that_lacks_the_provider_says_so() -> None:
    run = forced("an_op", "bitsandbytes", choosing("an_op", []))(Inputs((torch.ones(1),)))
    with pytest.raises(ValueError, match="'bitsandbytes' cannot run here; allowed: triton, torch"):
        run()


def test_on_the_processor_the_op_is_ours_and_the_cards_providers_are_missing() -> None:
    found = own_providers("swiglu", doubled(), CPU, others=("torch", "bitsandbytes"))
    assert [(one.name, one.is_ours, one.missing) for one in found] == [
        ("triton", False, "needs a CUDA card"), ("torch", False, "needs a CUDA card"),
        ("bitsandbytes", False, "needs a CUDA card"), ("cpu", True, ""),
    ]  # fmt: skip


def test_a_missing_package_is_named() -> None:
    assert needs_package("no_such_package", torch.device("cuda")) == "no_such_package is not installed"
    assert needs_package("no_such.package", torch.device("cuda")) == "no_such.package is not installed"
    assert needs_package("torch", CPU) == "needs a CUDA card"
    assert not needs_package("torch", torch.device("cuda"))


def test_a_lost_card_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(_: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    watch = stopwatch(right=1e-3)
    cases = [case(provider("right", raising(RuntimeError("lost"))), shape=f"shape {number}") for number in range(3)]
    found = run_cases(replace(bench(watch), device=torch.device("cuda")), cases, limit_s=100)
    assert len(found.records) == 1
    assert found.lost_card == "swiglu shape 0 float32 forward"
    assert len(found.not_run) == 2
