"""Markdown of the report as HTML: tables that scroll in themselves, with a caption; verdicts that can be seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from re import sub

from markdown_it import MarkdownIt
from markdown_it.token import Token

from hybridvalidation.judge.verdict import Status

_BREAKS, _LONG = 18, 36
"""Letters from which on a cell may break its lines, and from which on it is a sentence."""
_VERDICTS = {str(status) for status in Status}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """Where one can jump to."""

    id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A page's text."""

    title: str
    """Its first heading, which the page shows itself."""
    lead: str
    """HTML of what stands before the first heading below the title."""
    html: str
    """Of the rest."""
    headings: tuple[Heading, ...]
    """Of the second level."""


def render(text: str, locate: Callable[[str], str | None]) -> Rendered:
    """Return a page of Markdown as HTML; markup within it is shown, not obeyed.

    Args:
        text: The page.
        locate: Where a link or a picture leads; None: a link nowhere, of which the text stays, a picture that is shown
            already.
    """
    parser = MarkdownIt("js-default")
    tokens = parser.parse(text)
    title, headings = "", list[Heading]()
    ids: dict[str, int] = {}
    rest: list[Token] = []
    position, num_tables, under = 0, 0, ""
    while position < len(tokens):
        token = tokens[position]
        if token.type == "heading_open":
            words = tokens[position + 1].content
            if token.tag == "h1" and not title:
                title, position = words, position + 3
                continue
            under = words
            heading = Heading(id=_unlike(words, ids), text=words)
            token.attrSet("id", heading.id)
            headings += [heading] if token.tag == "h2" else []
        elif token.type == "table_open":
            num_tables += 1
            rest.append(_html(_before_table(num_tables, under or title)))
        rest.append(token)
        if token.type == "table_open":
            rest.append(_html(f"<caption>{escape(under or title)}</caption>\n"))
        if token.type == "table_close":
            rest.append(_html("</div>"))
        position += 1
    _mark_cells(rest)
    _locate(rest, locate)
    first = next((place for place, token in enumerate(rest) if token.type == "heading_open"), len(rest))
    lead, html = (parser.renderer.render(part, parser.options, {}) for part in (rest[:first], rest[first:]))
    return Rendered(title=title, lead=lead, html=html, headings=tuple(headings))


def _before_table(number: int, caption: str) -> str:
    name = escape(f"Table {number}: {caption}", quote=True)
    return f'<div class="scroll" role="region" aria-label="{name}" tabindex="0">'


def _html(content: str) -> Token:
    return Token("html_block", "", 0, content=content)


def _unlike(words: str, ids: dict[str, int]) -> str:
    """Return an id that no other heading has."""
    name = sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "part"
    ids[name] = ids.get(name, 0) + 1
    return name if ids[name] == 1 else f"{name}-{ids[name]}"


def _mark_cells(tokens: Sequence[Token]) -> None:
    """Say what heads a row, which cells are long, and which are verdicts."""
    is_first = False
    for position, token in enumerate(tokens):
        if token.type == "tr_open":
            is_first = True
        elif token.type == "th_open":
            token.attrSet("scope", "col")
        elif token.type == "td_open":
            words = tokens[position + 1].content
            if len(words) > _BREAKS:
                token.attrJoin("class", "long" if len(words) > _LONG else "breaks")
            if words in _VERDICTS:
                token.attrJoin("class", f"verdict {words.replace(' ', '-')}")
            if is_first:
                token.tag = "th"
                token.attrSet("scope", "row")
                tokens[position + 2].tag = "th"
            is_first = False


def _locate(tokens: Sequence[Token], locate: Callable[[str], str | None]) -> None:
    for token in tokens:
        for child in token.children or ():
            attribute = {"link_open": "href", "image": "src"}.get(child.type)
            if attribute is None:
                continue
            found = locate(str(child.attrGet(attribute)))
            if found is not None:
                child.attrSet(attribute, found)
            elif child.type == "link_open":
                child.attrs.pop("href")
            else:
                child.type, child.content = "text", "Drawn on this page, to zoom into."
