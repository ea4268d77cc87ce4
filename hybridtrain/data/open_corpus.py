"""Choose how to read what the user names as the corpus."""

from hashlib import sha256
from pathlib import Path

from hybridtrain.data.byte_tokens import NUM_BYTE_TOKENS
from hybridtrain.data.corpus import Corpus, embedded_corpus, split_tail
from hybridtrain.data.text_files import text_corpus
from hybridtrain.data.token_file import open_token_file
from hybridtrain.errors import DataError


def open_corpus(path: Path | None, *, vocab_size: int) -> Corpus:
    """Return the corpus a path stands for.

    Args:
        path: None for the embedded corpus; a ``*.bin`` token file, whose last tenth is for validation; a
            folder with ``train.bin`` and ``val.bin``; or a text file or a folder of text, read as byte
            tokens.
        vocab_size: Every token is below it.

    Raises:
        DataError: the path is missing or cannot be used, or the vocabulary is too small for it.
    """
    if path is not None and path.suffix == ".bin" and not path.is_dir():
        return _token_file_corpus(path, vocab_size)
    if path is not None and ((path / "train.bin").exists() or (path / "val.bin").exists()):
        return _token_folder_corpus(path, vocab_size)
    if vocab_size < NUM_BYTE_TOKENS:
        raise DataError(
            f"text is read as {NUM_BYTE_TOKENS} byte tokens, but the vocabulary has {vocab_size}; use a "
            "model with a larger one, or a token file"
        )
    return embedded_corpus() if path is None else text_corpus(path)


def _token_file_corpus(path: Path, vocab_size: int) -> Corpus:
    """Return one token file as a corpus."""
    file = open_token_file(path, vocab_size=vocab_size)
    source = f"token file {path} ({file.format})"
    train, validation = split_tail(file.tokens, source)
    return Corpus(
        name=path.name, train=train, validation=validation, digest=file.digest, num_documents=0, source=source
    )


def _token_folder_corpus(path: Path, vocab_size: int) -> Corpus:
    """Return ``train.bin`` and ``val.bin`` of a folder as a corpus."""
    missing = [name for name in ("train.bin", "val.bin") if not (path / name).exists()]
    if missing:
        raise DataError(f"{path} lacks {missing[0]}; add it, or name one *.bin file to validate on its last tenth")
    train = open_token_file(path / "train.bin", vocab_size=vocab_size)
    validation = open_token_file(path / "val.bin", vocab_size=vocab_size)
    return Corpus(
        name=path.resolve().name,
        train=train.tokens,
        validation=validation.tokens,
        digest=sha256((train.digest + validation.digest).encode("ascii")).hexdigest(),
        num_documents=0,
        source=f"token files train.bin and val.bin ({train.format}) in {path}",
    )
