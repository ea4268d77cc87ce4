"""One row per stated figure: nothing is picked, and nothing that counts less decides."""

from dataclasses import replace

import pytest

from hybridvalidation.judge.roll_up import counts, roll_up
from hybridvalidation.judge.verdict import Status, Verdict
from hybridvalidation.records.outcome import Evidence
from hybridvalidation.scenario import Target

TARGETS = {
    name: Target(id=name, source=("000",), description="s", metric="peak_vram_gib", direction="max", value=1.0)
    for name in ("small", "fast")
}


def judged(
    status: Status, place: str = "here", *, of_scenario: bool = False, registered: bool = False, known: bool = True
) -> Verdict:
    return Verdict(
        target="small", description="s", stack=f"{place}-stack", status=status, reason=f"{place} says so.",
        because="so", evidence=Evidence.PLANNED if known else None, value=1.0 if known else None,
        is_of_scenario=of_scenario, place=place, is_registered=registered,
    )  # fmt: skip


def row_of(*items: Verdict) -> Verdict:
    small, fast = roll_up(TARGETS, items)
    assert (fast.status, fast.reason) == (Status.UNPROVEN, "judged nowhere.")
    return small


def test_the_least_favourable_verdict_stands_and_the_others_are_told() -> None:
    found = row_of(judged(Status.HOLDS, "a"), judged(Status.REFUTED, "b"), judged(Status.HOLDS, "c"))
    assert (found.status, found.place) == (Status.REFUTED, "b")
    assert found.reason == "b says so. Also holds: a-stack in a, c-stack in c."


def test_a_scenario_counts_before_a_stack_and_a_registered_study_before_both() -> None:
    stack, scenario = judged(Status.REFUTED, "a"), judged(Status.HOLDS, "b", of_scenario=True)
    assert row_of(stack, scenario).place == "b"
    assert row_of(stack, scenario, judged(Status.UNPROVEN, "study", registered=True)).place == "study"


def test_a_place_without_a_record_does_not_count_beside_one_that_has_some() -> None:
    found = row_of(judged(Status.HOLDS, "a"), judged(Status.UNPROVEN, "b", registered=True, known=False))
    assert (found.status, found.place) == (Status.HOLDS, "a")


def test_a_scenarios_row_waits_for_the_study_that_owes_it() -> None:
    alone = judged(Status.HOLDS, "study", registered=True)
    owed = judged(Status.UNPROVEN, "scenario", of_scenario=True, registered=True, known=False)
    assert row_of(alone, owed).status is Status.UNPROVEN
    assert row_of(alone, owed).reason == "scenario says so. Also holds: study-stack in study."
    refuted, held = replace(alone, status=Status.REFUTED), judged(Status.HOLDS, "b")
    assert row_of(refuted, replace(held, is_registered=True)).status is Status.REFUTED  # the study's own verdicts count


def test_figures_outside_of_a_stated_range_are_counted() -> None:
    found = judged(Status.HOLDS)
    outside = replace(found, is_outside=True)
    assert counts([row_of(found)]) == (
        "1 stated targets: 1 hold without a remark, 0 hold with one.\n\nOf those that hold:\n\n"
        "- By evidence: 1 planned."
    )
    assert counts([row_of(outside)]).startswith("1 stated targets: 0 hold without a remark, 1 hold with one.")
    told = "By evidence: 1 planned.\n- Better than the stated range: 1."
    assert counts([row_of(outside)]).endswith(told)


def test_estimates_that_no_recorded_run_tests_are_counted() -> None:
    found = judged(Status.HOLDS)
    untested = replace(found, is_untested=True)
    assert counts([row_of(untested)]).endswith("1 planned.\n- By an estimate that no recorded run tests: 1.")


def test_bounds_that_reject_no_harm_are_counted() -> None:
    found = judged(Status.HOLDS)
    blunt = replace(found, is_blunt=True)
    assert "a harmful control" not in counts([row_of(found)])
    assert counts([row_of(blunt)]).endswith("meets, or does not clearly miss: 1.")


@pytest.mark.parametrize(
    ("other", "is_missed"), [(Status.REFUTED, True), (Status.MISLEADING, True), (Status.HOLDS, False)]
)
def test_what_one_stack_holds_and_another_misses_is_counted(other: Status, *, is_missed: bool) -> None:
    row = row_of(judged(Status.HOLDS, of_scenario=True), judged(other, "there"))
    told = counts([row])
    assert row.status is Status.HOLDS
    assert told.endswith("while another judged stack misses it: 1.") is is_missed


@pytest.mark.parametrize("status", Status)
def test_every_verdict_is_counted(status: Status) -> None:
    rows = roll_up(TARGETS, [judged(status)])
    assert counts(rows).startswith("2 stated targets: ")
    verdicts = counts(rows).partition("\n")[0]
    assert sum(int(word) for word in verdicts.replace(":", "").split() if word.isdigit()) == 4  # 2 of 2
