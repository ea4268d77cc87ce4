"""The whole report in a headless Chromium: nothing is fetched, everything is drawn, read, filtered and zoomed."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: nox -s tests-browser")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe: nox -s tests-browser")

from hybridvalidation.scenario_files import ScenarioFiles  # noqa: E402
from hybridvalidation.show.web.site import write_site  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
PHONE, DESK, PAPER = (390, 844), (1400, 900), (794, 1123)
"""Pixels; the last are A4's at 96 to the inch."""
LOOKS = [(size, theme) for size in (PHONE, DESK) for theme in ("light", "dark")]
KEY_PAGES = ("index", "scenarios", "7b-24gb", "targets", "study-tuned-0.1m")
ANSWERS = {
    "7b-24gb": ("fits", "device GiB", "tokens/s"), "targets": ("verdict", "because"),
    "peers-8b-full-24gb": ("fits", "reserved GiB", "tokens/s"),
}  # fmt: skip
"""Columns that a phone shows without being moved sideways."""
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
OVERLAPS = """plots => plots.flatMap(plot => {
  const kinds = ".xtick text, .ytick text, .annotation-text, .xtitle, .ytitle";
  const isSlanted = text => /rotate\\(-60/.test(text.getAttribute("transform"));  // its box is larger than its words
  const texts = [...plot.querySelectorAll(kinds)].filter(text => text.textContent && !isSlanted(text));
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;  // a line is higher than its letters
  const found = texts.flatMap((one, at) => texts.slice(at + 1)
    .filter(other => meet(one.getBoundingClientRect(), other.getBoundingClientRect()))
    .map(other => `${one.textContent} on ${other.textContent}`));
  const legend = plot.parentElement.querySelector(".legend").getBoundingClientRect();
  if (legend.top < plot.getBoundingClientRect().bottom) found.push("legend on plot");
  return texts.length ? found : ["no words"];
})"""
WITH_PLOTS = (
    "7b-24gb",
    "recorded",
    "executed",
    "peers-8b-full-24gb",
    "study-tuned-0.1m",
    "kernels",
    "attention",
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of all committed records, or one that was just made of them."""
    if made := os.environ.get("HYBRIDTRAIN_REPORT"):
        return Path(made).resolve()
    path = tmp_path_factory.mktemp("report")
    write_site(ScenarioFiles(Path("scenarios")), Path("results"), path)
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as player:
        started = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page with everything that it said and asked for."""

    def __init__(self, browser: "sync_api.Browser", size: tuple[int, int], theme: str) -> None:
        self.page = browser.new_page(
            viewport={"width": size[0], "height": size[1]}, color_scheme=theme, has_touch=size == PHONE
        )
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, url: str) -> int:
        """Open a page and return how many plots it has; each was drawn before it was loaded, seen or not."""
        self.page.goto(url)
        marks = self.page.eval_on_selector_all(
            "figure.chart .plot",
            "plots => plots.map(plot => plot.querySelectorAll('.scatterlayer path, .barlayer path').length)",
        )
        assert all(marks), (url, marks)
        return len(marks)


@pytest.fixture(params=[(PHONE, "dark"), (DESK, "light")], ids=["phone, dark", "desk, light"])
def opened(browser: "sync_api.Browser", request: pytest.FixtureRequest) -> Iterator[Opened]:
    size, theme = request.param
    found = Opened(browser, size, theme)
    yield found
    found.page.close()


@pytest.fixture
def desk(browser: "sync_api.Browser") -> Iterator["sync_api.Page"]:
    found = Opened(browser, DESK, "light")
    yield found.page
    found.page.close()


def url(folder: Path, name: str) -> str:
    return (folder / f"{name}.html").as_uri()


def test_every_page_is_quiet_drawn_and_as_wide_as_the_window(opened: Opened, folder: Path) -> None:
    num_plots = 0
    for page in sorted(folder.glob("*.html")):
        num_plots += opened.open(page.as_uri())
        assert opened.page.evaluate(WIDER) <= 0, page.name
        assert opened.page.eval_on_selector_all("figure.chart .plot", OVERLAPS) == [], page.name
    assert num_plots > 60  # all scenarios and the pages with plots
    assert opened.said == []
    assert all(asked.startswith(("file:", "data:", "blob:")) for asked in opened.asked)


@pytest.mark.parametrize(("size", "theme"), LOOKS)
def test_key_pages_are_legible_on_every_screen_and_on_paper(
    browser: "sync_api.Browser", folder: Path, size: tuple[int, int], theme: str
) -> None:
    opened = Opened(browser, size, theme)
    for name in KEY_PAGES:
        num_plots = opened.open(url(folder, name))
        assert opened.page.evaluate(WIDER) <= 0, name
        opened.page.set_viewport_size({"width": PAPER[0], "height": PAPER[1]})
        opened.page.emulate_media(media="print")
        assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert not opened.page.get_by_role("navigation", name="Pages").is_visible()
        opened.page.wait_for_function(  # drawn anew with the next frame
            "([count, width]) => { const drawn = [...document.querySelectorAll('figure.chart .main-svg')]; "
            "return drawn.length >= count && drawn.every(one => one.getBoundingClientRect().right <= width); }",
            arg=[num_plots, PAPER[0]],
        )
        assert opened.page.evaluate(WIDER) <= 0, name
        assert len(opened.page.pdf(format="A4")) > 10_000
        opened.page.emulate_media(media="screen")
        opened.page.set_viewport_size({"width": size[0], "height": size[1]})
    assert opened.said == []
    opened.page.close()


@pytest.mark.parametrize("name", ANSWERS)
def test_a_phone_shows_the_columns_that_answer(browser: "sync_api.Browser", folder: Path, name: str) -> None:
    opened = Opened(browser, PHONE, "light")
    opened.open(url(folder, name))
    edges = (
        opened.page.locator("main table")
        .first.locator("thead th")
        .evaluate_all("heads => heads.map(head => [head.textContent, head.getBoundingClientRect().right])")
    )
    seen = {words for words, right in edges if right <= PHONE[0]}
    assert seen >= {*ANSWERS[name]}, edges
    opened.page.close()


@pytest.mark.parametrize("name", ["index", *WITH_PLOTS])
def test_nothing_that_axe_knows_bars_a_reader(opened: Opened, folder: Path, name: str) -> None:
    opened.open(url(folder, name))
    found = axe.Axe().run(opened.page).response["violations"]
    assert [(fault["id"], [node["html"][:200] for node in fault["nodes"]][:3]) for fault in found] == []


def test_targets_are_filtered_searched_and_sorted(desk: "sync_api.Page", folder: Path) -> None:
    desk.goto(url(folder, "targets"))
    shown = desk.locator("main table tbody tr:visible")
    count = shown.count()
    refuted = desk.locator("td.verdict.refuted:visible").count()
    assert count > 40
    assert refuted > 0
    button = desk.locator(".filter button.refuted")
    assert button.inner_text().startswith(str(refuted))
    button.focus()
    desk.keyboard.press("Enter")
    assert shown.count() == count - refuted
    assert button.get_attribute("aria-pressed") == "false"
    assert f"{count - refuted} of {count} rows" in desk.locator(".filter output").inner_text()
    button.click()
    desk.get_by_label("Search").fill("offload")
    assert 0 < shown.count() < count
    assert all("offload" in row.lower() for row in shown.all_inner_texts())
    desk.get_by_label("Search").fill("")
    head = desk.locator("main table thead button").first
    head.click()
    names = desk.locator("main table tbody th").all_inner_texts()
    assert names == sorted(names, key=str.lower)
    head.click()
    assert desk.locator("main table tbody th").all_inner_texts() == names[::-1]


def span(page: "sync_api.Page", name: str) -> float:
    """Return how much of the horizontal axis is seen."""
    low, high = page.evaluate(f"document.querySelector('#chart-{name} .plot')._fullLayout.xaxis.range.map(Number)")
    return float(high - low)


def test_a_timeline_is_zoomed_moved_hidden_and_changed(browser: "sync_api.Browser", folder: Path) -> None:
    opened = Opened(browser, DESK, "light")
    opened.open(url(folder, "7b-24gb"))
    page, figure = opened.page, opened.page.locator("#chart-timeline")
    whole = span(page, "timeline")
    figure.get_by_role("button", name="Zoom in").click()
    assert span(page, "timeline") == pytest.approx(whole / 2)
    figure.get_by_role("button", name="Reset").focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"document.querySelector('#chart-timeline .plot')._fullLayout.xaxis.range[1] == {whole}")
    box = figure.locator(".plot").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_selector("#chart-timeline .hoverlayer .legend, #chart-timeline .hoverlayer .hovertext")
    assert "GiB" in (figure.locator(".hoverlayer").text_content() or "")
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.5 * box["height"], steps=4)
    page.mouse.up()
    page.wait_for_function(
        "most => { const [low, high] = document.querySelector('#chart-timeline .plot')._fullLayout.xaxis.range; "
        "return high - low < most; }",
        arg=whole / 3,
    )
    seen = span(page, "timeline")
    page.get_by_role("button", name="Dark theme").click()
    page.wait_for_timeout(500)
    assert span(page, "timeline") == pytest.approx(seen)  # another theme, the same part
    layers = figure.locator(".scatterlayer .trace")
    before = layers.count()
    figure.locator(".legend button").first.click()
    page.wait_for_function(f"document.querySelectorAll('#chart-timeline .scatterlayer .trace').length == {before - 1}")
    options = figure.locator("select option").all_inner_texts()
    figure.get_by_label("stack").select_option(options[1])
    page.wait_for_function(
        "name => document.querySelector('#chart-timeline .plot').dataset.drawn == name", arg=options[1]
    )
    assert opened.said == []
    page.close()


def test_themes_differ_and_a_choice_is_kept(desk: "sync_api.Page", folder: Path) -> None:
    def colours() -> list[str]:
        style = "getComputedStyle(document.body)"
        return [str(desk.evaluate(f"{style}.{name}")) for name in ("backgroundColor", "color")]

    desk.goto(url(folder, "index"))
    light = colours()
    desk.get_by_role("button", name="Dark theme").click()
    dark = colours()
    assert light[0] != dark[0]
    desk.goto(url(folder, "executed"))
    assert colours() == dark
    desk.get_by_role("button", name="Light theme").click()
    assert colours() == light


def test_the_menu_of_a_phone_opens_by_key(browser: "sync_api.Browser", folder: Path) -> None:
    opened = Opened(browser, PHONE, "light")
    opened.page.goto(url(folder, "index"))
    menu = opened.page.get_by_role("navigation", name="Pages")
    assert not menu.is_visible()
    button = opened.page.get_by_role("button", name="Pages")
    button.focus()
    opened.page.keyboard.press("Enter")
    assert menu.is_visible()
    assert button.get_attribute("aria-expanded") == "true"
    menu.get_by_text("Evidence", exact=True).click()
    menu.get_by_role("link", name="executed").click()
    opened.page.wait_for_url("**/executed.html")
    opened.page.close()
