"""The whole report in a headless Chromium: nothing is fetched, everything is drawn, read, filtered and zoomed."""

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
PHONE, DESK = (390, 844), (1400, 900)
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
    """The report of all committed records."""
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

    def draw_all(self, url: str) -> int:
        """Open a page, scroll to each plot until it is drawn, and return how many there are."""
        self.page.goto(url)
        plots = self.page.locator("figure.chart .plot")
        for number in range(plots.count()):
            plots.nth(number).scroll_into_view_if_needed()
            self.page.wait_for_function(
                "plot => plot.dataset.drawn !== undefined", arg=plots.nth(number).element_handle()
            )
        return plots.count()


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
        num_plots += opened.draw_all(page.as_uri())
        marks = opened.page.eval_on_selector_all(
            "figure.chart .plot",
            "plots => plots.map(plot => plot.querySelectorAll('.scatterlayer path, .barlayer path').length)",
        )
        assert all(marks), (page.name, marks)
        wider = opened.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, page.name
    assert num_plots > 60  # all scenarios and the pages with plots
    assert opened.said == []
    assert all(asked.startswith(("file:", "data:", "blob:")) for asked in opened.asked)


@pytest.mark.parametrize("name", ["index", *WITH_PLOTS])
def test_nothing_that_axe_knows_bars_a_reader(opened: Opened, folder: Path, name: str) -> None:
    opened.draw_all(url(folder, name))
    found = axe.Axe().run(opened.page).response["violations"]
    assert [(fault["id"], [node["html"][:200] for node in fault["nodes"]][:3]) for fault in found] == []


def test_targets_are_filtered_searched_and_sorted(desk: "sync_api.Page", folder: Path) -> None:
    desk.goto(url(folder, "index"))
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
    opened.draw_all(url(folder, "7b-24gb"))
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
    menu.get_by_role("link", name="executed").click()
    opened.page.wait_for_url("**/executed.html")
    opened.page.close()
