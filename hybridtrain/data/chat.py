"""Messages as one text, by the chat template of a tokenizer, and where in it the answers are.

A template is Jinja, rendered in a sandbox, with the names that transformers gives it (documented in its guide "Chat
templates": messages, tools, add_generation_prompt, bos_token and the other special tokens, raise_exception, tojson,
strftime_now). The answers are found in one of two ways:

- by markers: what the template puts between ``{% generation %}`` and ``{% endgeneration %}``,
- by prefixes, where it has no markers: an answer reaches from the end of the conversation before it, rendered with
  ``add_generation_prompt``, to the end of the conversation up to it. The one must be a beginning of the other.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

from hybridtrain.config.encode import JsonMapping
from hybridtrain.errors import DataError

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Characters of a text: first and one past the last of each part."""

BUILTIN_TEMPLATES: Final[Mapping[str, str]] = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
        "{{ '\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
}
"""Templates that need no file. chatml: OpenAI's format, that of Qwen's models."""

_TODAY: Final = datetime(2024, 7, 26, tzinfo=UTC)
"""What templates are told as the date, that a text has the same tokens every day: the one that Llama 3's templates take
where they are told none."""

# Noncharacters of Unicode, which no text may hold in exchange, around what a marker encloses.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_LONGEST: Final = 100_000
"""Characters of a template: five times the longest that models have; larger ones take seconds for each conversation."""


class ChatTemplate:
    """A template and the special tokens that it may name.

    Args:
        text: The Jinja template.
        special_tokens: Known to it by their names.

    Raises:
        DataError: the package jinja2 is missing, or the template cannot be parsed.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        self._render = _compiled(text)
        self._special_tokens = dict(special_tokens)
        self.method: Literal["markers", "prefixes"] = "markers" if _has_markers(text) else "prefixes"
        """How answers are found."""

    def text(self, messages: Sequence[JsonMapping], tools: object = None) -> str:
        """Return a whole conversation as text."""
        return self._marked(messages, tools)[0]

    def prompt(self, messages: Sequence[JsonMapping], tools: object = None) -> str:
        """Return a conversation up to where the next answer begins."""
        return self._marked(messages, tools, add_generation_prompt=True)[0]

    def answered(self, messages: Sequence[JsonMapping], tools: object = None) -> list[tuple[str, Spans]]:
        """Return a conversation as text and where the answers are in it.

        Some templates write an answer otherwise once more follows it: Qwen3 leaves out its thoughts, Phi-3 writes the
        end-of-text token after the last one alone. Then each answer gets a text of its own: the conversation up to it,
        as the model will see it.

        Raises:
            ValueError: the template refuses the messages, or writes no answer after what it asks for one with.
        """
        whole, marked = self._marked(messages, tools)
        if self.method == "markers":
            return [(whole, marked)]
        found: list[tuple[str, tuple[int, int]]] = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before, text = self.prompt(messages[:index], tools), self.text(messages[: index + 1], tools)
                if not text.startswith(before):
                    raise ValueError(
                        f"the chat template does not write messages[{index}] after its own generation prompt, so where "
                        "the answer begins cannot be told; use a template with {% generation %} markers (chat_template "
                        "= 'chatml' or a .jinja file), or set loss_on = 'all'"
                    )
                found.append((text, (len(before), len(text))))
        if all(whole.startswith(text) for text, _ in found):
            return [(whole, tuple(span for _, span in found))]
        return [(text, (span,)) for text, span in found]

    def _marked(
        self, messages: Sequence[JsonMapping], tools: object, *, add_generation_prompt: bool = False
    ) -> tuple[str, Spans]:
        """Return the text without marks, and what they enclosed."""
        rendered = self._render(
            messages=list(messages), tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )  # fmt: skip
        if self.method == "prefixes":
            return rendered, ()
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        length = 0
        for number, piece in enumerate(rendered.split(_OPEN)):
            answer, _, rest = piece.partition(_CLOSE) if number else ("", "", piece)
            if number:
                spans.append((length, length + len(answer)))
            parts += (answer, rest)
            length += len(answer) + len(rest)
        return "".join(parts), tuple(spans)


def _has_markers(text: str) -> bool:
    """Whether a template says itself what an answer is."""
    return any(f"{{%{dash}{space}generation" in text for dash in ("", "-") for space in ("", " "))


def _compiled(text: str) -> Callable[..., str]:
    """Return the function that renders a template.

    Raises:
        DataError: jinja2 is missing, or the template is too long or cannot be parsed.
    """
    try:
        import jinja2  # noqa: PLC0415  only chats need it
        from jinja2 import ext, nodes, sandbox  # noqa: PLC0415
        from jinja2.parser import Parser  # noqa: PLC0415
    except ImportError:
        raise DataError(
            "messages need the package jinja2, which is not installed; python3 -m pip install 'hybridtrain[text]'"
        ) from None

    class Generation(ext.Extension):
        """The block that encloses an answer."""

        tags = {"generation"}  # noqa: RUF012  so jinja2 declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

        @staticmethod
        def _enclose(caller: Callable[[], str]) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    if len(text) > _LONGEST:
        raise DataError(
            f"the chat template has {len(text)} characters; at most {_LONGEST} are allowed; give another one by "
            "chat_template"
        )
    environment = sandbox.ImmutableSandboxedEnvironment(
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
    try:
        template = environment.from_string(text)
    except Exception as error:  # its compiler raises whatever a damaged text leads to, RecursionError among them
        raise DataError(f"the chat template cannot be parsed ({error}); give another one by chat_template") from error

    def render(**names: object) -> str:
        try:
            return template.render(**names)
        except _RefusedError:
            raise
        except Exception as error:  # a template is a program of somebody else's
            raise ValueError(f"the chat template refuses the messages ({error})") from error

    return render


class _RefusedError(ValueError):
    """By the template itself."""


def _refuse(message: str) -> None:
    raise _RefusedError(f"the chat template refuses the messages ({message})")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """Return JSON without HTML's escapes, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
