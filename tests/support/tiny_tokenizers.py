"""A byte-level BPE tokenizer trained on a few sentences, in files as transformers keeps them."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = (
    "What is the colour of the sky?", "The sky is blue.", "Name an animal that is not a cat.",
    "A dog is an animal, and so is a fox.", "The quick brown fox jumps over the lazy dog.", "def f(x):\n    return x",
)  # fmt: skip
END, START_TURN, END_TURN, BEGIN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"
PREFIX_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "[A] {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}[{{ message.role }}] {{ message.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[A] {% endif %}"
)


def save_tokenizer(folder: Path, *, template: str | None = PREFIX_TEMPLATE, adds_bos: bool = False) -> Path:
    """Write tokenizer.json and tokenizer_config.json; the vocabulary has at most 300 tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END, START_TURN, END_TURN, BEGIN], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    backend.train_from_iterator(SENTENCES, trainer)
    # Trims the white space off spans, as the files of most published models do.
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, backend.token_to_id(BEGIN))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "eos_token": {"__type": "AddedToken", "content": END, "special": True}, "bos_token": BEGIN, "pad_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def save_llama_tokenizer(folder: Path, **settings: object) -> Path:
    """Write the files of a tokenizer as Llama 2's: BPE over characters, bytes for others, spaces written as U+2581."""
    words = ["t", "h", "e", "th", "the", "H", "i", "Hi", "I", "N", "S", "T", "[", "]", "/", "a"]
    pieces = ["\u2581", *words, *(f"\u2581{word}" for word in ("t", "th", "the", "H", "Hi", "[", "a")), "\u2581\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    parts = [piece[:cut] + " " + piece[cut:] for piece in pieces for cut in range(1, len(piece))]
    merges = [(left, right) for left, right in map(str.split, parts) if {left, right} <= {*pieces}]
    backend = Tokenizer(
        models.BPE(
            {token: number for number, token in enumerate(tokens)}, merges, unk_token=tokens[0], byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", BEGIN, "</s>"])
    backend.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BEGIN, "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    return folder


def chat(*turns: str) -> dict[str, object]:
    """Return a conversation in which user and assistant speak in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]}


def write_lines(path: Path, *values: object) -> Path:
    """Write a .jsonl file."""
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path
