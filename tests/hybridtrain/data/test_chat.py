import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from hybridtrain.config.encode import JsonMapping
from hybridtrain.data.chat import BUILTIN_TEMPLATES, ChatTemplate
from hybridtrain.data.template_process import MOST_SECONDS
from hybridtrain.data.template_renderer import TemplateLimitError
from hybridtrain.data.tokenizer import open_tokenizer
from hybridtrain.errors import DataError
from tiny_tokenizers import MARKED_TEMPLATE, PREFIX_TEMPLATE, save_tokenizer

MESSAGES: list[JsonMapping] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the colour of the sky?"},
    {"role": "assistant", "content": "The sky is blue."},
    {"role": "user", "content": "def"},
    {"role": "assistant", "content": "def f(x):\n    return x"},
]


@pytest.mark.parametrize(
    ("template", "method", "answers"),
    [
        (PREFIX_TEMPLATE, "prefixes", ["The sky is blue.<|im_end|>\n", "def f(x):\n    return x<|im_end|>\n"]),
        (MARKED_TEMPLATE, "markers", ["The sky is blue.</s>", "def f(x):\n    return x</s>"]),
        (BUILTIN_TEMPLATES["chatml"], "markers", ["The sky is blue.<|im_end|>", "def f(x):\n    return x<|im_end|>"]),
    ],
)
def test_answers_are_found(template: str, method: str, answers: list[str]) -> None:
    chat = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    ((text, spans),) = chat.answered(MESSAGES)
    assert chat.method == method
    assert text == chat.text(MESSAGES)
    assert [text[first:last] for first, last in spans] == answers


@pytest.mark.parametrize("template", [PREFIX_TEMPLATE, MARKED_TEMPLATE])
def test_text_is_that_of_transformers(tmp_path: Path, template: str) -> None:
    folder = save_tokenizer(tmp_path, template=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTemplate(template, open_tokenizer(str(folder), vocab_size=300).special_tokens)
    assert ours.text(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False)
    prompt = theirs.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=True)
    ((text, spans),) = ours.answered(MESSAGES)
    assert text[: spans[0][0]] == prompt


def test_a_template_that_rewrites_earlier_answers_gives_each_a_text_of_its_own() -> None:
    rewrites = (
        "{% for m in messages %}{{ m.content if loop.last else m.content | upper }};{% endfor %}"
        "{{ '' if add_generation_prompt else '<end>' }}"
    )
    both = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "B"},
        {"role": "assistant", "content": "c"},
    ]
    found = ChatTemplate(rewrites, {}).answered(both)
    assert [(text, [text[first:last] for first, last in spans]) for text, spans in found] == [
        ("a;<end>", ["a;<end>"]),
        ("A;B;c;<end>", ["c;<end>"]),
    ]


def test_a_template_whose_generation_prompt_is_nowhere_is_refused() -> None:
    elsewhere = "{% for m in messages %}{{ m.content }};{% endfor %}{{ 'go on' if add_generation_prompt }}"
    with pytest.raises(ValueError, match=r"does not render messages\[2\] after its generation prompt.*'chatml'"):
        ChatTemplate(elsewhere, {}).answered(MESSAGES)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('only two roles') }}", "rejects the messages .*only two roles"),
        ("{{ messages[0].content + 1 }}", "rejects the messages"),
        ("{{ ''.__class__.__mro__ }}", "rejects the messages .*unsafe"),
        ("{{ messages.append(1) }}", "rejects the messages .*unsafe"),
        ("{% for i in range(10000000) %}{% endfor %}", "rejects the messages .*Range too big"),
    ],
)
def test_what_a_template_may_not(template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChatTemplate(template, {}).text(MESSAGES)


def test_a_template_that_is_none() -> None:
    with pytest.raises(DataError, match="cannot be parsed"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(DataError, match="has 100001 characters; at most 100000 are allowed"):
        ChatTemplate(100_001 * "[", {})


def test_every_day_gives_the_same_text() -> None:
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}).text(MESSAGES) == "26 Jul 2024"


def test_json_is_written_as_it_is() -> None:
    assert ChatTemplate("{{ tools | tojson }}", {}).text(MESSAGES, [{"a": "<\u00fc>"}]) == '[{"a": "<\u00fc>"}]'


LOOP = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}OPEN{{ m.content }}<e>CLOSE"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
SPELLINGS = [
    f"{{%{before}{space}NAME{space}{after}%}}"
    for before in ("", "-", "+")
    for space in ("", " ", "  ", "\t", "\n", " \r\n ")
    for after in ("", "-")
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_marker_is_whatever_jinja_parses_as_one(spelling: str) -> None:
    template = LOOP.replace("OPEN", spelling.replace("NAME", "generation"))
    template = template.replace("CLOSE", spelling.replace("NAME", "endgeneration"))
    chat = ChatTemplate(template, {})
    ((text, spans),) = chat.answered(MESSAGES)
    assert chat.method == "markers"
    assert [text[first:last] for first, last in spans] == ["The sky is blue.<e>", "def f(x):\n    return x<e>"]
    assert text == chat.text(MESSAGES)


@pytest.mark.parametrize(
    "shown", ["{% raw %}{% generation %}{% endraw %}", "{# {% generation %} #}", "{{ '{% generation %}' }}"]
)
def test_a_marker_that_is_no_statement_marks_nothing(shown: str) -> None:
    chat = ChatTemplate(PREFIX_TEMPLATE + "{% if not add_generation_prompt %}" + shown + "{% endif %}", {})
    assert chat.method == "prefixes"


@pytest.mark.parametrize(
    "around",
    [
        "{% macro say(m) %}ANSWER{% endmacro %}{% for m in messages %}<{{ say(m) }}>{% endfor %}",
        "{% for m in messages %}{% set said %}ANSWER{% endset %}<{{ said }}>{% endfor %}",
        "{% filter replace('Be', 'Do') %}{% for m in messages %}<ANSWER>{% endfor %}{% endfilter %}",
    ],
    ids=["macro", "set", "filter"],
)
@pytest.mark.parametrize("inner", ["{{ m.content }}", "{% for c in m.content %}OPEN{{ c }}CLOSE{% endfor %}"])
def test_marked_answers_are_found_where_they_are_written(around: str, inner: str) -> None:
    answer = "{% if m.role == 'assistant' %}OPENINNERCLOSE{% else %}{{ m.content }}{% endif %}"
    template = around.replace("ANSWER", answer.replace("INNER", inner))
    chat = ChatTemplate(template.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}"), {})
    ((text, spans),) = chat.answered(MESSAGES)
    assert [text[first:last] for first, last in spans] == [MESSAGES[2]["content"], MESSAGES[4]["content"]]
    assert [text[first - 1] + text[last] for first, last in spans] == ["<>", "<>"]


def test_answers_that_are_changed_after_they_were_marked_are_refused() -> None:
    trims = "{% set said %}{% generation %} {{ messages[2].content }} {% endgeneration %}{% endset %}{{ said | trim }}"
    with pytest.raises(ValueError, match=r"modifies the text inside .* before writing it"):
        ChatTemplate(trims, {}).answered(MESSAGES)


CHARACTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from("\ufdd0\ufdd1\ufdef\uffff\0<0123456789")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(CHARACTERS))))
def test_no_text_of_a_message_moves_a_mark(turns: list[tuple[str, str]]) -> None:
    messages: list[JsonMapping] = [{"role": role, "content": content} for role, content in turns]
    marked = LOOP.replace("OPEN", "{% generation %}").replace("CLOSE", "{% endgeneration %}")
    ((text, spans),) = ChatTemplate(marked, {}).answered(messages)
    assert text == "".join(f"[{role}]{content}{'<e>' * (role == 'assistant')}" for role, content in turns)
    assert [text[first:last] for first, last in spans] == [f"{text}<e>" for role, text in turns if role == "assistant"]


@pytest.mark.parametrize("template", [PREFIX_TEMPLATE, MARKED_TEMPLATE])
def test_answers_of_weight_0_are_not_learned(template: str) -> None:
    messages = [*MESSAGES[:2], {**MESSAGES[2], "weight": 0}, MESSAGES[3], {**MESSAGES[4], "weight": 1}]
    chat = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    ((text, spans),) = chat.answered(messages)
    ((whole, both),) = chat.answered(MESSAGES)
    assert (text, spans) == (whole, both[1:])


def test_a_template_that_marks_other_parts_than_answers_cannot_leave_one_out() -> None:
    once = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    messages: list[JsonMapping] = [*MESSAGES, {"role": "assistant", "content": "", "weight": 0}]
    with pytest.raises(ValueError, match="marks 1 parts for 3 answers"):
        ChatTemplate(once, {}).answered(messages)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'a' * 4000000000 }}", "takes more than 1.00 GiB of memory"),
        ("{{ messages[0].content * 4000000000 }}", "takes more than 1.00 GiB of memory"),
        ("{{ 'a' | center(3000000000) }}", "takes more than 1.00 GiB of memory"),
        ("{{ range(99999) | join('a' * 99999) }}", "takes more than 1.00 GiB of memory"),
        ("{{ '%2000000000d' | format(1) }}", "takes more than 1.00 GiB of memory"),
        ("{{ 'a' * 20000000 }}", "writes more than 16,777,216 characters"),
        ("{{ (messages | length) ** (9 ** 9) }}", f"takes more than {MOST_SECONDS} s of CPU time"),
    ],
)
def test_what_a_template_takes_is_limited(template: str, words: str) -> None:
    with pytest.raises(TemplateLimitError, match=words):
        ChatTemplate(template, {}).text(MESSAGES)
    assert ChatTemplate("{{ messages[0].content }}", {}).text(MESSAGES) == "Be brief."  # by a new process, if need be


def test_templates_are_rendered_for_any_thread_and_for_forked_processes() -> None:
    chat = ChatTemplate(PREFIX_TEMPLATE, {})
    expected = [chat.text(MESSAGES[: n % 5]) for n in range(40)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda n: chat.text(MESSAGES[: n % 5]), range(40))) == expected
    child = os.fork()
    if not child:
        os._exit(chat.text(MESSAGES) != expected[4] + chat.text(MESSAGES[4:]))
    assert os.waitpid(child, 0)[1] == 0
    assert chat.text(MESSAGES[:3]) == expected[3]


def test_many_turns_take_no_more_than_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[JsonMapping] = [
        {"role": ("user", "assistant")[n % 2], "content": f"{n} " + 40_000 * "a"} for n in range(40)
    ]
    whole = ChatTemplate(PREFIX_TEMPLATE, {}).answered(turns)
    monkeypatch.setattr("hybridtrain.data.chat._CHARACTERS_AT_ONCE", 1)
    assert ChatTemplate(PREFIX_TEMPLATE, {}).answered(turns) == whole
    ((text, spans),) = whole
    assert [text[first : first + 2].strip() for first, _ in spans] == [str(n)[:2] for n in range(1, 40, 2)]


def test_half_a_surrogate_pair_anywhere_in_a_message_is_refused() -> None:
    with pytest.raises(ValueError, match=r"an unpaired surrogate \(U\+D800\)"):
        ChatTemplate("{{ messages[0].name }}", {}).text([{"role": "user", "content": "", "name": "\ud800"}])
