"""Texts that are the same on every machine: the Python sources of pinned versions of packages that torch depends on.

They are installed with torch, and their wheels are pure Python. sympy and networkx have
the three-clause BSD licence (LICENSE of https://github.com/sympy/sympy, LICENSE.txt of
https://github.com/networkx/networkx); nothing of them is copied into this repository.
"""

from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Final

from hybridtrain.data.corpus import Corpus, corpus_of_documents
from hybridtrain.errors import DataError

PINNED: Final = MappingProxyType(
    {
        "sympy": ("1.14.0", "6c0c1af79aad6f203bb036d40945af3620c5280d0385be70f53519622a2bdafd"),
        "networkx": ("3.6.1", "6c292748fbd76083e20aacdb992a6775d81b436b14717f88e4b6a6894d87f7e3"),
    }
)
"""Pinned version, and SHA-256 of all paths and contents as in ``Corpus.digest``: 26 MB and 6 MB of text."""


@cache
def pinned_corpus(name: str = "sympy") -> Corpus:
    """Return all source files of a pinned package, tests included, as byte tokens, one document per file.

    Raises:
        DataError: it is not installed, or its files differ from the pinned version.
    """
    version, digest = PINNED[name]
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise DataError(_fault(name, "is not installed")) from None
    if package.version != version:
        raise DataError(_fault(name, f"has version {package.version}"))
    documents: dict[str, bytes] = {}
    for path in package.files or ():
        if path.parts[0] == name and path.suffix == ".py" and (content := Path(path.locate()).read_bytes()):
            documents[path.as_posix()] = content
    source = f"{len(documents)} files of {name} {version}, as byte tokens"
    corpus = corpus_of_documents(documents, name=f"{name}-{version}", source=source)
    if corpus.digest != digest:
        raise DataError(_fault(name, f"has files with the digest {corpus.digest[:8]}, not {digest[:8]}"))
    return corpus


def _fault(name: str, state: str) -> str:
    version, _ = PINNED[name]
    return (
        f"the pinned corpus: {name} {state}; unmodified version {version} is required; run "
        f"'python -m pip install --force-reinstall --no-deps {name}=={version}'"
    )
