"""The page of ``loopscope report`` in Chromium, with mouse and keyboard."""

import base64
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopscope.checkpoints import run_lock
from loopscope.durable_files import write_json
from loopscope.hooks import ALERTS
from loopscope.runs import CONFIG, REWINDS, SUMMARY

from tests.framework.report.faulty_runs import faulty_run, healthy_run
from tests.framework.report.pages import ended_run, reported, seeded_runs
from tests.framework.report.plotted import record

selenium = pytest.importorskip("selenium", reason="selenium is not installed, so no browser opens the page")
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys  # noqa: E402

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium with chromedriver to open the page in"),
]
LOSS, SPECTRUM = "charts.get('m/loss').plot", "charts.get('m/spectrum').plot"


class Page:
    """A page in a browser."""

    def __init__(self, chrome: Chrome) -> None:
        self.chrome = chrome

    def open(self, path: Path, *metrics: str) -> "Page":
        """Load a page and show metrics."""
        self.chrome.get(path.as_uri())
        self.wait("document.getElementById('state').textContent.match(/shown|no curves/)")
        self.run(f"state.shown = {json.dumps(metrics)}; draw()") if metrics else None
        return self

    def run(self, script: str) -> None:
        self.chrome.execute_script(script)

    def get(self, expression: str) -> Any:
        return self.chrome.execute_script(f"return {expression}")

    def wait(self, expression: str) -> Any:
        end = time.monotonic() + 60
        while not (value := self.get(expression)):
            assert time.monotonic() < end, expression
            time.sleep(0.02)
        return value

    def unfold(self) -> None:
        """Open the folded controls."""
        self.run("document.querySelectorAll('#controls details').forEach(one => { one.open = true; })")

    def resize(self, width: int, height: int = 900, theme: str = "light") -> None:
        """Set the size of the window's content and the system's theme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)

    def press(self, *keys: str) -> None:
        """Press keys in the element with the focus."""
        self.chrome.switch_to.active_element.send_keys(*keys)

    def tab_to(self, condition: str) -> None:
        """Press the tab key until the element with the focus meets a condition."""
        for _ in range(60):
            self.press(Keys.TAB)
            if self.get(f"(one => {condition})(document.activeElement)"):
                return
        raise AssertionError(condition)

    def click(self, selector: str) -> None:
        self.chrome.find_element("css selector", selector).click()

    def set(self, selector: str, text: str) -> None:
        field = self.chrome.find_element("css selector", selector)
        field.clear()
        field.send_keys(text, Keys.TAB)

    def points(self, plot: str = LOSS) -> list[tuple[str, int]]:
        """Return name and number of points of each line, without marks."""
        return self.get(f"{plot}.data.filter(one => one.name).map(one => [one.name, one.x.length])")


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = BROWSER
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1400,1000",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    reported(*seeded_runs(folder))
    return folder / "seed-0/exp/page.html"


@pytest.fixture
def page(chrome: Chrome) -> Iterator[Page]:
    """Open pages; after the test, check that there were no requests and no errors."""
    yield Page(chrome)
    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    assert chrome.execute_script("return performance.getEntriesByType('resource').map(one => one.name)") == []
    assert chrome.get_log("browser") == []


def test_page_opens_with_sentences_and_curves(page: Page, written: Path) -> None:
    page.open(written)
    assert len(page.chrome.find_elements("css selector", "article.run")) == 6
    assert page.get("[...charts.keys()]") == [
        f"training_metrics/{name}" for name in ("loss", "val_acc", "lr", "train_acc")
    ]
    assert page.get("[...document.querySelectorAll('figure path.js-line, figure path.point')].length") >= 24
    assert "4 of 7 metrics are shown." in page.get("document.getElementById('state').textContent")


def test_runs_are_hidden_and_shown(page: Page, written: Path) -> None:
    page.open(written, "m/loss", "m/spectrum")
    every = page.points()
    assert [count for _, count in every] == [9, 8, 7, 9, 8, 7]
    page.click("#shown-runs label:nth-of-type(2) input")
    assert page.points() == [every[0], *every[2:]]
    assert len(page.points(SPECTRUM)) == 5
    page.click("#shown-runs label:nth-of-type(2) input")
    assert page.points() == every


@pytest.mark.slow
def test_metric_can_be_selected_by_keyboard(page: Page, written: Path) -> None:
    """Tab reaches the search field and the checkbox, and the space key selects the metric."""
    page.open(written)
    page.tab_to("one.id === 'all-title'")
    page.press(Keys.ENTER)
    page.tab_to("one.id === 'find'")
    page.press("m/phase")
    assert page.get("boxes.filter(one => one.line.checkVisibility()).map(one => one.name)") == ["m/phase"]
    page.tab_to("one.parentNode.textContent.trim() === 'm/phase'")
    assert not page.get("charts.has('m/phase')")
    page.press(Keys.SPACE)
    assert page.get("charts.get('m/phase').plot.data[0].y") == [0] * 4 + [1] * 5


@pytest.mark.slow
def test_zoom_by_fields_or_dragging_affects_all_charts(page: Page, written: Path) -> None:
    page.open(written, "m/loss", "m/spectrum")
    page.unfold()
    page.set("#from", "2")
    page.set("#to", "6")
    for plot in (LOSS, SPECTRUM):
        page.wait(f"String({plot}.layout.xaxis.range) === '2,6'")
    page.click("#whole")
    page.wait(f"{LOSS}._fullLayout.xaxis.range[1] > 8")
    drag = page.get(f"({LOSS}.scrollIntoView({{block: 'center'}}), {LOSS}.querySelector('.nsewdrag'))")
    ActionChains(page.chrome).move_to_element_with_offset(drag, -60, -40).click_and_hold().move_by_offset(
        120, 80
    ).release().perform()
    page.wait("state.range")
    low, high = page.get("state.range")
    assert 1 < low < high < 9
    page.wait(f"String({SPECTRUM}.layout.xaxis.range) === String(state.range)")
    assert page.get("[at('from').value, at('to').value]") == [str(math.floor(low + 0.5)), str(math.floor(high + 0.5))]


@pytest.mark.slow
def test_axes_are_logarithmic_and_curves_smooth(page: Page, written: Path) -> None:
    page.open(written, "m/loss")
    page.unfold()
    page.click("#log-x")
    page.click("#log-y")
    assert page.get(f"['xaxis', 'yaxis'].map(axis => {LOSS}._fullLayout[axis].type)") == ["log", "log"]
    page.click("#log-y")
    page.set("#smooth", "3")
    raw, smooth = page.get(f"{LOSS}.data.slice(0, 2).map(one => one.y)")
    assert raw == list(range(1, 10))
    assert smooth == pytest.approx(raw)  # since the curve is a straight line
    assert page.get("smoothed([1, NaN, 100, 10, 1], 3, true)[2]") == pytest.approx(1000**0.5)
    assert page.get("smoothed([1, NaN, 100, 10, 1], 3, false)[2]") == 55


@pytest.mark.slow
def test_hovering_in_one_chart_hovers_in_all(page: Page, written: Path) -> None:
    page.open(written, "m/loss", "training_metrics/loss", "m/phase")
    drag = page.get(f"({LOSS}.scrollIntoView({{block: 'center'}}), {LOSS}.querySelector('.nsewdrag'))")
    ActionChains(page.chrome).move_to_element(drag).move_by_offset(9, 9).perform()
    page.wait("charts.get('m/phase').plot.querySelectorAll('.hovertext').length")
    assert page.get(f"{LOSS}.querySelectorAll('.hovertext').length")


def test_spectra_phases_and_alerts_are_drawn(page: Page, written: Path) -> None:
    """Spectra are heat maps, phases are lines across the chart, and alerts are labeled points."""
    page.open(written, "m/loss", "m/spectrum")
    assert page.get(f"{SPECTRUM}.data.map(one => one.type)") == ["heatmap"] * 6
    assert page.get(f"{SPECTRUM}.data[1].z") == [list(range(1, 9)), [1.5] * 8]
    assert page.get(f"{LOSS}.layout.shapes.map(one => [one.x0, one.label.text])") == [[5, "1"]] * 6
    assert page.get(f"{LOSS}.data.filter(one => one.yaxis === 'y2').map(one => [one.x, one.text])") == [
        [[4], ["seed-0/a: It &lt;b&gt;rises&lt;/b&gt;."]]
    ]


@pytest.mark.slow
def test_means_over_seeds_replace_runs(page: Page, written: Path) -> None:
    page.open(written, "m/loss")
    page.unfold()
    page.click("#means")
    named = page.points()
    assert named == [[f"{group}: mean of 3 seeds", 7] for group in "ab" for _ in range(3)]
    low, high, mean = page.get(f"{LOSS}.data.slice(0, 3).map(one => one.y[4])")
    assert (low + high) / 2 == pytest.approx(mean) == 10
    page.click("#means")
    assert len(page.points()) == 6


@pytest.mark.slow
def test_rewinds_have_a_button_and_alerts_list_rows(page: Page, tmp_path: Path) -> None:
    """The button shows the curves of the rewind, and the label of an alert lists its first rows."""
    folder = record(tmp_path, [(at, {f"m/{name}": at for name in "abcde"}) for at in range(9)], strategy="run")
    again = record(tmp_path, [(at, {f"n/{name}": at for name in range(30)}) for at in (3, 4)], strategy="again")
    write_json(again / CONFIG, {"experiment": "exp", "strategy": "again", "config": {}, "hooks": {"n": {}}})
    (folder / REWINDS).mkdir()
    again.rename(folder / REWINDS / "steps_3_to_4")
    alert = {"step": 4, "hook": "m", "metric": "a", "sentence": "It rises.", "rows": [3, 1, 4, 1, 5]}
    (folder / ALERTS).write_text(json.dumps(alert))
    reported(folder)
    page.open(folder.parent / "page.html")
    assert page.get("[...charts.keys()]") == [
        f"{hook}/{name}" for hook, names in (("m", "abcd"), ("n", "0123")) for name in names
    ]
    assert page.get("charts.get('m/a').plot.data.at(-1).text") == ["run: It rises. (rows 3, 1, 4 and 2 more)"]
    page.click("button[data-run]")
    assert page.get("[...charts.keys()]") == [f"n/{name}" for name in range(24)]
    assert page.get("charts.get('n/9').plot.data.map(one => [one.name, one.x])") == [
        ["run, steps 3 to 4 again", [3, 4]]
    ]


def test_table_of_chart_opens(page: Page, written: Path) -> None:
    page.open(written, "m/loss")
    page.click("figure summary")
    page.wait("document.querySelector('figure td')")
    rows = page.get(
        "[...document.querySelectorAll('figure tr')].map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert rows[0][:3] == ["step", "seed-0/a", "seed-1/a"]
    assert rows[0][7:10] == [f"a: mean of 3 seeds{part}" for part in ("", ", from", ", to")]
    assert (len(rows), rows[9][:5]) == (10, ["9", "9", "", "", "19"])


@pytest.mark.slow
def test_button_switches_between_dark_and_light(page: Page, written: Path) -> None:
    page.open(written, "m/loss")
    look = "[getComputedStyle(document.body).backgroundColor, charts.get('m/loss').plot.layout.font.color]"
    light = page.get(look)
    page.click("#theme")
    dark = page.get(look)
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    page.click("#theme")
    assert page.get(look) == light


@pytest.mark.slow
def test_printed_page_has_charts_and_tables(page: Page, written: Path) -> None:
    page.open(written, "m/loss")
    page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    is_seen = "id => at(id).checkVisibility()"
    assert page.get(f"['charts', 'shown-runs', 'log-x', 'find', 'theme'].map({is_seen})") == [True] * 2 + [False] * 3
    page.run("setTheme('dark')")
    look = f"[root.dataset.theme, {LOSS}._fullLayout.width]"
    on_screen = page.get(look)
    page.run(f"addEventListener('beforeprint', () => {{ window.seen = {look}; }})")
    assert base64.b64decode(page.chrome.execute_cdp_cmd("Page.printToPDF", {})["data"]).startswith(b"%PDF-")
    page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert page.get("window.seen") == ["light", 660]
    assert on_screen[0] == "dark"
    assert on_screen[1] != 660
    page.wait(f"String({look}) === {json.dumps(','.join(map(str, on_screen)))}")


WIDTHS = (400, 1000, 1440)
LOOK = "getComputedStyle(document.body).backgroundColor"
CONTRAST = Path(__file__).with_name("contrast.js")


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diagnosed")
    reported(faulty_run(folder), healthy_run(folder))
    return folder / "exp/page.html"


def test_answer_is_above_the_fold(page: Page, diagnosed: Path) -> None:
    """At 1440 by 900 pixels: verdict, findings, results, legend, and the curves of loss and validation."""
    page.resize(1440)
    page.open(diagnosed)
    parts = ("#verdict", "#finding-1", "#finding-2", "#results table", "#shown-runs")
    parts += ("#key-charts figure:nth-of-type(1) .plot", "#key-charts figure:nth-of-type(2) .plot")
    for part in parts:
        low, high = page.get(
            f"(one => [one.top, one.bottom])(document.querySelector('{part}').getBoundingClientRect())"
        )
        assert 0 <= low < high <= 900, part
    assert not page.get("['#log-x', '#find'].some(name => document.querySelector(name).checkVisibility())")


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("width", WIDTHS)
def test_page_does_not_scroll_sideways(width: int, page: Page, diagnosed: Path) -> None:
    page.resize(width)
    page.open(diagnosed)
    page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    page.wait("document.querySelector('figure td')")
    assert page.get("document.documentElement.scrollWidth") <= width
    assert page.get("[...document.querySelectorAll('.plot')].every(one => one.clientWidth <= innerWidth)")


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_page_follows_the_theme_with_contrast(theme: str, page: Page, diagnosed: Path) -> None:
    """Every text has a contrast of at least 4.5 in both themes."""
    page.resize(1440, theme=theme)
    page.open(diagnosed)
    page.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.get(LOOK) == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[theme]
    assert page.get(
        f"charts.values().next().value.plot.layout.paper_bgcolor === '{'#ffffff' if theme == 'light' else '#14171b'}'"
    )
    assert page.chrome.execute_script(CONTRAST.read_text("utf-8")) >= 4.5


def test_legend_names_every_run(page: Page, diagnosed: Path) -> None:
    """The lines of the legend have the colours of the curves."""
    page.open(diagnosed)
    labels = page.get("[...document.querySelectorAll('#shown-runs label')].map(one => one.textContent.trim())")
    colours = page.get("[...document.querySelectorAll('#shown-runs line')].map(one => one.getAttribute('stroke'))")
    loss = "charts.get('training_checks/loss').plot.data.filter(one => one.name)"
    assert (labels, colours) == (["faulty", "healthy"], page.get(f"{loss}.map(one => one.line.color)"))


def test_findings_mark_their_first_step(page: Page, diagnosed: Path) -> None:
    """The loss and the metric of the evidence have the number of the finding; the latter has its limit, too."""
    page.open(diagnosed)
    number = "layout.annotations.map(one => [one.x, one.text])"
    for name, count in (("training_checks/loss", 1), ("loss_spikes/loss_deviation", 2), ("training_metrics/lr", 0)):
        plot = f"charts.get('{name}').plot"
        assert page.get(f"{plot}.{number}") == [[5, "<b>2</b>"]] * (count > 0)
        assert page.get(f"{plot}.layout.shapes.length") == count


@pytest.mark.slow
def test_keyboard_reaches_findings_and_their_charts(page: Page, diagnosed: Path) -> None:
    """Enter on *Show chart* moves the focus to the chart of the evidence."""
    page.resize(1440)
    page.open(diagnosed)
    page.tab_to("one.dataset.finding === '2'")
    page.press(Keys.ENTER)
    assert page.get("document.activeElement.closest('figure').querySelector('h3').textContent") == (
        "loss_spikes/loss_deviation"
    )
    page.tab_to("one.closest('.wide')")


@pytest.mark.slow
def test_layout_does_not_shift(page: Page, diagnosed: Path) -> None:
    observe = (
        "window.shift = 0; new PerformanceObserver(list => list.getEntries().forEach(one => { shift += one.value; }))"
    )
    source = {"source": f"{observe}.observe({{type: 'layout-shift', buffered: true}})"}
    added = page.chrome.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
    page.resize(1440)
    page.open(diagnosed)
    page.get("document.body.offsetHeight")
    assert page.get("shift") < 0.01
    page.chrome.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


NAN, INF = math.nan, math.inf
BAD = "</script><script>throw 1</script><img src=x onerror=alert(1)>%{x}"
UNUSUAL: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "one-epoch": [(9, {"m/loss": 1.0})],
    "without-numbers": [(at, {"m/loss": NAN, "m/list": [NAN, INF]}) for at in range(9)],
    "markup": [(at, {f"{BAD}/loss": at, f"m/{BAD}": [1.0, at]}) for at in range(3)],
    "separate-metric": [(at, {"m/alone": 1.0}) for at in range(3)],
    "empty": [],
    "huge": [(at, {"m/loss": (-1) ** at * 1e300, "m/int": 10**15}) for at in range(9)],
    "negative": [(at, {"m/loss": -at, "m/list": [-1.0, 0.0]}) for at in range(-3, 3)],
    "long-\u05d0": [
        (at, {"m/loss": -INF if at % 2 else 1e-320, "l" * 300 + "/\u05d0\u202e\ud83d\ude00": at}) for at in range(9)
    ],
    "running": [(at, {"m/loss": at, "m/list": [1.0] * at}) for at in range(1, 4)],
    "text": [(1, {"m/loss": 2, "m/word": "a", "__proto__/constructor": 1.0, "": 3.0})],
}


@pytest.mark.slow
def test_unusual_runs_are_drawn(page: Page, tmp_path: Path) -> None:
    """Records are incomplete, have extreme values, or have markup in their names."""
    folders = [record(tmp_path, emits, strategy=name) for name, emits in UNUSUAL.items()]
    folders.append(ended_run(tmp_path / "more", "markup", 1, UNUSUAL["markup"]))
    for invalid in ("{]", "null"):
        with (folders[8] / "running.jsonl").open("a") as file:
            file.write(invalid)
    (folders[5] / SUMMARY).write_text("{")
    (folders[6] / ALERTS).write_text(json.dumps({"epoch": 0, "step": -1, "hook": "m", "metric": "", "sentence": BAD}))
    with run_lock(folders[8]):
        report = reported(*folders)
    assert "exp/running: still running, recorded up to step 3" in report.text
    page.open(folders[0].parent / "page.html")
    assert not page.get("at('seeds').checkVisibility()")
    names = page.get("[...metrics.keys()]")
    assert {f"{BAD}/loss", f"m/{BAD}", "m/alone", "m/list", "__proto__/constructor"} <= set(names)
    for switch in ("#log-y", "#log-x", "#means"):
        page.run("state.shown = [...metrics.keys()]; draw()")
        page.run(f"document.querySelector('{switch}').click()")
    assert page.get("charts.size") == len(names)
    page.run("document.querySelectorAll('figure details').forEach(one => { one.open = true; })")
    page.wait(f"document.querySelectorAll('figure table').length === {len(names)}")
    page.unfold()
    page.click("#log-y")
    assert page.get(
        "charts.get('m/loss').plot.data.filter(one => one.name && one.name.endsWith('huge')).map(one => one.y[1])"
    ) == [-1e300]
    assert page.get("document.querySelectorAll('img').length") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", UNUSUAL)
def test_each_unusual_run_is_shown_alone(name: str, page: Page, tmp_path: Path) -> None:
    folder = record(tmp_path, UNUSUAL[name], strategy=name)
    reported(folder)
    page.open(folder.parent / "page.html")
    page.run("state.shown = [...metrics.keys()]; draw()")
    assert page.get("charts.size") == page.get("metrics.size")


@pytest.mark.slow
def test_two_thousand_metrics_load_and_can_be_searched(page: Page, tmp_path: Path) -> None:
    """The page opens in less than ten seconds."""
    folder = record(tmp_path, [(at, {f"m/{name}": at * name for name in range(2000)}) for at in range(50)])
    reported(folder)
    began = time.monotonic()
    page.open(folder.parent / "page.html")
    assert time.monotonic() - began < 10
    page.unfold()
    page.set("#find", "m/1777")
    assert page.get("boxes.filter(one => !one.line.hidden).map(one => one.name)") == ["m/1777"]
    page.run("boxes.find(one => !one.line.hidden).input.click()")
    assert page.get("charts.get('m/1777').plot.data[0].y[2]") == 3554
