"""A text file, or a folder of them, as a corpus of byte tokens held in memory: two bytes per byte of text.

For corpora beyond a few gigabytes write a token file instead (``hybridtrain.data.token_file``).
"""

import os
from collections.abc import Iterator
from pathlib import Path

from hybridtrain.config.decode import missing_path
from hybridtrain.data.corpus import Corpus, corpus_of_documents
from hybridtrain.errors import DataError


def text_corpus(path: Path) -> Corpus:
    """Return a UTF-8 text file, or all UTF-8 text files below a folder, as byte tokens.

    A single file keeps its last tenth for validation. In a folder each file is a document, and whole
    documents are held out. Hidden files and folders (``.git``) and empty files are passed over; files that
    are no UTF-8 text are skipped and counted in ``num_skipped_files``.

    Raises:
        DataError: the path is missing or unreadable, a single file is not UTF-8, or there is too little text.
    """
    if not path.exists():
        raise DataError(f"{path} {missing_path(path)}")
    try:
        return _folder_corpus(path) if path.is_dir() else _file_corpus(path)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror}); check its permissions") from error


def _file_corpus(path: Path) -> Corpus:
    """Return one file as a corpus of one document."""
    content = path.read_bytes()
    if not content:
        raise DataError(f"{path} is empty; name a file with text")
    fault = _text_fault(content)
    if fault:
        raise DataError(f"{path} is no UTF-8 text: {fault}; save it as UTF-8, or name token files *.bin")
    return corpus_of_documents({path.name: content}, name=path.name, source=f"text file {path}")


def _folder_corpus(root: Path) -> Corpus:
    """Return the text files of a folder as one document each."""
    documents: dict[str, bytes] = {}
    num_skipped = 0
    for path in _visible_files(root):
        content = path.read_bytes()
        if _text_fault(content):
            num_skipped += 1
        elif content:
            documents[path.relative_to(root).as_posix()] = content
    if not documents:
        raise DataError(
            f"{root} holds no UTF-8 text file ({num_skipped} other files were skipped); name a folder with "
            "text, or a single token file"
        )
    source = f"{len(documents)} text files below {root}, {num_skipped} other files skipped"
    return corpus_of_documents(documents, name=root.resolve().name, source=source, num_skipped_files=num_skipped)


def _visible_files(root: Path) -> Iterator[Path]:
    """Yield every regular file below a folder that is not hidden; links to folders are not followed."""
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _raise(error: OSError) -> None:
    """Refuse a folder that ``os.walk`` would silently pass over."""
    raise error


def _text_fault(content: bytes) -> str:
    """Return why this is no UTF-8 text, with the byte offset, or an empty string."""
    nul = content.find(b"\0")
    if nul >= 0:
        return f"byte {nul} is NUL"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"byte {error.start} is 0x{content[error.start]:02x}"
    return ""
