"""The guide: what it says follows from the program and its records, and what it names is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import hybridtrain
from hybridtrain.cli.main import _VERBS, main
from hybridtrain.config.decode import load_toml
from hybridtrain.errors import ConfigError
from hybridtrain.models.model_config import ModelConfig, Workload
from hybridtrain.optim import OPTIMIZERS
from hybridtrain.optimizations import OPTIMIZATIONS
from hybridtrain.plan.compose import compose
from hybridtrain.planning.savings import without
from hybridtrain.reports.tables import MARKDOWN
from hybridtrain.training_file import load_config
from hybridtrain.virtual_gpu.cards.card import card_catalogue
from hybridvalidation.guide.models import recommendations
from hybridvalidation.guide.reference import (
    FILES,
    api_errors,
    api_names,
    commands,
    file_settings,
    keys_of,
    settings_table,
    tables_of,
)
from hybridvalidation.guide.techniques import catalogue, example_stack, page_example, step_table, technique_sections
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.pages.scenario import summary_table
from hybridvalidation.show.results import Results

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
FILES_HERE = ScenarioFiles(ROOT / "scenarios")
RESULTS = Results(FILES_HERE, ROOT / "results")
WIDE = ModelConfig(
    family="llama", vocab_size=64, max_seq_len=64, num_blocks=6, width=2048, num_heads=4, num_kv_heads=2, ffn_width=4096
)
"""Large enough for hundredths of GiB; nothing is computed."""
SMALL = Workload(micro_batch_size=4, seq_len=64)


def example_of(kind: str) -> str:
    return page_example((DOCS / "techniques" / f"{kind}.md").read_text(), kind)


def test_every_optimization_has_a_page_in_the_menu() -> None:
    pages = {path.stem for path in (DOCS / "techniques").glob("*.md")} - {"index"}
    assert pages == set(OPTIMIZATIONS)
    for kind in pages:
        text = (DOCS / "techniques" / f"{kind}.md").read_text()
        assert all(f"<!--figure {name} {kind}-->" in text for name in ("step", "technique")), kind
    menu = (ROOT / "mkdocs.yml").read_text()
    assert [kind for kind in pages if f"techniques/{kind}.md" not in menu] == []
    assert all(f"({kind}.md)" in catalogue() for kind in pages)


@pytest.mark.parametrize("kind", sorted(set(OPTIMIZATIONS) - {"flash_attention"}))  # which plain training has too
def test_a_techniques_example_can_be_run_with_it_and_without(kind: str) -> None:
    stack, mine = example_stack(kind, example_of(kind))
    assert compose(stack) != compose(without(stack, mine))


def test_the_table_tells_a_step_with_it_and_without() -> None:
    table = step_table("weight_streaming", example_of("weight_streaming"), model=WIDE, workload=SMALL)
    with_it, rest = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:4])
    assert (with_it[0], rest[0]) == ("with it", "without")
    assert float(with_it[3]) < float(rest[3])  # device GiB
    assert float(with_it[4]) > float(rest[4])  # host GiB


def test_an_example_without_its_technique_is_refused() -> None:
    with pytest.raises(ConfigError, match="no \\[\\[optimizations\\]\\] of kind 'lora'"):
        step_table("lora", '[[optimizations]]\nkind = "mixed_precision"', model=WIDE)
    with pytest.raises(ConfigError, match="a technique's page needs an example"):
        page_example("# LoRA", "lora")


def test_a_page_has_the_rows_of_the_committed_report() -> None:
    page = technique_sections("gradient_checkpointing", RESULTS)
    report = (RESULTS.folder / "tables" / "techniques.md").read_text().splitlines()
    shown = [line for line in page.splitlines() if line.startswith(("| vanilla ", "| checkpointing "))]
    assert set(shown[:2]) <= set(report)
    assert "equal to the baseline to the bit" in page


def test_every_key_of_every_file_says_what_it_means() -> None:
    tables = {table for file in FILES.values() for _, table in tables_of(file)}
    tables |= {*OPTIMIZERS.values(), *OPTIMIZATIONS.values()}
    assert [(cls.__name__, key.name) for cls in tables for key in keys_of(cls) if not key.description] == []
    assert "`[model.shape.experts]`" in file_settings("training")
    table = settings_table(OPTIMIZATIONS["gradient_checkpointing"])
    assert re.search(r"\| `recompute_every` +\| a whole number of at least 0 +\| `8` ", table)


def test_recommendations_are_the_fastest_rows_that_fit() -> None:
    table = recommendations(RESULTS)
    row = next(line for line in table.splitlines() if "tables/1b-16gb.md" in line)
    run = RESULTS.run("1b-16gb")
    fitting = [
        line.split("|") for line in summary_table(run, MARKDOWN, only_main=True).splitlines() if "| yes " in line
    ]
    fastest = max(fitting, key=lambda cells: int(cells[4].replace(",", "")))
    assert f"| {fastest[1].strip()} " in row
    assert fastest[4].strip() in row
    told = {line.split("|")[2].strip(): line.split("|")[-2].strip() for line in table.splitlines()[2:]}
    ladder = (RESULTS.folder / "tables/study-quality-ladder.md").read_text()
    worse = r"^\| best-50b-24gb +\| vanilla +\| (\S+) .*\| worse "
    *_, largest = re.findall(worse, ladder, re.MULTILINE)
    assert told["best-50b-24gb"].startswith(f"worse, {largest} nats at 264k")
    assert told[fastest[1].strip()].startswith("inconclusive, ")


def test_nothing_is_left_for_the_site_to_fill() -> None:
    assert [page for page, text in pages() if re.search(r"\{\{ \w+\(|^::: ", text, re.MULTILINE)] == []


def test_the_python_reference_has_every_name_and_error() -> None:
    text = (DOCS / "api.md").read_text()
    assert [name for name in dir(hybridtrain) if f"| `{name}(" not in text] == []
    assert api_names() in text
    assert api_errors() in text
    assert "| `ConfigError` " in text


def test_the_command_reference_has_every_verb_and_option() -> None:
    text = commands()
    for verb in _VERBS:
        assert f"## hybridtrain {verb}\n" in text
    assert "Exit codes: 0 it went well" in text
    assert "--from PATH" in text


def pages() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def test_commands_that_the_guide_names_exist_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    wrong, told = [], {}
    for page, text in pages():
        joined = re.sub(r"`([^`\n]*)\n([^`\n]*)`", r"`\1 \2`", text)  # code that was broken between two lines
        for line in re.findall(r"(?:^    (?:\w+=\w+ )?|`)hybridtrain ([^`\n]+)", joined, re.MULTILINE):
            words = line.partition("  #")[0].partition(" -- ")[0].split()
            verb = words[0]
            if verb.startswith("--") or verb == "VERB":
                continue
            if verb not in told and verb in _VERBS:
                main([verb, "--help"])
                told[verb] = capsys.readouterr().out
            options = [word for word in words[1:] if word.startswith("--")]
            wrong += [f"{page}: {verb}" for _ in [0] if verb not in _VERBS]
            wrong += [f"{page}: {verb} {option}" for option in options if option not in told.get(verb, "")]
    assert len(told) > 12
    assert wrong == []


def test_files_and_names_that_the_guide_shows_are_there() -> None:
    cards = card_catalogue()
    for page, text in pages():
        for name in re.findall(r"examples/[\w.-]+\.(?:toml|py)", text):
            assert (ROOT / name).is_file(), (page, name)
        for card in re.findall(r"--card ([a-z0-9-]+)", text):
            assert card in cards, (page, card)


@pytest.mark.parametrize(
    ("example", "name", "stack"), [("train-1b-16gb", "1b-16gb", "tight"), ("train-7b-24gb", "7b-24gb", "best-7b-24gb")]
)
def test_an_example_is_what_a_committed_dry_run_says_fits(example: str, name: str, stack: str) -> None:
    file, scenario = load_config(ROOT / "examples" / f"{example}.toml"), FILES_HERE.scenario(name)
    assert set(file.optimizations) == set(FILES_HERE.stack(stack).optimizations)
    assert file.workload == scenario.workload_of(stack)
    assert file.model.resolve() == scenario.model.resolve()
    *_, row = summary_table(RESULTS.run(name), MARKDOWN, [stack], only_main=True).splitlines()
    assert [cell.strip() for cell in row.split("|")[1:3]] == [stack, "yes"]


def test_card_and_model_files_of_the_reference_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(
        'family = "gpt2"\nvocab_size = 256\nmax_seq_len = 8\nnum_blocks = 1\nwidth = 8\nnum_heads = 1\n'
        "num_kv_heads = 1\nffn_width = 8\n"
    )
    required = {key.name for key in keys_of(FILES["model"]) if not key.default}
    assert required <= set(path.read_text().replace("=", " ").split())
    assert load_toml(ModelConfig, path).width == 8
