"""The ``hybridtrain`` command: one function per verb, each returns an exit code.

0 it went well, 1 a run failed or a budget is exceeded, 2 wrong arguments or files; the gate has codes of its own.
"""

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from hybridtrain.errors import ConfigError, DataError, HybridTrainError, OutOfMemoryError
from hybridtrain.profiler.memory_profiler import DEFAULT_ALERT_BYTES
from hybridtrain.units import GB
from hybridvalidation.card_session.command import evidence_command
from hybridvalidation.cli import commands
from hybridvalidation.cli.types import positive, positive_number
from hybridvalidation.gate.command import gate_command
from hybridvalidation.kernel_bench.command import BENCH, bench_arguments, bench_command
from hybridvalidation.recommend.command import DEFAULT_HOST_MEMORY, recommend_command
from hybridvalidation.study.command import study_command

_RESULTS = Path("results")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = _Parser(
        prog="hybridtrain",
        allow_abbrev=False,
        description="Does it fit, how fast is it, what does it cost: training on one card, with evidence.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_validate(verbs)
    _add_dry_run(verbs)
    _add_execute(verbs)
    _add_recommend(verbs)
    _add_evidence(verbs)
    _add_results(bench_arguments(_add_verb(verbs, "bench", bench_command, BENCH), minutes=positive_number))
    _add_study(verbs)
    _add_train(verbs)
    _add_gate(verbs)
    _add_report(verbs)
    _add_verb(verbs, "list", commands.list_names, "scenarios, stacks, models, cards and targets")
    _add_verb(verbs, "doctor", commands.doctor, "what this machine can do, and what is missing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:  # noqa: PLR0911  a code per kind of fault
    """Run a verb; faults of the user's end in one clear message and a non-zero code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample may hold what the terminal cannot show
    try:
        options = build_parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except _WrongArgument as error:
        return _report(error, [str(error)], 2, as_json=as_json)
    except ConfigError as error:
        return _report(error, error.faults, 2, as_json=as_json)
    except DataError as error:
        return _report(error, [str(error)], 2, as_json=as_json)
    except HybridTrainError as error:
        return _report(error, (), 1, as_json=as_json)
    except torch.OutOfMemoryError as error:
        message = (
            f"the card is too small for this run ({str(error).splitlines()[0]}); ask hybridtrain recommend for a stack "
            "that fits, or lower the batch size"
        )
        return _report(OutOfMemoryError(message), (), 1, as_json=as_json)
    except KeyboardInterrupt:
        sys.stderr.write("hybridtrain: stopped; what was written whole is kept\n")
        return 130
    except BrokenPipeError:
        return 141
    except OSError as error:
        message = f"{error.filename or 'a file'}: {error.strerror or error}; choose another path or make room"
        return _report(OSError(message), (), 1, as_json=as_json)


class _WrongArgument(Exception):  # noqa: N818  never leaves this file
    """What argparse found."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that wrong arguments can be told as JSON too."""

    def error(self, message: str) -> NoReturn:
        raise _WrongArgument(f"{message}\n{self.format_usage()}")


def _report(error: Exception, faults: Sequence[str], code: int, *, as_json: bool) -> int:
    if as_json:
        name = type(error).__name__.lstrip("_")
        sys.stdout.write(json.dumps({"error": name, "message": str(error), "faults": list(faults)}) + "\n")
    else:
        sys.stderr.write(f"hybridtrain: {error}\n")
    return code


_Verbs = argparse._SubParsersAction  # argparse has no public name for it


def _add_verb(
    verbs: "_Verbs[_Parser]", name: str, run: Callable[[argparse.Namespace], int], says: str
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=says, description=says, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--scenarios", type=Path, default=None, help="folder with scenario files, stacks/ and targets.toml"
    )
    return parser


def _add_validate(verbs: "_Verbs[_Parser]") -> None:
    parser = _add_verb(
        verbs, "validate", commands.validate, "run a scenario under all its stacks and judge its targets"
    )
    parser.add_argument("scenario", help="name of a scenario, or a .toml file")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that have a record already")
    _add_results(parser)


def _add_dry_run(verbs: "_Verbs[_Parser]") -> None:
    parser = _add_verb(verbs, "dry-run", commands.dry_run_command, "plan one model, stack and card without a GPU")
    parser.add_argument("--model", required=True, help="name of a model, or a .toml file with its shape")
    parser.add_argument("--stack", required=True, help="name of a stack, or a .toml file")
    parser.add_argument("--card", required=True, help="name of a card, or a .toml file with its figures")
    parser.add_argument("--micro-batch", type=positive, required=True, metavar="B", help="sequences per micro-batch")
    parser.add_argument("--seq", type=positive, required=True, metavar="T", help="tokens per sequence")
    parser.add_argument(
        "--accum",
        type=positive,
        default=None,
        metavar="A",
        help="micro-batches per step; default: the stack's",
    )
    _add_host_memory(parser)
    parser.add_argument("--suggest", action="store_true", help="where it does not fit, run all other stacks dry too")
    parser.add_argument("--expandable-segments", action="store_true", help="plan with torch's expandable_segments:True")
    parser.add_argument("--snapshot", type=Path, help="write a memory_viz snapshot (.pickle)")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace (.json)")


def _add_host_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host-memory", default=DEFAULT_HOST_MEMORY, metavar="SIZE",
        help="of the machine around the card, as 64GiB or 128GB (default: %(default)s)",
    )  # fmt: skip


def _add_execute(verbs: "_Verbs[_Parser]") -> None:
    parser = _add_verb(
        verbs, "execute", commands.execute_command,
        "train a few steps on the CPU, count what a card would hold, and compare with the dry run of the same steps; "
        "exit code 1 when they differ",
    )  # fmt: skip
    parser.add_argument("--model", required=True, help="name of a model, or a .toml file with its shape")
    parser.add_argument("--stack", required=True, help="name of a stack, or a .toml file")
    parser.add_argument("--micro-batch", type=positive, required=True, metavar="B", help="sequences per micro-batch")
    parser.add_argument("--seq", type=positive, required=True, metavar="T", help="tokens per sequence")
    parser.add_argument(
        "--accum", type=positive, default=None, metavar="A", help="micro-batches per step; default: the stack's"
    )
    parser.add_argument("--steps", type=positive, required=True, metavar="N", help="optimizer steps")
    parser.add_argument("--lr", type=positive_number, default=3e-4, help="learning rate (default: %(default)s)")
    parser.add_argument(
        "--cycle", action="store_true", help="run WARMUP, FULL, PREDICT, CORRECT in turn, a phase a step"
    )
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="where a stack with disk tiers may make files")
    parser.add_argument(
        "--host-limit-gib", type=positive_number, metavar="X",
        help="host memory for offloaded tensors; default: what is available",
    )  # fmt: skip
    _add_results(parser)


def _add_recommend(verbs: "_Verbs[_Parser]") -> None:
    parser = _add_verb(
        verbs, "recommend", recommend_command, "find the fastest stack that fits a card and its host memory"
    )
    parser.add_argument("--model", help="name of a model, or a .toml file with its shape")
    parser.add_argument("--card", help="name of a card, or a .toml file with its figures")
    _add_host_memory(parser)
    parser.add_argument(
        "--seq", type=positive, metavar="T", help="tokens per sequence (default: 2048, or all positions of the model)"
    )
    parser.add_argument(
        "--tokens-per-step", type=positive, metavar="N", help="per optimizer step (default: 131072 in whole sequences)"
    )
    parser.add_argument("--scenario", help="take model, card, host and workload of a scenario instead")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the stack to a .toml file")


def _add_evidence(verbs: "_Verbs[_Parser]") -> None:
    parser = _add_verb(
        verbs, "evidence", evidence_command, "measure on this machine's CUDA card what is planned elsewhere, in minutes"
    )
    parser.add_argument(
        "--minutes", type=positive_number, default=25.0, metavar="N",
        help="stop after so many; parts that do not fit any more are recorded as skipped (default: 25)",
    )  # fmt: skip
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=(), metavar="PART,PART",
        help="7b-24, 1b-16, 7b-16, 13b-24, 50b-24, 50b-24-more, pairs, or one pair; default: all",
    )  # fmt: skip
    _add_results(parser)


def _add_study(verbs: "_Verbs[_Parser]") -> None:
    parser = _add_verb(verbs, "study", study_command, "compare ways to train, time to loss, by a registered protocol")
    parser.add_argument("study", help="name of a study, or a .toml file")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs side by side (default: 1)")
    parser.add_argument("--max-runs", type=positive, metavar="N", help="stop after so many; the study can go on later")
    parser.add_argument("--forecasts", action="store_true", help="score the loss forecasters on the recorded losses")
    _add_results(parser)


def _add_train(verbs: "_Verbs[_Parser]") -> None:
    parser = _add_verb(verbs, "train", commands.train_command, "train a model on your own text")
    parser.add_argument("config", type=Path, help="a training .toml file")
    parser.add_argument(
        "--data",
        type=Path,
        help="text file, folder of text, or token file (.bin); default: the embedded corpus",
    )
    parser.add_argument("--out", type=Path, default=Path("run"), help="folder for log and saved state (default: run)")
    parser.add_argument("--resume", action="store_true", help="continue the run saved in --out")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="where tensors placed on disk get their files")
    parser.add_argument(
        "--host-limit-gib", type=positive_number, default=None, metavar="X",
        help="host memory for offloaded tensors (default: what is available)",
    )  # fmt: skip
    monitoring = parser.add_argument_group("monitoring", "the first three also print a memory report at the end")
    monitoring.add_argument(
        "--profile-memory", type=Path, metavar="PATH.csv", help="write the memory after each step of this call"
    )
    monitoring.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="log metrics and memory for tensorboard --logdir DIR"
    )
    monitoring.add_argument(
        "--wandb", metavar="PROJECT", help="log both to Weights & Biases; WANDB_MODE=offline keeps them on this machine"
    )
    monitoring.add_argument(
        "--profile-every", type=positive, default=1, metavar="N", help="steps between memory snapshots (default: 1)"
    )
    monitoring.add_argument(
        "--alert-gb", type=positive, default=DEFAULT_ALERT_BYTES // GB, metavar="GB",
        help="say at once when more memory than this is used (default: %(default)s, for cards of 48 GB)",
    )  # fmt: skip


def _add_gate(verbs: "_Verbs[_Parser]") -> None:
    parser = _add_verb(
        verbs, "gate", gate_command,
        "compare dry runs, or compiled kernels, with baselines; exit codes: 0 equal, 3 over budget, 4 regressed, "
        "5 improved, 6 not measured",
    )  # fmt: skip
    parser.add_argument(
        "names", nargs="*", metavar="SCENARIO",
        help="default: every scenario; 'kernels' compiles all Triton kernels for every card instead",
    )  # fmt: skip
    parser.add_argument("--accept", action="store_true", help="record today's figures as the new baselines")
    _add_results(parser)


def _add_report(verbs: "_Verbs[_Parser]") -> None:
    parser = _add_verb(
        verbs,
        "report",
        commands.report_command,
        "rebuild tables and plots from committed records, nothing is run",
    )
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="default: every scenario that has records")
    _add_results(parser)


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results",
        type=Path,
        default=_RESULTS,
        help="folder of records, baselines, tables and plots (default: results)",
    )


if __name__ == "__main__":
    sys.exit(main())
