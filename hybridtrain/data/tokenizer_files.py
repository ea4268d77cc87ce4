"""The tokenizer and the chat template that a model is trained with, as files that transformers reads."""

import json
import shutil
from pathlib import Path
from typing import Final

from hybridtrain.config.encode import JsonMapping
from hybridtrain.data.byte_tokens import NUM_BYTE_TOKENS, byte_letters
from hybridtrain.data.tokenizer import ByteTokenizer, Tokenizer

TOKEN_IDS: Final = "token_ids.json"  # noqa: S105  a file
"""Ids of special tokens by their config.json keys, and which of them override the model's own."""
_CONFIG: Final = "tokenizer_config.json"
_SPECIAL_TOKENS_MAP: Final = "special_tokens_map.json"
_TOKENIZER: Final = "tokenizer.json"
_TEMPLATE: Final = "chat_template.jinja"
_TEMPLATES: Final = "additional_chat_templates"
_COPIED: Final = (
    _TOKENIZER, _CONFIG, "tokenizer.model", _SPECIAL_TOKENS_MAP, "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", _TEMPLATE, "chat_template.json",
)  # fmt: skip


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer and its chat templates, if there are any."""
    for name in _COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, folder / _TEMPLATES)


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, name: str, *, is_models: bool, eos_token: str = "", template: str = ""
) -> None:
    """Write a tokenizer into an empty folder.

    Args:
        folder: An existing folder.
        tokenizer: The tokenizer that ``open_tokenizer(name)`` returned.
        name: "bytes", a tokenizer.json, or the folder that contains one.
        is_models: Whether it is the model's own tokenizer, whose config has the ids of special tokens.
        eos_token: Overrides the tokenizer's own.
        template: Chat template that overrides the tokenizer's own.
    """
    ids, path = tokenizer.special_ids(), Path(name)
    if isinstance(tokenizer, ByteTokenizer):
        eos_token = tokenizer.special_tokens["eos_token"]
        _write_json(folder / _TOKENIZER, _byte_tokenizer(tokenizer.eos_ids[0]))
        _write_json(folder / _CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    else:
        copy_tokenizer(path if path.is_dir() else path.parent, folder)
        if path.is_file():
            shutil.copyfile(path, folder / _TOKENIZER)
    replaced = [name for name in ids if not is_models or (eos_token and name == "eos_token_id")]
    _write_json(folder / TOKEN_IDS, {"ids": ids, "replaced": replaced})
    changes: JsonMapping = {"eos_token": eos_token} if eos_token else {}
    if template:
        (folder / _TEMPLATE).write_text(template, encoding="utf-8")
        (folder / "chat_template.json").unlink(missing_ok=True)
    for file in (folder / _CONFIG, folder / _SPECIAL_TOKENS_MAP):
        if (changes or template) and (file.is_file() or (changes and file.name == _CONFIG)):
            content = json.loads(file.read_bytes()) if file.is_file() else {}
            if template:
                content.pop("chat_template", None)
            _write_json(file, content | changes)


def with_token_ids(config: JsonMapping, folder: Path) -> JsonMapping:
    """Return a config with the ids of special tokens that ``write_tokenizer`` wrote into a folder, if any.

    A list of end-of-text ids stays if it contains the new one.
    """
    if not (folder / TOKEN_IDS).is_file():
        return config
    written = json.loads((folder / TOKEN_IDS).read_bytes())
    changed = dict(config)
    for name, token in written["ids"].items():
        old = config.get(name)
        if old is None or (name in written["replaced"] and not (isinstance(old, list) and token in old)):
            changed[name] = token
    return changed


def _byte_tokenizer(nul: int) -> dict[str, object]:
    """Return a tokenizer.json with a token for each byte, without merges; NUL is a special one.

    Nothing is added around a text; it says so as transformers writes it, which then reads this very file.
    """
    vocab = {letter: token for token, letter in enumerate(byte_letters()) if token != nul} | {"\0": nul}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    plain = {"type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {}}
    special = {
        "id": nul, "content": "\0", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True,
    }  # fmt: skip
    assert len(vocab) == NUM_BYTE_TOKENS, "a token for each byte"
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None,
        "pre_tokenizer": level, "post_processor": plain, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocab, "merges": [],
        },
    }  # fmt: skip


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
