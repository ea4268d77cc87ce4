"""The guide on a terminal: its pages, in a checkout or as they came with the package."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from hybridtrain.errors import ConfigError
from hybridtrain.stacks import shipped_folders

_FIRST = ("index", "questions")
"""Listed before the others."""
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_SENTENCE = re.compile(r"(.+?[.?!])(?:\s|$)", re.DOTALL)


def guide_pages() -> dict[str, Path]:
    """Return the files of the guide by name, as ``gate`` or ``techniques/lora``.

    Raises:
        ConfigError: The guide did not come with this installation.
    """
    candidates = shipped_folders("docs")
    folder = next((place for place in candidates if (place / f"{_FIRST[0]}.md").is_file()), None)
    if folder is None:
        raise ConfigError("guide", [f"{candidates[-1]}: no such folder; install hybridtrain again from its wheel"])
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.md")}
    return {name: found[name] for name in sorted(found, key=lambda name: (name.count("/"), name not in _FIRST, name))}


def find_page(name: str, pages: Mapping[str, Path]) -> str:
    """Return the full name of a page that is named in full, by its last part, or as a link names its file.

    Raises:
        ConfigError: No page has that name.
    """
    wanted = name.removesuffix(".md").removeprefix("docs/")
    found = [page for page in pages if wanted in {page, page.rpartition("/")[2]}]
    if not found:
        near = get_close_matches(wanted, [*pages, *(page.rpartition("/")[2] for page in pages)])
        nearest = f"; near: {', '.join(dict.fromkeys(near))}" if near else ""
        raise ConfigError("guide", [f"page '{name}' is unknown{nearest}; hybridtrain guide lists all pages"])
    return min(found, key=len)  # index before techniques/index


def list_text(pages: Mapping[str, Path]) -> str:
    """Return a line for each page: its name and its first sentence."""
    width = max(map(len, pages))
    lines = [f"{name:<{width}}  {first_sentence(path.read_text(encoding='utf-8'))}" for name, path in pages.items()]
    return "\n".join([*lines, "", "hybridtrain guide PAGE prints one of them."])


def first_sentence(markdown: str) -> str:
    """Return the first sentence below a page's title, in plain text."""
    _, _, body = plain_text(markdown).partition("\n\n")
    found = _SENTENCE.match(body.partition("\n\n")[0])
    return " ".join(found[1].split()).replace("`", "") if found else ""


def plain_text(markdown: str) -> str:
    """Return a page for a terminal: without markers, and with the name of a page in place of a link's address."""
    text = _LINK.sub(lambda found: _linked(found[1], found[2]), _COMMENT.sub("", markdown))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _linked(text: str, target: str) -> str:
    """Return a link as ``its text (guide PAGE)``, an address outside as it is, anything else as the text alone."""
    if target.startswith("http"):
        return f"{text} ({target})"
    path = target.partition("#")[0]
    name = Path(path).stem
    if not path.endswith(".md") or "results/" in path or name.lower() in text.lower():
        return text
    return f"{text} (guide {name})"
