from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from hybridtrain.config.encode import JsonMapping
from hybridtrain.data.chat import BUILTIN_TEMPLATES, ChatTemplate
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
    assert chat.prompt(MESSAGES[:2]) == text[: spans[0][0]]


@pytest.mark.parametrize("template", [PREFIX_TEMPLATE, MARKED_TEMPLATE])
def test_text_is_that_of_transformers(tmp_path: Path, template: str) -> None:
    folder = save_tokenizer(tmp_path, template=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTemplate(template, open_tokenizer(str(folder), vocab_size=300).special_tokens)
    assert ours.text(MESSAGES) == theirs.apply_chat_template(MESSAGES, tokenize=False)
    prompt = theirs.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=True)
    assert ours.prompt(MESSAGES[:2]) == prompt


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
    with pytest.raises(ValueError, match=r"does not write messages\[2\] after its own generation prompt.*'chatml'"):
        ChatTemplate(elsewhere, {}).answered(MESSAGES)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('only two roles') }}", "refuses the messages .*only two roles"),
        ("{{ messages[0].content + 1 }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages .*unsafe"),
        ("{{ messages.append(1) }}", "refuses the messages .*unsafe"),
        ("{% for i in range(10000000) %}{% endfor %}", "refuses the messages .*Range too big"),
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
