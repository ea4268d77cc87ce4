"""The ``hybridtrain`` command: from arguments to a verb, from its answer or its fault to text, JSON and an exit code.

A verb imports what it needs when it runs: ``--help``, ``--version`` and ``list`` need no torch.
"""

import errno
import json
import os
import re
import resource
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

from cyclopts import App, Parameter
from cyclopts.exceptions import CycloptsError, MissingArgumentError, UnknownCommandError, UnknownOptionError
from cyclopts.help import format_usage

from hybridtrain.cli import machine, plan, run
from hybridtrain.cli.shared import Answer
from hybridtrain.cli.streams import make_streams_last, nobody_reads
from hybridtrain.errors import (
    ConfigError,
    DataError,
    HostMemoryError,
    HybridTrainError,
    OutOfMemoryError,
    PlanConflictError,
    near_name,
    short_text,
)
from hybridtrain.extension import extensions

_OUR_FAULT = 70
"""EX_SOFTWARE."""
_NO_MEMORY = re.compile(
    r"[Cc]an(?:'|no)t allocate memory|std::bad_alloc|can't start new thread"
    r"|could not create a primitive$",  # oneDNN has no room for its machine code
    re.MULTILINE,
)
_ASKED_BYTES = re.compile(r"tried to allocate (\d+) bytes")
_USAGE = "hybridtrain VERB [OPTIONS]"
EXIT_CODES = (
    "Exit codes: 0 it went well, 1 the answer is no or a run failed, 2 wrong arguments or files, 70 the program is at "
    "fault, 75 a training run was interrupted and --resume goes on, 130 interrupted by Ctrl-C, 141 the reader closed "
    "the pipe, 143 ended by SIGTERM; gate and bench have codes of their own. With --json faults are one JSON object "
    "too."
)
_TERMINATED = 143
"""By SIGTERM."""
_AGAIN_S = 0.001
"""Delay until a signal is sent again whose exception Python dropped: in a destructor or a weak reference's callback."""
_UNREAD = 141
"""The answer had no reader; shells use this code for SIGPIPE."""
_PLAIN = Parameter(negative=(), allow_repeating=True)
"""No --no-flag; of an option that is given twice the last counts."""
APP = App(
    name="hybridtrain",
    help="Does it fit, how fast is it, what does it cost: training on one card, with evidence.",
    usage=f"Usage: {_USAGE}",
    help_epilogue=EXIT_CODES,
    version=lambda: version("hybridtrain"),
    help_format="plaintext",
    default_parameter=_PLAIN,
    exit_on_error=False, print_error=False, result_action="return_value", suppress_keyboard_interrupt=False,
)  # fmt: skip
_VERBS: dict[str, Callable[..., Answer]] = {
    "fit": plan.fit, "dry-run": plan.dry_run, "virtual": plan.virtual, "recommend": plan.recommend, "train": run.train,
    "export": run.export, "quantize": run.quantize, "dummy-weights": plan.dummy_weights, "doctor": machine.doctor,
    "list": machine.list_names, "guide": machine.guide,
}  # fmt: skip
for _extension in extensions():
    _VERBS |= _extension.verbs
for _order, (_name, _verb) in enumerate(_VERBS.items()):
    APP.command(_verb, name=_name, sort_key=_order)
APP.register_install_completion_command(help="Teach the shell to complete verbs, options and names.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; faults of the user's end in one clear message and a non-zero code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    as_json = "--json" in arguments[: arguments.index("--") if "--" in arguments else None]
    make_streams_last()
    try:
        with _orderly_end():
            answer: Answer | None = APP(arguments or [""])
            code = 0 if answer is None else answer.show(as_json=as_json)  # None: help has been printed
            return _UNREAD if nobody_reads() and not code else code
    except KeyboardInterrupt:
        return _show_interruption()
    except BrokenPipeError:
        return _UNREAD
    except Exception as error:  # noqa: BLE001  the last resort: nobody is to see a traceback
        if interruption := _interruption_before(error):
            return _show_interruption() if isinstance(interruption, KeyboardInterrupt) else _TERMINATED
        return _show(*(_message_of(error) or _report(error, arguments)), as_json=as_json)


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Handle SIGTERM as SIGINT is handled: raise, so that children end and temporary folders are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, report = signal.getsignal(signal.SIGTERM), sys.unraisablehook

    def send_again(lost: "sys.UnraisableHookArgs") -> None:
        number = _signal_of(lost.exc_value)
        if number is None:
            report(lost)
        while number is not None:
            try:
                threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)).start()
            except (KeyboardInterrupt, SystemExit) as interruption:  # Python would drop it here as well
                number = _signal_of(interruption)
            else:
                return

    if before is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = report
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, before)


def _signal_of(error: BaseException | None) -> signal.Signals | None:
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    is_terminated = isinstance(error, SystemExit) and error.code == _TERMINATED  # others are of a user's script
    return signal.SIGTERM if is_terminated else None


def _terminate(_number: int, _frame: object) -> None:
    raise SystemExit(_TERMINATED)


def _interruption_before(error: BaseException) -> BaseException | None:
    """Return the interruption before an error: it may come anywhere, in torch's own context managers too."""
    before = error.__context__
    return before if before is None or _signal_of(before) is not None else _interruption_before(before)


def _show_interruption() -> int:
    sys.stderr.write("hybridtrain: stopped; what was written whole is kept\n")
    return 130


def _report(error: Exception, arguments: Sequence[str]) -> tuple[str, str, Sequence[str], int]:
    """Write the traceback of a fault of ours to a file; return as ``_message_of``."""
    what = short_text(error)[:200]
    content = [
        f"hybridtrain {version('hybridtrain')}, Python {sys.version}\n", f"hybridtrain {shlex.join(arguments)}\n\n",
        *traceback.format_exception(error),
    ]  # fmt: skip
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="hybridtrain-report-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.writelines(content)
        where = f"its report is in {file.name}: please send it to whoever maintains this"
    except OSError as fault:
        where = f"no report could be written ({fault.strerror}): make room in {tempfile.gettempdir()} and try again"
    return "InternalError", f"the program is at fault, not what it was given ({what}); {where}", (), _OUR_FAULT


def _message_of(error: Exception) -> tuple[str, str, Sequence[str], int] | None:
    """Return name, message, faults and exit code of a fault of the user's; None: it is ours."""
    name = type(error).__name__
    if isinstance(error, CycloptsError):
        message = _explain(error)
        return "WrongArgument", message, [message], 2
    if isinstance(error, ConfigError | DataError | PlanConflictError):
        return name, str(error), error.faults if isinstance(error, ConfigError) else str(error).splitlines(), 2
    if isinstance(error, HybridTrainError) or name == "KernelBuildError":  # whose module needs torch: not for --help
        return name, str(error), (), 1
    if isinstance(error, OSError) and not _lacks_memory(error):
        message = f"{error.filename or 'a file'}: {error.strerror or error}; choose another path or make room"
        return OSError.__name__, message, (), 1
    if "torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError):
        message = (
            f"the card is too small for this run ({str(error).splitlines()[0]}); ask hybridtrain recommend for a stack "
            "that fits, or lower the batch size"
        )
        return OutOfMemoryError.__name__, message, (), 1
    return (HostMemoryError.__name__, _memory_message(error), (), 1) if _lacks_memory(error) else None


def _lacks_memory(error: Exception) -> bool:
    """Return whether the host's memory, or a limit of it, ended what was at work; torch says so in words alone."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = str(error) if isinstance(error, RuntimeError | ImportError) else ""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(words) is not None


def _memory_message(error: Exception) -> str:
    from hybridtrain.units import format_bytes

    asked = _ASKED_BYTES.search(str(error))
    what = f"{format_bytes(int(asked[1]))} more were asked for" if asked else "more was asked for"
    limits = [
        f"ulimit {flag} allows {format_bytes(most)}"
        for flag, kind in (("-v", resource.RLIMIT_AS), ("-d", resource.RLIMIT_DATA))
        if (most := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY
    ]
    there = ", ".join(limits) or "the system gives no more"
    return (
        f"the host's memory is too small for this: {what}, {there}; what was written whole is kept. Raise the limit, "
        "end other programs, lower the batch size, or ask hybridtrain recommend for a stack that fits"
    )


def _show(name: str, message: str, faults: Sequence[str], code: int, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps({"error": name, "message": message, "faults": list(faults)}) + "\n")
    else:
        sys.stderr.write(f"hybridtrain: {message}\n")
    return code


def _explain(error: CycloptsError) -> str:
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
