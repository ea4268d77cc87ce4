"""Verbs that only plan: no card, no arithmetic."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Literal

from cyclopts import Parameter

from hybridtrain.cli.shared import (
    ALLOCATION,
    COMMON,
    RECORDED,
    Allocation,
    Answer,
    CardName,
    Common,
    Count,
    Flag,
    HostMemory,
    Link,
    ModelName,
    Names,
    Recorded,
    ScenarioName,
    StackName,
    names_of,
)

_HOST_MEMORY = "64GiB"
_RARELY = (50_000, 20, 20)
"""``gc.set_threshold``: nearly all objects of a plan go by themselves, and looking for the others takes a tenth of its
time."""


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*_RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_collecting_rarely()
def dry_run(
    *,
    model: ModelName,
    stack: StackName,
    card: CardName,
    micro_batch: Count,
    seq: Count,
    accum: Count | None = None,
    host_memory: HostMemory = _HOST_MEMORY,
    suggest: Flag = False,
    savings: Flag = False,
    world: Count = 1,
    link: Link = "pcie",
    allocation: Allocation = ALLOCATION,
    common: Common = COMMON,
) -> Answer:
    """Plan one model, stack and card without a GPU.

    Exit code 1 when it does not fit.

    Example: hybridtrain dry-run --model gpt2-1b --stack tight --card rtx-4080 --micro-batch 1 --seq 1024

    Args:
        micro_batch: Sequences per micro-batch.
        seq: Tokens per sequence.
        accum: Micro-batches per step; default: the stack's.
        suggest: Where it does not fit, run all other stacks dry too.
        savings: Run it dry without each optimization too, and tell what each saves.
        world: Number of cards, one rank each. The stack's zero says what is sharded.
    """
    from hybridtrain.models.find_model import find_model
    from hybridtrain.models.model_config import asked_workload
    from hybridtrain.planning.dry_runs import DryRunInputs
    from hybridtrain.reports.dry_run_report import plan_run
    from hybridtrain.reports.fit_arguments import parse_host
    from hybridtrain.stacks import stack_folder
    from hybridtrain.virtual_gpu.cards.card import find_card
    from hybridtrain.virtual_gpu.cards.links import World

    files = stack_folder(common.scenarios)
    shape, chosen = find_model(model), files.stack(stack)
    setup = DryRunInputs(
        model=shape, plan=chosen.plan(accum), card=find_card(card), workload=asked_workload(micro_batch, seq),
        config=chosen.training(), host=parse_host(host_memory), world=World(size=world, link=link),
        allocator=allocation.config(), record_history=allocation.snapshot is not None,
    )  # fmt: skip
    report = plan_run(
        setup, chosen, model, files, accum_steps=accum, suggest=suggest, savings=savings, progress=not common.json
    )
    allocation.write(report.run)
    return Answer(text=report.as_text(), content=report.as_mapping(), code=0 if report.fits else 1)


def virtual(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    card: CardName,
    host_memory: str | None = None,
    steps: Count | None = None,
    world: Count | None = None,
    rank: int = 0,
    link: str = "pcie",
    max: str | None = None,  # noqa: A002  the option's name
    worst: Flag = False,
    assume: str | None = None,
    explain: Flag = False,
    allocation: Allocation = ALLOCATION,
    common: Common = COMMON,
) -> Answer:
    """Run a script that wants a CUDA card, unmodified, on one that is not there. Nothing is computed.

    Exit code 1 when it does not fit, or takes more than --max. Options stand before --, the script and its arguments
    after it.

    Example: hybridtrain virtual --card rtx-4090 --steps 2 -- train.py --batch-size 4

    Args:
        command: A Python file, -m and a module, a launcher (torchrun, accelerate launch) or any program that starts
            Python (bash run.sh), and its arguments.
        host_memory: Of the machine around the card, as 64GiB or 128GB; default: as much as is asked for.
        steps: Stop the script after so many optimizer steps; default: let it end. Ctrl-C stops it there, and answers.
        world: Cards that torchrun would start the script on; it runs as one rank of them (FSDP, DDP), nothing is sent.
            Default: the launcher's number; without a launcher a single process.
        rank: Which one.
        link: Between the cards: pcie, nvlink, ethernet, or a .toml file with its figures.
        max: Most card memory that the script may take, as 12GiB: a memory gate for CI.
        worst: Load the longest rows in every batch; tell the peaks of step, evaluation, saving and resuming, or which
            was not seen.
        assume: Rules for sizes that depend on computed values: keep=0.5 (share of elements that an unknown mask
            keeps), lengths=512 (an unknown integer that is read). Each use is listed. Default: keep is an error.
        explain: Also print bytes by class and module, each step, and every place where a placeholder value was read.
    """
    from hybridtrain.errors import ConfigError
    from hybridtrain.run.virtual_run import VirtualRun, run_script
    from hybridtrain.sizes import parse_size
    from hybridtrain.units import format_bytes
    from hybridtrain.virtual_gpu.facade.virtual_gpu import VirtualGpu

    if not command:
        raise ConfigError("virtual", ["SCRIPT: missing; give a Python file, or -m and a module, after --."])
    memory = None if host_memory is None else parse_size(host_memory, "--host-memory")
    most = None if max is None else parse_size(max, "--max")
    try:
        gpu = VirtualGpu(
            card, host_memory=memory, steps=steps, world=world, rank=rank, link=link, worst=worst, assume=assume,
            allocator=allocation.config(), record_history=allocation.snapshot is not None,
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError("virtual", [str(error)]) from error
    found = run_script(
        command, gpu, host_memory_bytes=memory, quiet=common.json, for_children=(memory, allocation.absolute())
    )
    if isinstance(found, VirtualRun):
        allocation.write(found.run)
    text, content, holds = found.as_text(explain=explain), found.as_mapping(), found.fits
    if most is not None:
        over = found.needed_bytes - most
        content["max_bytes"], holds = most, holds and over <= 0
        text = f"{f'ABOVE --max {max}, by {format_bytes(over)}' if over > 0 else f'WITHIN --max {max}'}\n{text}"
    return Answer(text=text, content=content, code=0 if holds else 1)


def run_child() -> None:
    """Run the script in ``sys.argv`` on the card of the parent process, leave the answer there, and end as it does."""
    from hybridtrain.errors import HybridTrainError
    from hybridtrain.run.child_card import ChildAnswer, child_settings, leave
    from hybridtrain.run.virtual_run import NothingPlannedError, run_python
    from hybridtrain.virtual_gpu.facade.launchers import python_command

    gpu, (memory, allocation) = child_settings()
    python = python_command(sys.argv[1:])
    if python is None:
        raise SystemExit(f"can't run {sys.argv[1:]}: no such Python file or module")
    try:
        found = run_python(python, gpu, host_memory_bytes=memory)
    except NothingPlannedError:
        return
    except HybridTrainError as error:
        leave(str(error))
        code = getattr(error.__cause__, "code", 1)
        sys.stderr.write(f"{error}\n")
        raise SystemExit(code) from None
    allocation.write(found.run)
    answer = ChildAnswer(
        text=found.as_text(), explained=found.as_text(explain=True), content=found.as_mapping(), fits=found.fits,
        needed_bytes=found.needed_bytes,
    )  # fmt: skip
    leave(answer)
    if not found.fits:
        raise SystemExit(found.as_text().partition("\n")[0])


def dummy_weights(folder: Path, /, *, common: Common = COMMON) -> Answer:  # noqa: ARG001  every verb takes them
    """Write weights that take no disk beside a model's config.json, for scripts that call from_pretrained.

    A new folder that is named as a preset gets the preset's config.json too. Then run the script on that folder with
    hybridtrain virtual. Needs transformers; nothing is downloaded.

    Example: hybridtrain dummy-weights models/llama-3.1-8b

    Args:
        folder: New and named as a preset; or with the model's config.json, and the tokenizer that the script loads.
    """
    from hybridtrain.weights.dummy_weights import write_dummy_model

    files, dtype = write_dummy_model(folder)
    size = sum(file.stat().st_size for file in files)
    names, name = names_of(files), str(dtype).removeprefix("torch.")
    return Answer(
        text=f"{len(files)} files of {size / 1e9:.2f} GB in {name} that take no disk: {', '.join(names)}",
        content={"files": names, "bytes": size, "dtype": name},
    )


@_collecting_rarely()
def recommend(
    *,
    model: ModelName | None = None,
    card: CardName | None = None,
    host_memory: HostMemory = _HOST_MEMORY,
    device_budget: str | None = None,
    seq: Count | None = None,
    tokens_per_step: Count | None = None,
    scenario: ScenarioName | None = None,
    write: Path | None = None,
    common: Common = COMMON,
) -> Answer:
    """Find the fastest stack that fits a card and its host memory.

    Example: hybridtrain recommend --model llama-7b --card rtx-4090 --host-memory 64GiB --write mine.toml

    Args:
        device_budget: At most so much of the card, as 14GiB; default: all of it, of a scenario what its rows state.
        seq: Tokens per sequence; default: 2048, or all positions of the model.
        tokens_per_step: Tokens per optimizer step; default: 131072 in whole sequences, or the scenario's.
        scenario: Take model, card, host and workload of a scenario instead.
        write: Write the stack to a .toml file.
    """
    from hybridtrain.reports.fit_arguments import FitArguments
    from hybridtrain.reports.recommend_report import recommend_command

    report = recommend_command(
        FitArguments(model=model, card=card, host_memory=host_memory, seq=seq, tokens_per_step=tokens_per_step),
        scenario=scenario, write=write, scenarios=common.scenarios, say=common.note, device_budget=device_budget,
    )  # fmt: skip
    return Answer(text=report.as_text(), content=report.as_mapping())


@_collecting_rarely()
def fit(
    model: ModelName,
    /,
    *,
    card: CardName | None = None,
    host_memory: HostMemory = _HOST_MEMORY,
    seq: Count | None = None,
    tokens_per_step: Count | None = None,
    tokens: Count = 100_000_000,
    method: Names = (),
    margin: float | None = None,
    world: Count = 1,
    link: Link = "pcie",
    matmul: Literal["full", "float8", "int8"] = "full",
    clip: Literal["exact", "previous"] = "exact",
    solve: Literal["batch", "seq", "card", "host"] | None = None,
    least: Flag = False,
    quick: Flag = False,
    explain: Flag = False,
    write: Path | None = None,
    common: Recorded = RECORDED,
) -> Answer:
    """Say whether a model trains on a card or several: the fastest option, the smallest, and what they cost in quality.

    Exit code 1 when nothing fits.

    Example: hybridtrain fit llama-7b --card rtx-4090 --host-memory 64GiB --write options/

    Args:
        seq: Tokens per sequence; default: 2048, or the model's maximum if that is less.
        tokens_per_step: Tokens per optimizer step; default: 131072, rounded to whole sequences.
        tokens: Tokens to train on: sets the hours, and with --write the number of steps.
        method: full (at each level of exactness, or the name of one), lora, qlora; with commas between them.
            Default: all; with --solve full training at its most exact and at its smallest, lora, qlora.
        margin: Percent of the card's bytes that stay free; default: 5, as in every answer.
        world: Number of cards; optimizer state is sharded among them if the optimizer allows it (ZeRO).
        matmul: Arithmetic of the blocks' products: the precision's own (full), or 8 bits, faster and less exact.
        clip: Gradient clipping of fused updates (full training with activations off the card): by the norm of the step,
            which takes a second pass, or by that of the previous step: about twice as fast, quality undecided.
        solve: Find the largest micro-batch (batch), the longest sequence (seq), the smallest card of the catalogue
            (card, without --card) or the least host memory (host) that fits, and what is full beyond it.
        least: Show each method at the least memory of the card, not at its fastest.
        quick: Skip full dry runs: a few seconds less, and all bytes are extrapolated.
        explain: Show what each figure rests on too: evidence, bottleneck, checkpoint, quality in full.
        write: Folder for a stack file and a training file of every option that fits.
    """
    from hybridtrain.planning.fitting import METHODS
    from hybridtrain.reports.fit_arguments import FitArguments
    from hybridtrain.reports.fit_report import fit_command
    from hybridtrain.reports.fit_text import WIDEST
    from hybridtrain.reports.solve_report import SOLVED_METHODS, solve_command

    arguments = FitArguments(
        model=model,
        card=card,
        host_memory=host_memory,
        seq=seq,
        tokens_per_step=tokens_per_step,
        world=world,
        link=link,
        matmul=matmul,
        clip=clip,
        verb="fit",
        instead="name one (hybridtrain list cards), or a .toml file with its figures",
    )
    width = min(WIDEST, get_terminal_size((WIDEST, 0)).columns)
    say = common.note if explain else lambda _line: None
    if solve is not None:
        unused = {"--least": least, "--write": write is not None}
        solved = solve_command(
            arguments, solve, methods=method or SOLVED_METHODS, margin=margin, confirm=not quick, say=say,
            unused=[name for name, is_given in unused.items() if is_given],
        )  # fmt: skip
        return Answer(text=solved.as_text(width), content=solved.as_mapping(), code=0 if solved.fits else 1)
    report = fit_command(
        arguments, tokens=tokens, methods=method or METHODS, margin=margin, confirm=not quick, write=write, say=say,
        scenarios=common.scenarios, results=common.results, shows_least=least, explains=explain,
    )  # fmt: skip
    return Answer(text=report.as_text(width), content=report.as_mapping(), code=0 if report.fits else 1)
