"""What mkdocs asks of this project: what the program says, records shown as pages, links that hold on the site.

A page may say {{ name(...) }} for what FUNCTIONS make. A page of techniques/ gets its figures from its own example.
"""

import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hybridtrain.diagnoses import troubles_page
from hybridvalidation import guide
from hybridvalidation.guide.models import architectures, training_options
from hybridvalidation.guide.reference import commands, file_settings, optimizers
from hybridvalidation.guide.techniques import catalogue, step_table, technique_sections
from hybridvalidation.scenario_files import ScenarioFiles
from hybridvalidation.show.results import Results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
RECORDED = Results(ScenarioFiles(ROOT / "scenarios"), RESULTS)
CACHE = ROOT / "build" / "guide"
FUNCTIONS = {
    "architectures": architectures,
    "commands": commands,
    "file_settings": file_settings,
    "optimizers": optimizers,
    "techniques": catalogue,
    "troubles": troubles_page,
    "training_options": lambda *arguments: cached(training_options, *arguments),
}
TEMPLATES = Environment(
    undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True,  # noqa: S701  Markdown
    block_start_string="<%", block_end_string="%>", comment_start_string="<#", comment_end_string="#>",
)  # fmt: skip
"""Nothing but {{ }} is ours: pages speak of chat templates."""
OUTSIDE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
EXAMPLE = re.compile(r"```toml\n(.*?)```", re.DOTALL)


@cache
def program() -> bytes:
    """Return a digest of what dry runs depend on."""
    folders = (ROOT / "hybridtrain", ROOT / "kernels", Path(guide.__file__).parent)
    digest = sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".toml"}):
        digest.update(path.read_bytes())
    return digest.digest()


def cached(make: Any, *arguments: Any) -> str:
    """Return what a function makes, kept below build/ for as long as the program stays as it is."""
    key = sha256(program() + repr((make.__name__, arguments)).encode()).hexdigest()[:16]
    path = CACHE / f"{key}.md"
    if not path.exists():
        text = make(*arguments)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Show committed tables and pictures below results/."""
    for path in sorted([*RESULTS.glob("*.md"), *RESULTS.glob("tables/*.md"), *RESULTS.glob("plots/*.png")]):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Fill a page's macros, append a technique's figures, and let links to results/ hold on the site."""
    place = Path(page.file.src_uri)
    if place.parts[0] == "results":
        return markdown
    text = TEMPLATES.from_string(markdown).render(FUNCTIONS)
    if place.parent.name == "techniques" and place.stem != "index":
        example = EXAMPLE.search(text)
        assert example is not None, f"{place}: a technique's page needs a ```toml example"
        step = cached(step_table, place.stem, example.group(1))
        text += "\n" + technique_sections(place.stem, step, RECORDED)
    up = "../" * (len(place.parts) - 1)
    return re.sub(r"\]\((?:\.\./)+results/", f"]({up}results/", text)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Refuse a page that would fetch something from the network."""
    if found := OUTSIDE.search(output):
        raise PluginError(f"{page.file.src_uri}: {found.group()} needs the network; keep it beside the page")
    return output
