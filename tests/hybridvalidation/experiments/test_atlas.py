"""The atlas: its committed cells are what the commands answer, and a job makes them once for cards that are alike."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybridtrain.cli.main import main
from hybridtrain.models.model_config import PRESETS
from hybridtrain.planning.candidates import Candidate, FitRequest
from hybridtrain.planning.dry_runs import DryRun
from hybridtrain.units import MIB
from hybridtrain.virtual_gpu.cards.card import FitVerdict, card_catalogue
from hybridvalidation.experiments import atlas_runs
from hybridvalidation.experiments.atlas import (
    Atlas,
    AtlasFile,
    AtlasJob,
    AtlasModel,
    AtlasRecord,
    Cell,
    chosen_cells,
    newest_records,
    prune_atlas,
    read_atlas,
    read_atlas_file,
)
from hybridvalidation.experiments.atlas_runs import make_atlas, make_columns
from hybridvalidation.gate.atlas import compare_atlas
from hybridvalidation.gate.gate import Order
from hybridvalidation.records.store import append_record
from hybridvalidation.show.pages.atlas import atlas_text

SCENARIOS, RECORDS = Path("scenarios"), Path("results/records")
CARDS = ("h100-sxm", "rtx-3050-laptop-4gb", "rtx-4090", "titan-rtx")
"""The first has larger workspaces, the second hardly room for anything, the last no flash attention."""


@pytest.fixture(scope="module")
def job() -> AtlasJob:
    job = read_atlas_file(SCENARIOS).jobs(["gpt2-small"])["gpt2-small"]
    cards = {name: card_catalogue()[name] for name in CARDS}
    return replace(job, cards=cards, levels=("exact", "qlora"), longest=(512, 1024))


@pytest.fixture(scope="module")
def record(job: AtlasJob) -> AtlasRecord:
    ended = _Ended(make_columns(job))
    return atlas_runs._record(job, ended)  # type: ignore[arg-type]


class _Ended:
    fault, seconds = "", 1.0

    def __init__(self, answer: object) -> None:
        self.answer = answer


def answer(cell: Cell, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """Return the row that a cell's command prints."""
    words = cell.command.split()[1:]
    capsys.readouterr()
    main([*words, "--json"])
    content = json.loads(capsys.readouterr().out)
    (row,), (smallest,) = content["options"], content["least"]
    return smallest if smallest["fits"] and not row["fits"] else row


def same(cell: Cell, row: dict[str, object]) -> bool:
    figures = [round(row[name] / MIB) for name in ("device_used_bytes", "host_peak_bytes", "disk_peak_bytes")]  # type: ignore[operator]
    speed = round(row["tokens_per_s"] or 0) if row["fits"] else 0  # type: ignore[call-overload]
    return (cell.verdict, cell.device_mib, cell.host_mib, cell.disk_mib, cell.tokens_per_s, cell.offload) == (
        row["verdict"], *figures, speed, row["offload"],
    )  # fmt: skip


def test_a_job_answers_what_the_commands_answer(record: AtlasRecord, capsys: pytest.CaptureFixture[str]) -> None:
    cells = list(record.cells())
    assert len(cells) == len(CARDS) * 1 * 2
    for cell in cells:
        assert same(cell, answer(cell, capsys)), cell


def test_committed_cells_are_what_the_commands_answer(capsys: pytest.CaptureFixture[str]) -> None:
    atlas = read_atlas(SCENARIOS, RECORDS)
    assert atlas is not None
    known = {name: record for name, record in atlas.records.items() if name not in atlas.outdated()}
    small = [cell for name, record in known.items() if PRESETS[name].num_params < 1.3e9 for cell in record.cells()]
    assert {place.partition("/")[0] for place in atlas.file.readme} <= known.keys()
    text = (RECORDS / "atlas.jsonl").read_text(encoding="utf-8")
    for cell in chosen_cells(small, 2, text):  # other ones with every change of the file
        assert same(cell, answer(cell, capsys)), cell


def test_every_committed_model_was_asked_what_the_file_asks() -> None:
    atlas = read_atlas(SCENARIOS, RECORDS)
    assert atlas is not None
    jobs = atlas.file.jobs()
    assert {name: record.levels for name, record in atlas.records.items()} == {
        name: jobs[name].levels for name in atlas.records
    }
    assert all(record.lengths == jobs[name].lengths for name, record in atlas.records.items())


def test_figures_of_an_earlier_time_model_are_told_and_not_compared() -> None:
    atlas = read_atlas(SCENARIOS, RECORDS)
    assert atlas is not None
    old = {name: replace(record, key="0" * 16) for name, record in atlas.records.items()}
    atlas = replace(atlas, records=old, file=replace(atlas.file, models=atlas.file.models[:1]))
    atlas = atlas.of([atlas.file.models[0].name])
    assert atlas.outdated() == (atlas.file.models[0].name,)
    assert f"an earlier time model for 1 models: {atlas.file.models[0].title}." in atlas_text(atlas)
    compared = compare_atlas(atlas, Order())
    assert compared.subject == "0 cells of the atlas"
    assert any("1 of 1 models" in note for note in compared.notes)


def test_a_full_dry_run_is_made_once_for_cards_with_the_same_option(
    job: AtlasJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[object, ...]]()
    run = FitRequest.run

    def counted(request: FitRequest, candidate: Candidate) -> DryRun:
        made.append((replace(candidate, kept_bytes=0.0, tokens_per_s=0.0), request.card.cublas_workspace_bytes))
        return run(request, candidate)

    monkeypatch.setattr(FitRequest, "run", counted)
    alike = {"rtx-3090": card_catalogue()["rtx-4090"], "rtx-4090": card_catalogue()["rtx-4090"]}
    make_columns(replace(job, cards=alike, levels=("qlora",)))
    assert len(made) == 2  # the option of both, and the bytes with nothing off the card
    assert len(set(made)) == 2


def test_cells_survive_the_record(record: AtlasRecord) -> None:
    cells = list(record.cells())
    assert [cell.card for cell in cells[::2]] == sorted(CARDS)
    assert {cell.seq_len for cell in cells} == {1024}  # all positions of GPT-2, below what was asked for
    assert next(cell for cell in cells if cell.card == "rtx-4090").fits
    small, large = (record.resident_mib(card, 1024, "qlora") for card in ("rtx-4090", "h100-sxm"))
    contexts = [card_catalogue()[card].context_mib for card in ("rtx-4090", "h100-sxm")]
    assert large - small - (contexts[1] - contexts[0]) in range(30, 65)  # two workspaces of 32 MiB, not of 8
    assert {record.longest(card, "qlora") for card in CARDS} == {1024}
    with pytest.raises(ValueError, match=r"columns\.tokens_per_s: 7 values must be 8"):
        replace(record, columns=replace(record.columns, tokens_per_s=record.columns.tokens_per_s[1:]))


def test_chosen_cells_take_precisions_and_models_in_turn() -> None:
    cells = [
        Cell(
            model=model, card="c", seq_len=1, level=level, verdict=FitVerdict.FITS, device_mib=1, host_mib=0,
            disk_mib=0, tokens_per_s=1, offload="none", micro_batch_size=1, is_planned=True,
        )
        for model in "abcd" for level in ("lora", "qlora")
    ]  # fmt: skip
    chosen = chosen_cells(cells, 4)
    assert {cell.model for cell in chosen} == set("abcd")
    assert [cell.level for cell in chosen] == ["lora", "qlora"] * 2
    assert chosen_cells(cells, 4) == chosen
    assert {tuple(chosen_cells(cells, 2, str(salt))) for salt in range(8)} != {tuple(chosen[:2])}
    assert len(chosen_cells(cells, 99)) == len(cells)


def test_an_interrupted_job_goes_on(
    record: AtlasRecord, job: AtlasJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AtlasFile(
            readme=(),
        host_memory="64GiB", lengths=(1024,), planned=(1024,), longest=(), levels=("qlora",), checks=1,
        models=(AtlasModel(name="gpt2-small", title="A"), AtlasModel(name="gpt2-medium", title="B")),
    )  # fmt: skip
    jobs = {name: replace(job, model=name) for name in ("gpt2-small", "gpt2-medium")}
    made = list[str]()

    def run(cases: Sequence[AtlasJob]) -> Iterator[tuple[AtlasJob, AtlasRecord]]:
        for case in cases:
            made.append(case.model)
            yield case, replace(record, model=case.model, key=case.key)

    monkeypatch.setattr(atlas_runs, "read_atlas_file", lambda _: file)
    monkeypatch.setattr(AtlasFile, "jobs", lambda _self, _names=(): jobs)
    monkeypatch.setattr(atlas_runs, "in_children", lambda *_: run)
    for _ in range(3):
        make_atlas(SCENARIOS, tmp_path, models=["gpt2-small"], width=1, max_runs=1, say=lambda _: None)
    assert made == ["gpt2-small", "gpt2-medium"]
    assert list(newest_records(tmp_path)) == made
    append_record(tmp_path, "atlas.jsonl", replace(record, accepted="again"))
    assert prune_atlas(tmp_path) == 1
    assert newest_records(tmp_path)["gpt2-small"].accepted == "again"


def test_faults_of_the_file_are_all_told() -> None:
    model = AtlasModel(name="gpt3", title="-")
    with pytest.raises(ValueError, match="gpt3") as raised:
        AtlasFile(
            readme=(),
            host_memory="1GiB",
            lengths=(0,),
            planned=(),
            longest=(),
            levels=("exakt",),
            checks=0,
            models=(model, model),
        )
    told = str(raised.value)
    assert "models: 'gpt3' is there twice; drop one" in told
    assert "did you mean 'exact'?" in told
    assert "checks: 0 must be at least 1" in told
    assert "lengths: 0 must be at least 1" in told


def test_the_verb_shows_models_and_names_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atlas", "gpt2-small", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert {cell["model"] for cell in cells} == {"gpt2-small"}
    assert main(["atlas", "gpt2-smal"]) == 2
    assert "did you mean 'gpt2-small'" in capsys.readouterr().err


def test_no_atlas_without_its_file_or_records(tmp_path: Path) -> None:
    assert read_atlas(tmp_path, RECORDS) is None
    assert read_atlas(SCENARIOS, tmp_path) is None


def test_a_part_of_the_atlas() -> None:
    atlas = read_atlas(SCENARIOS, RECORDS)
    assert isinstance(atlas, Atlas)
    assert list(atlas.of(["gpt2-small"]).records) == ["gpt2-small"]
