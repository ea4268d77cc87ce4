"""Markdown of the report as HTML: tables that scroll in themselves, with a caption; verdicts that can be seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from re import sub
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from hybridvalidation.judge.verdict import Status

_BREAKS, _LONG = 18, 48
"""Letters from which on a cell may break its lines, and from which on it is a sentence."""
_NOTE = "note"
"""Head of a column of numbers, whose notes are listed below the table."""
_VERDICTS = {str(status) for status in Status}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A page's text."""

    title: str
    """Its first heading, which the page shows itself."""
    lead: str
    """HTML of what stands before the first heading below the title."""
    html: str
    """Of the rest."""
    headings: dict[str, str]
    """Of the second level: text by id."""


def render(text: str, locate: Callable[[str], str | None]) -> Rendered:
    """Return a page of Markdown as HTML; markup within it is shown, not obeyed.

    Args:
        text: The page.
        locate: Where a link or a picture leads; None: nowhere, and its text stays.
    """
    parser = MarkdownIt("js-default")
    parser.add_render_rule("table_open", _open_table)
    parser.add_render_rule("table_close", lambda *_arguments: "</table>\n</div>")
    tokens = parser.parse(text)
    title = ""
    if tokens and tokens[0].tag == "h1":
        title, tokens = tokens[1].content, tokens[3:]
    ids, headings, under, tables = dict[str, int](), dict[str, str](), title, _Tables()
    for token, inside, close in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if token.type == "heading_open":
            under = inside.content
            name = sub(r"[^a-z0-9]+", "-", under.lower()).strip("-") or "part"
            ids[name] = ids.get(name, 0) + 1
            unlike = name if ids[name] == 1 else f"{name}-{ids[name]}"
            token.attrSet("id", unlike)
            headings |= {unlike: under} if token.tag == "h2" else {}
        else:
            tables.mark(token, inside, close, under)
    _locate(tokens, locate)
    first = next((place for place, token in enumerate(tokens) if token.type == "heading_open"), len(tokens))
    lead, html = (parser.renderer.render(part, parser.options, {}) for part in (tokens[:first], tokens[first:]))
    return Rendered(title=title, lead=lead, html=html, headings=headings)


class _Tables:
    """Marks what a table says of itself: its number and caption, heads of rows and columns, and links to its notes."""

    def __init__(self) -> None:
        self._number = self._column = self._num_notes = 0
        self._heads: list[str] = []

    def mark(self, token: Token, inside: Token, close: Token, caption: str) -> None:
        """Mark a token, with the two behind it, below a heading."""
        if token.type == "table_open":
            self._number, self._num_notes, self._heads = self._number + 1, 0, []
            token.meta = {"number": self._number, "caption": caption}
        elif token.type == "tr_open":
            self._column = 0
        elif token.type == "th_open":
            token.attrSet("scope", "col")
            self._heads.append(inside.content)
        elif token.type == "td_open":
            self._mark_cell(token, inside, close)
            self._column += 1
        elif token.type == "list_item_open" and token.markup == "." and self._heads[-1:] == [_NOTE]:
            self._num_notes += 1
            token.attrSet("id", f"note-{self._number}-{self._num_notes}")

    def _mark_cell(self, token: Token, inside: Token, close: Token) -> None:
        children = inside.children or []
        words = "".join(child.content for child in children)
        if len(words) > _BREAKS:
            token.attrJoin("class", "long" if len(words) > _LONG else "breaks")
        if words in _VERDICTS:
            token.attrJoin("class", f"verdict {words.replace(' ', '-')}")
        if self._column == 0:
            token.tag = close.tag = "th"
            token.attrSet("scope", "row")
        elif self._heads[self._column] == _NOTE and words:
            link = Token("link_open", "a", 1, attrs={"href": f"#note-{self._number}-{words}"})
            inside.children = [link, *children, Token("link_close", "a", -1)]


def _open_table(_renderer: Any, tokens: Sequence[Token], place: int, *_arguments: Any) -> str:
    number, caption = tokens[place].meta["number"], escape(tokens[place].meta["caption"], quote=True)
    region = f'<div class="scroll" role="region" aria-label="Table {number}: {caption}" tabindex="0">'
    return f"{region}<table>\n<caption>{caption}</caption>\n"


def _locate(tokens: Sequence[Token], locate: Callable[[str], str | None]) -> None:
    for child in (child for token in tokens for child in token.children or ()):
        attribute = {"link_open": "href", "image": "src"}.get(child.type)
        if attribute is None:
            continue
        found = locate(str(child.attrGet(attribute)))
        if found is not None:
            child.attrSet(attribute, found)
        elif child.type == "link_open":
            child.attrs.pop("href")
        else:
            child.type = "text"
