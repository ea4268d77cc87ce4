"""Ways to train a model on a card: what short runs promise is near the whole run, and fits."""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridtrain.models.model_config import ModelConfig
from hybridtrain.planning import fitting
from hybridtrain.planning.candidates import (
    ARRANGEMENTS,
    CUT_ARRANGEMENTS,
    LEVELS,
    Arrangement,
    Candidate,
    Clip,
    FitRequest,
    sizes,
)
from hybridtrain.planning.fitting import (
    ALIKE,
    METHODS,
    Method,
    TrainingOption,
    best_option,
    confirmed,
    fit,
    in_order,
    least,
    precisions,
    speed,
    tiers_of,
)
from hybridtrain.planning.short_run import ShortRuns
from hybridtrain.reports.fit_files import train_path, write_files
from hybridtrain.virtual_gpu.cards.card import MARGIN_SHARE, Card, Host, find_card
from hybridtrain.virtual_gpu.cards.links import World

MODEL = ModelConfig(
    family="llama", vocab_size=512, max_seq_len=512, num_blocks=4, width=256, num_heads=4, num_kv_heads=4,
    ffn_width=688,
)  # fmt: skip


def request(card_mib: int, num_sequences: int, host_gib: float = 8.0) -> FitRequest:
    card = Card(
        name="small", memory_mib=card_mib, compute_capability="8.9", tflops_bf16=10.0, tflops_fp32=5.0,
        memory_gbps=200.0, pcie_gbps=16.0, context_mib=64,
    )  # fmt: skip
    return FitRequest(MODEL, card, Host(memory_gib=host_gib, reserved_gib=1.0), 512, num_sequences)


@pytest.mark.parametrize(("arrangement", "level", "kept", "clip"), [
    (0, 0, 2, "exact"), (1, 2, 1, "exact"), (3, 2, 0, "exact"), (3, 2, 0, "previous"),
])  # fmt: skip
def test_short_runs_tell_of_the_whole_run(arrangement: int, level: int, kept: int, clip: Clip) -> None:
    # Edges of a pass count for more in a small model: of four blocks two have a neighbour on one side only.
    asked = replace(request(2048, 3), clip=clip)
    candidate = Candidate(
        level=LEVELS[level], arrangement=ARRANGEMENTS[arrangement], micro_batch_size=1, num_micro_batches=3,
        keep_last=kept,
    )  # fmt: skip
    short, whole = ShortRuns().of(asked, candidate), asked.run(candidate)
    assert short.seconds(kept) == pytest.approx(whole.time.seconds, rel=0.15)
    assert short.device_bytes(kept) == pytest.approx(whole.device_used_bytes, rel=0.1)
    assert short.host_bytes(kept) == pytest.approx(whole.host_peak_bytes, rel=0.02)


@pytest.mark.parametrize(("arrangement", "level", "kept"), [(0, 0, 2), (1, 1, 1), (2, 2, 1)])
def test_short_runs_tell_of_the_whole_run_on_several_cards(arrangement: int, level: int, kept: int) -> None:
    asked = replace(request(2048, 20), world=World(size=4))
    candidate = Candidate(
        level=LEVELS[level], arrangement=CUT_ARRANGEMENTS[arrangement], micro_batch_size=1, num_micro_batches=5,
        keep_last=kept, world=4,
    )  # fmt: skip
    short, whole = ShortRuns().of(asked, candidate), asked.run(candidate)
    assert whole.tokens_per_step == 20 * 512
    assert short.seconds(kept) == pytest.approx(whole.time.seconds, rel=0.15)
    assert short.device_bytes(kept) == pytest.approx(whole.device_used_bytes, rel=0.1)
    assert short.host_bytes(kept) == pytest.approx(whole.host_peak_bytes, rel=0.1)
    option = confirmed(asked, _way(candidate))
    assert option.micro_batches_run == 3
    # So small a model's kernels end before the next is issued: a step's last kernels of three micro-batches are issued
    # while the first ones run, those of the fifth are not.
    assert option.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.1)
    assert option.device_bytes == pytest.approx(whole.device_used_bytes, rel=0.02)
    assert option.host_bytes == pytest.approx(whole.host_peak_bytes, rel=0.02)


def _way(candidate: Candidate) -> TrainingOption:
    return TrainingOption(method="full", candidate=candidate, device_bytes=0.0, host_bytes=0.0, fits=True)


def test_of_ways_that_no_estimate_tells_apart_the_most_exact_is_recommended() -> None:
    def option(level: int, speed: float, *, fits: bool = True, method: Method = "full") -> TrainingOption:
        candidate = Candidate(
            level=LEVELS[level], arrangement=ARRANGEMENTS[0], micro_batch_size=1, num_micro_batches=1, keep_last=0
        )
        return TrainingOption(
            method=method, candidate=candidate, device_bytes=0.0, host_bytes=0.0, fits=fits, tokens_per_s=speed
        )

    exact, int8, bf16, factored = (
        option(level, speed) for level, speed in ((0, 90.0), (1, 94.0), (2, 95.5), (4, 100.0))
    )
    assert best_option(in_order([exact, int8, bf16, factored])) is bf16
    assert best_option([exact, int8, factored]) is factored
    assert best_option([option(0, 100.0, fits=False), int8]) is int8
    assert best_option([option(0, 100.0, fits=False)]) is None
    assert in_order([exact, factored, option(2, 200.0, fits=False)])[0] is factored


def test_what_several_cards_hold_alike_is_cut_where_the_optimizer_allows_it() -> None:
    options = fit(replace(request(512, 8), world=World(size=8)))
    assert all(option.fits for option in options)
    assert all(option.candidate.num_micro_batches * option.candidate.micro_batch_size == 1 for option in options)
    whole = {"lora", "qlora", "bf16-factored", "int8-factored"}
    assert {option.name for option in options if not option.candidate.arrangement.zero_stage} == whole
    with pytest.raises(ValueError, match="num_sequences: 8 must be a multiple of 3 cards"):
        replace(request(512, 8), world=World(size=3))


def test_a_large_card_has_room_for_every_way() -> None:
    options = fit(request(4096, 1))
    assert {option.method for option in options} == set(METHODS)
    assert all(option.fits for option in options)
    assert all(option.candidate.arrangement is ARRANGEMENTS[0] for option in options)
    speeds = [option.tokens_per_s or 0.0 for option in options]
    assert speeds == sorted(speeds, reverse=True)


def test_on_a_small_card_what_fits_stands_first_and_keeps_its_share_free() -> None:
    asked = request(120, 1, host_gib=1.03)
    asked = replace(asked, host=replace(asked.host, disk_gib=0.001))
    options = fit(asked, methods=["full"], free_share=0.1)
    assert [option.fits for option in options] == sorted((option.fits for option in options), reverse=True)
    assert options[0].fits
    assert not options[-1].fits
    assert options[-1].tokens_per_s is None
    whole = confirmed(asked, options[0], free_share=0.1)
    assert whole.fits
    assert whole.evidence == "planned"
    assert whole.device_bytes <= 0.9 * asked.card.memory_bytes


def test_an_exhaustive_search_finds_nothing_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "LEVELS", LEVELS[:2])
    asked, runs, tried = request(130, 1), ShortRuns(), list[str]()
    quick = fit(asked, methods=["full"], runs=runs)[0]
    every = fit(asked, methods=["full"], is_exhaustive=True, on_try=tried.append, runs=runs)[0]
    assert any("disk" in text for text in tried)  # which the other tries only where host memory has no room
    assert quick.fits
    assert speed(quick) >= ALIKE * speed(every)


def test_of_arrangements_about_as_fast_the_one_that_offloads_least_is_taken() -> None:
    asked, runs = request(130, 2), ShortRuns()
    capacity = (1 - MARGIN_SHARE) * asked.card.memory_bytes
    found = {option.name: option for option in fit(asked, runs=runs)}
    for method in METHODS:
        for level in fitting.levels_of(method):
            arrangements = [each for tier in fitting.tiers_of(asked, level) for each in tier if not each.on_disk]
            speeds = dict[Arrangement, float]()
            for arrangement in arrangements:
                for size in sizes(asked):
                    candidate = Candidate(
                        level=level, arrangement=arrangement, micro_batch_size=size, num_micro_batches=2 // size,
                        keep_last=0,
                    )  # fmt: skip
                    short = runs.of(asked, candidate)
                    if (kept := short.most_kept(capacity)) is not None:
                        tokens_per_s = asked.tokens_per_step / short.seconds(kept)
                        speeds[arrangement] = max(speeds.get(arrangement, 0.0), tokens_per_s)
            chosen = found[level.name]
            first = next(each for each in speeds if speeds[each] >= ALIKE * max(speeds.values()))
            assert (chosen.candidate.arrangement, speed(chosen)) == (first, speeds[first])


def test_the_smallest_option_recomputes_everything_and_no_arrangement_takes_less() -> None:
    asked, runs = request(2048, 2), ShortRuns()
    options = least(asked, runs=runs)
    assert [option.device_bytes for option in options] == sorted(option.device_bytes for option in options)
    fastest = {option.name: option for option in fit(asked, runs=runs)}
    assert len(options) == len(fastest)
    for option in options:
        candidate = option.candidate
        assert (candidate.micro_batch_size, candidate.num_micro_batches, candidate.keep_last) == (1, 2, 0)
        assert option.device_bytes <= fastest[option.name].device_bytes
        (arrangements, *_) = fitting.tiers_of(asked, candidate.level)
        others = [runs.of(asked, replace(candidate, arrangement=each)).device_bytes(0) for each in arrangements]
        assert option.device_bytes == min(others)
    no_host = replace(asked, host=Host(memory_gib=4.0001, disk_gib=1e-6))
    assert all(option.candidate.arrangement.is_resident for option in least(no_host, runs=runs))


def test_what_is_shared_is_run_once() -> None:
    asked, runs = request(4096, 1), ShortRuns()
    candidates = [
        Candidate(level=level, arrangement=ARRANGEMENTS[0], micro_batch_size=1, num_micro_batches=1, keep_last=0)
        for level in LEVELS[2:4]
    ]
    first, second = (runs.of(asked, candidate) for candidate in candidates)
    assert first.passes is second.passes
    assert first.seconds(0) != second.seconds(0)  # by their updates


def test_cards_share_short_runs_and_get_the_figures_of_their_own() -> None:
    asked, shared = request(4096, 4), ShortRuns()
    candidate = Candidate(
        level=LEVELS[1], arrangement=ARRANGEMENTS[2], micro_batch_size=2, num_micro_batches=2, keep_last=1
    )
    others = [
        asked,
        replace(asked, card=find_card("rtx-4090")),
        replace(asked, card=find_card("h100-sxm")),  # a larger cuBLAS workspace
    ]
    found = [shared.of(each, candidate) for each in others]
    assert all(short.passes is found[0].passes for short in found)
    for each, short in zip(others, found, strict=True):
        alone = ShortRuns().of(each, candidate)
        for kept in (0, 1):
            assert short.device_bytes(kept) == alone.device_bytes(kept)
            assert short.host_bytes(kept) == alone.host_bytes(kept)
            assert short.seconds(kept) == alone.seconds(kept)
            assert short.bound(kept) is alone.bound(kept)
    assert len({short.seconds(0) for short in found}) == len(found)
    longer = shared.of(replace(asked, seq_len=256), candidate)
    assert longer.passes is not found[0].passes


def test_fused_updates_take_half_the_passes_where_they_clip_by_the_previous_norm(tmp_path: Path) -> None:
    asked = request(2048, 3)
    candidate = Candidate(
        level=LEVELS[2], arrangement=ARRANGEMENTS[3], micro_batch_size=1, num_micro_batches=3, keep_last=0
    )
    exact, previous = (replace(asked, clip=clip).run(candidate).time.seconds for clip in ("exact", "previous"))
    assert 0.5 < previous / exact < 0.75
    option = TrainingOption(method="full", candidate=candidate, device_bytes=0, host_bytes=0, fits=True)
    write_files(tmp_path, "gpt2-small", replace(asked, clip="previous"), [option], 10**6)
    assert 'clip = "previous"' in train_path(tmp_path, option).read_text()


def test_tiles_are_tried_where_a_long_sequence_does_not_fit_otherwise() -> None:
    model = replace(MODEL, max_seq_len=2**14, ffn_width=2752)
    asked = replace(request(600, 1), model=model, seq_len=2**14)
    (option,) = fit(asked, methods=["lora"])
    assert option.fits
    assert option.candidate.arrangement.tiles
    short = replace(asked, seq_len=2**12)
    assert not fit(short, methods=["lora"])[0].candidate.arrangement.tiles
    assert all(not each.tiles for tier in tiers_of(short, LEVELS[0]) for each in tier)


@pytest.mark.parametrize("cards", [1, 2])
def test_adapters_beside_8_bit_products_are_arranged_as_other_adapters(cards: int) -> None:
    asked = replace(request(2048, 4), world=World(size=cards), matmul="int8")
    for method, level in precisions(["lora", "qlora"], "int8"):
        assert tiers_of(asked, level) == tiers_of(asked, next(each for _, each in precisions([method])))
    assert least(asked, methods=["lora"])[0].fits


def test_disk_is_tried_where_the_host_has_no_room() -> None:
    asked = request(120, 1, host_gib=1.03)
    option = fit(asked, methods=["full"], free_share=0.1)[-1]
    assert option.name == "exact"
    assert option.candidate.arrangement.on_disk
    assert option.disk_bytes > 0


@pytest.mark.parametrize(("card_mib", "arrangement"), [(2048, 0), (160, 2)])
def test_two_micro_batches_tell_of_all(card_mib: int, arrangement: int) -> None:
    asked = request(card_mib, 6)
    candidate = Candidate(
        level=LEVELS[2], arrangement=ARRANGEMENTS[arrangement], micro_batch_size=1, num_micro_batches=6, keep_last=0
    )
    option = TrainingOption(method="full", candidate=candidate, device_bytes=0, host_bytes=0, fits=True)
    found, whole = confirmed(asked, option), asked.run(candidate)
    assert found.evidence == "planned, 2 of 6 micro-batches"
    assert found.device_bytes == pytest.approx(whole.device_used_bytes, abs=2 * 2**20)  # one segment for the batches
    assert found.host_bytes == whole.host_peak_bytes
    assert found.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.02)  # the first pass waits for its copies
