"""Rendering of messages by a tokenizer's chat template, and location of the answers.

A template is Jinja, rendered in a sandbox, with the names that transformers gives it (documented in its guide "Chat
templates": messages, tools, add_generation_prompt, bos_token and the other special tokens, raise_exception, tojson,
strftime_now). The answers are located in one of two ways: - by markers: text between ``{% generation %}`` and ``{%
endgeneration %}``,
- by prefixes, where it has no markers: an answer is what the conversation up to it adds to the conversation before it,
rendered with ``add_generation_prompt``. The latter must be a prefix of the former.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

from hybridtrain.config.encode import JsonMapping
from hybridtrain.data.template_renderer import ask
from hybridtrain.errors import DataError

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
"""Built-in templates. chatml: OpenAI's format, used by Qwen's models."""

_LONGEST: Final = 100_000
"""Longest template in characters: five times the longest known; longer ones take seconds per conversation."""
_CHARACTERS_AT_ONCE: Final = 2**22
"""Characters sent to the rendering process at a time, approximately."""

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Character ranges in a text: start and end of each part."""


class ChatTemplate:
    """A Jinja template and the special tokens that it may use.

    Raises:
        DataError: the template is too long or cannot be parsed.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        if len(text) > _LONGEST:
            raise DataError(
                f"the chat template has {len(text)} characters; at most {_LONGEST} are allowed; give another one by "
                "chat_template"
            )
        self._template = text
        self._special_tokens = dict(special_tokens)
        has_markers = ask(text, "{}", [], marks=False)["has_markers"]
        self.method: Literal["markers", "prefixes"] = "markers" if has_markers else "prefixes"
        """How the template's answers are located, in words."""

    def text(self, messages: Sequence[JsonMapping], tools: object = None) -> str:
        """Return a whole conversation as text."""
        return next(self._render(messages, [(len(messages), False)], tools))[0]

    def answered(self, messages: Sequence[JsonMapping], tools: object = None) -> list[tuple[str, Spans]]:
        """Return a conversation as text with the ranges of the answers to train on: all whose ``weight`` is not 0.

        Some templates render an answer differently once another message follows: Qwen3 drops its thoughts, Phi-3 writes
        end-of-text only after the last one. Then each answer becomes a text of its own that ends with it.

        Raises:
            ValueError: the template rejects the messages, or an answer or its weight of 0 cannot be located.
            TemplateLimitError: rendering exceeds a limit.
        """
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [index for index in answers if messages[index].get("weight", 1)]
        if self.method == "markers":
            ((whole, spans),) = self._render(messages, [(len(messages), False)], tools, marks=True)
            if len(learned) < len(answers):
                if len(spans) != len(answers):
                    raise ValueError(
                        f"the chat template marks {len(spans)} parts for {len(answers)} answers, so answers of weight "
                        f"0 cannot be located; mark each answer once with {{% generation %}}, or remove the weights"
                    )
                spans = tuple(span for index, span in zip(answers, spans, strict=True) if index in learned)
            return [(whole, spans)]
        parts = [(len(messages), False), *(part for index in learned for part in ((index, True), (index + 1, False)))]
        rendered = self._render(messages, parts, tools)
        whole, _ = next(rendered)
        texts: list[tuple[str | None, tuple[int, int]]] = []  # None: a beginning of the whole, which is held once
        for index, (before, _), (text, _) in zip(learned, rendered, rendered, strict=True):
            if not text.startswith(before):
                raise ValueError(
                    f"the chat template does not render messages[{index}] after its generation prompt, so the "
                    "start of the answer cannot be located; use a template with {% generation %} markers "
                    "(chat_template = 'chatml' or a .jinja file), or set loss_on = 'all'"
                )
            texts.append((None if whole.startswith(text) else text, (len(before), len(text))))
        if all(text is None for text, _ in texts):
            return [(whole, tuple(span for _, span in texts))]
        return [(whole[: span[1]] if text is None else text, (span,)) for text, span in texts]

    def _render(
        self, messages: Sequence[JsonMapping], parts: Sequence[tuple[int, bool]], tools: object, *, marks: bool = False
    ) -> Iterator[tuple[str, Spans]]:
        """Yield parts of a conversation as text, and where ``{% generation %}`` marks answers if ``marks`` asks for it.

        A part is a number of messages, and whether a generation prompt follows.
        """
        try:
            shared = json.dumps({**self._special_tokens, "messages": list(messages), "tools": tools, "documents": None})
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"messages cannot be converted to JSON for the chat template ({error}); fix them"
            ) from error
        names = [{"num_messages": count, "add_generation_prompt": is_prompt} for count, is_prompt in parts]
        at_once = max(1, _CHARACTERS_AT_ONCE // len(shared))
        for first in range(0, len(names), at_once):
            for text, spans in ask(self._template, shared, names[first : first + at_once], marks=marks)["texts"]:
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise ValueError(
                        f"the rendered text has an unpaired surrogate (U+{ord(text[error.start]):04X}); fix the "
                        f"message that contains it"
                    ) from None
                yield text, tuple((begin, end) for begin, end in spans)
