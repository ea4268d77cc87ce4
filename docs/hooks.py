"""Changes that mkdocs makes to pages of GitHub: committed results join the site, and nothing needs the network."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Link, Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
OUTSIDE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Show committed tables, the files they link to and pictures below results/."""
    for path in sorted(
        [*RESULTS.glob("*.md"), *RESULTS.glob("*.csv"), *RESULTS.glob("tables/*.md"), *RESULTS.glob("plots/*.png")]
    ):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:  # noqa: ARG001
    """End the menu with the HTML report, which nox -s docs writes beside the guide."""
    nav.items.append(Link("All results", "report/index.html"))
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Let links to results/, which lie beside docs/ on GitHub and in it on the site, hold."""
    place = Path(page.file.src_uri)
    if place.parts[0] == "results":
        return markdown
    return re.sub(r"\]\((?:\.\./)+results/", f"]({'../' * (len(place.parts) - 1)}results/", markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Refuse a page that would fetch something from the network."""
    if found := OUTSIDE.search(output):
        raise PluginError(f"{page.file.src_uri}: {found.group()} needs the network; keep it beside the page")
    return output
