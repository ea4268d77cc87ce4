"""Process that renders chat templates, which are untrusted code, for ``template_renderer``.

It needs jinja2 alone. Standard input has ``sys.path`` and then requests, a line of JSON each; standard output answers.
Memory, processor time and the length of a text are limited, so that no template can exhaust the machine or hang.
"""

import json
import random
import re
import resource
import secrets
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import jinja2

MOST_SECONDS: Final = 3
"""CPU seconds per text."""
MOST_BYTES: Final = 2**30
"""Memory of the process."""
MOST_CHARACTERS: Final = 2**24
"""Characters per text: four million tokens, more than any model reads."""

_TODAY: Final = datetime(2024, 7, 26, tzinfo=UTC)
"""Fixed date for templates, so that tokens do not depend on the day: the default of Llama 3's templates."""
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Prefix of a marker; a number follows."""


class _TemplateError(ValueError):
    """A kind of fault, and its reason."""


def _refuse(message: object) -> None:
    raise ValueError(str(message))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Return JSON without HTML's escapes, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Compiled:
    """A template, and whether it says itself what an answer is."""

    def __init__(self, text: str) -> None:
        import jinja2.sandbox  # noqa: PLC0415  found once sys.path is known
        from jinja2 import ext, nodes  # noqa: PLC0415

        compiled = self

        class Generation(ext.Extension):
            """Implements the tag ``{% generation %}``, which encloses an answer."""

            tags = {"generation"}  # noqa: RUF012  so jinja2 declares it

            def parse(self, parser: "jinja2.parser.Parser") -> nodes.Node:
                compiled.has_markers = True
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

            @staticmethod
            def _enclose(caller: Callable[[], str]) -> str:
                before, after = compiled._marks
                return f"{before}{caller()}{after}"

        self.has_markers = False
        self._marks = ("", "")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": _refuse,
            "strftime_now": _TODAY.strftime,
            "namespace": jinja2.utils.Namespace,
        }
        for name in ("lipsum", "cycler", "joiner"):
            environment.globals.pop(name, None)
        self._template = environment.from_string(text)

    def render(self, names: Mapping[str, object], *, marks: bool) -> tuple[str, list[tuple[int, int]]]:
        """Render a text; return it with the ranges of its generation blocks."""
        plain = self._text(names)
        if not (marks and self.has_markers):
            return plain, []
        number = f"{secrets.randbelow(10**30):030d}"  # unknown to the authors of texts
        self._marks = (_OPEN + number, _CLOSE + number)
        try:
            marked = self._text(names)
        finally:
            self._marks = ("", "")
        spans: list[tuple[int, int]] = []
        parts: list[str] = []
        length = depth = first = 0
        for index, piece in enumerate(re.split(f"([{_OPEN}{_CLOSE}]){number}", marked)):
            if index % 2 == 0:
                parts.append(piece)
                length += len(piece)
            elif piece == _OPEN:
                first = first if depth else length
                depth += 1
            else:
                depth -= 1
                spans += [] if depth else [(first, length)]
        if "".join(parts) != plain:
            why = "modifies the text inside {% generation %} before writing it; write it unmodified"
            raise _TemplateError("moved", why)
        return plain, spans

    def _text(self, names: Mapping[str, object]) -> str:
        random.seed(0)
        _limit_time()
        text = self._template.render(names)
        if len(text) > MOST_CHARACTERS:
            raise _TemplateError("length", "")
        return text


def _limit_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + MOST_SECONDS)


def _lower(resource_kind: int, most: int) -> None:
    """Set a soft limit, below the hard one, which stays."""
    hard = resource.getrlimit(resource_kind)[1]
    resource.setrlimit(resource_kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


_compiled: Final = lru_cache(maxsize=4)(_Compiled)


def _answer(request: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the requested texts, or the fault."""
    fault = "syntax"
    try:
        _limit_time()
        template = _compiled(request["template"])
        fault = "refused"
        texts = []
        for names in request["names"]:
            given = request["shared"] | names
            messages = given.pop("messages")[: given.pop("num_messages")]
            texts.append(template.render(given | {"messages": messages}, marks=request["marks"]))
    except _TemplateError as error:
        return {"fault": error.args[0], "why": error.args[1]}
    except MemoryError:
        return {"fault": "memory"}
    except Exception as error:  # noqa: BLE001  a template is an untrusted program
        return {"fault": fault, "why": str(error)}
    return {"has_markers": template.has_markers, "texts": texts}


def main() -> None:
    """Answer requests until standard input closes."""
    sys.path[:] = json.loads(sys.stdin.buffer.readline())
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_AS, MOST_BYTES)
    for line in sys.stdin.buffer:
        try:
            answer = json.dumps(_answer(json.loads(line)))
        except MemoryError:
            answer = '{"fault": "memory"}'
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
