"""The ``hybridtrain`` command: from arguments to a verb, from its answer or its fault to text, JSON and an exit code.

0 it went well, 1 a run failed or a budget is exceeded, 2 wrong arguments or files; the gate has codes of its own.
A verb imports what it needs when it runs: ``--help``, ``--version`` and ``list`` need no torch.
"""

import io
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from cyclopts import App, Parameter
from cyclopts.exceptions import CycloptsError, MissingArgumentError, UnknownCommandError, UnknownOptionError
from cyclopts.help import format_usage

from hybridtrain.errors import ConfigError, DataError, HybridTrainError, OutOfMemoryError, PlanConflictError, near_name
from hybridvalidation.cli import check, plan, run
from hybridvalidation.cli.verb import Answer

_USAGE = "hybridtrain VERB [OPTIONS]"
_PLAIN = Parameter(negative=(), allow_repeating=True)
"""No --no-flag; of an option that is given twice the last counts."""
APP = App(
    name="hybridtrain",
    help="Does it fit, how fast is it, what does it cost: training on one card, with evidence.",
    usage=f"Usage: {_USAGE}",
    version=lambda: version("hybridtrain"),
    help_format="plaintext",
    default_parameter=_PLAIN,
    exit_on_error=False, print_error=False, result_action="return_value", suppress_keyboard_interrupt=False,
)  # fmt: skip
_VERBS: dict[str, Callable[..., Answer]] = {
    "validate": run.validate, "dry-run": plan.dry_run, "virtual": plan.virtual, "execute": run.execute,
    "dummy-weights": plan.dummy_weights, "recommend": plan.recommend, "recorded": plan.recorded, "peers": plan.peers,
    "evidence": run.evidence, "bench": check.bench, "study": run.study, "train": run.train,
    "gate": check.gate, "report": check.report, "records": check.records,
    "list": check.list_names, "doctor": check.doctor,
}  # fmt: skip
for _order, (_name, _verb) in enumerate(_VERBS.items()):
    APP.command(_verb, name=_name, sort_key=_order)
APP.register_install_completion_command(help="Teach the shell to complete verbs, options and names.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; faults of the user's end in one clear message and a non-zero code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a sample may hold what the terminal cannot show
    try:
        answer: Answer | None = APP(arguments or [""])
        return 0 if answer is None else answer.show(as_json=as_json)  # None: help has been printed
    except KeyboardInterrupt:
        sys.stderr.write("hybridtrain: stopped; what was written whole is kept\n")
        return 130
    except BrokenPipeError:
        return 141
    except (CycloptsError, HybridTrainError, OSError, RuntimeError) as error:
        told = _tell(error)
        if told is None:
            raise
        return _show(*told, as_json=as_json)


def _tell(error: Exception) -> tuple[str, str, Sequence[str], int] | None:
    """Return name, message, faults and exit code of what is the user's to mend; None: it is ours."""
    name = type(error).__name__
    if isinstance(error, CycloptsError):
        message = _explain(error)
        return "WrongArgument", message, [message], 2
    if isinstance(error, ConfigError | DataError | PlanConflictError):
        return name, str(error), error.faults if isinstance(error, ConfigError) else str(error).splitlines(), 2
    if isinstance(error, HybridTrainError) or name == "KernelBuildError":  # whose module needs torch: not for --help
        return name, str(error), (), 1
    if isinstance(error, OSError):
        message = f"{error.filename or 'a file'}: {error.strerror or error}; choose another path or make room"
        return OSError.__name__, message, (), 1
    if "torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError):
        message = (
            f"the card is too small for this run ({str(error).splitlines()[0]}); ask hybridtrain recommend for a stack "
            "that fits, or lower the batch size"
        )
        return OutOfMemoryError.__name__, message, (), 1
    return None


def _show(name: str, message: str, faults: Sequence[str], code: int, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps({"error": name, "message": message, "faults": list(faults)}) + "\n")
    else:
        sys.stderr.write(f"hybridtrain: {message}\n")
    return code


def _explain(error: CycloptsError) -> str:
    """Return what is wrong with the arguments, what is allowed, and how the verb is used."""
    if isinstance(error, UnknownCommandError):
        verb = (error.unused_tokens or [""])[0]
        if not verb:
            return f"a VERB is missing; allowed: {', '.join(_VERBS)}\nusage: {_USAGE}"
        return f"verb '{verb}' is not one of {', '.join(_VERBS)}{near_name(verb, _VERBS)}"
    known = [] if error.app is None else error.app.assemble_argument_collection(default_parameter=_PLAIN)
    if isinstance(error, UnknownOptionError):
        token = error.token.keyword or error.token.value
        options = sorted(name for argument in known for name in argument.names if name.startswith("--"))
        what = f"option '{token}' is not one of {', '.join(options)}{near_name(token, options)}"
    elif isinstance(error, MissingArgumentError):
        given = {token.partition("=")[0] for token in error.root_input_tokens or ()}
        missing = [argument.name for argument in known if argument.required and not given & {*argument.names}]
        bare = error.keyword  # an option without its value is there, and incomplete
        what = f"{bare} needs a value" if bare else f"these arguments are missing: {', '.join(missing)}"
    else:
        what = str(error if error.argument is None else f"argument {error.argument.name}: {error.msg or error}")
    usage = format_usage(APP, error.command_chain) if error.command_chain else _USAGE
    return f"{what}\nusage: {usage}".rstrip()
