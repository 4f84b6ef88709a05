"""The report in a real browser: drawing, hovering, saving, sorting, copying, the dark, phones and paper."""

from __future__ import annotations

import io
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from gradmerge.report import theme
from gradmerge.report.figures import Series, bars, curves, heat_map, trade_off
from gradmerge.report.page import Figure, Page, Section, Table, write_report
from gradmerge.text import Measured

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page as Tab

NASTY = "<script>window.bad = 1</script><img src=x onerror='window.bad = 1'>"
LONG = "/a/very/long/path/that/has/no/place/to/break/checkpoint-with-a-name-of-its-own"
METHODS = ("gradient-matching", "ties", "task-arithmetic")


def figures() -> list[Figure]:
    places = [i / 10 for i in range(11)]
    lines = [
        Series(name, places, [Measured((x - 0.1 * m) ** 2, 0.02) for x in places], [f"seed {m}"] * 11)
        for m, name in enumerate(METHODS)
    ]
    tasks = ["imdb", "yelp", NASTY, "a-task-with-a-name-that-is-far-too-long-to-be-shown"]
    values = {"ours": [0.1, 0.2, None, 0.4], "ties": [Measured(0.3, 0.05), -0.1, 0.2, 0.1]}
    charts = {
        "Sweep": curves(lines, "λ", "loss (nats)", marks=[("base", 0.5)], stars=[("ties", 0.1, 0.0)]),
        "Loss": bars(tasks, values, "loss (nats)"),
        "Layers": heat_map([f"layer.{i}" for i in range(14)], tasks, [[1.0, 2.0, None, 0.1]] * 14, "v (nats)"),
        "Tall": heat_map([f"layer.{i}" for i in range(60)], tasks, [[1.0, 2.0, None, 0.1]] * 60, "v"),
        "Front": trade_off(
            lines,
            "loss (nats)",
            "accuracy (%), a long name of an axis that has to be broken into lines",
            front=[(0.0, 0.1), (0.5, 0.3)],
            present=(0.5, 0.25),
        ),
        "Nothing": curves([], "x", "y"),
    }
    return [Figure(title, title.lower(), chart) for title, chart in charts.items()]


def rich_page() -> Page:
    rows = [["b", 9.5, LONG, None], ["a", 10.25, NASTY, 5], ["c10", -1e-7, "z", 3], ["c9", None, LONG, 1200]]
    table = Table("Best", "best", ["method", "loss (nats)", "checkpoint", "seconds"], rows, "A note.")
    wide = Table("Wide", "wide", [f"column {i}" for i in range(16)], [["task-arithmetic", *[0.1234] * 15]] * 3)
    drawn = figures()
    sections = [Section("Sweep", "Text.", drawn[:2], [table]), Section(NASTY, LONG, drawn[2:], [wide])]
    recipe = "method: task-arithmetic\n" + f"# {LONG * 3}\n"
    return Page(f"A report {LONG}", NASTY, ["First.", "Second."], sections, recipe, {"path": LONG * 3}, [f"run {LONG}"])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report that was mailed alone."""
    written = write_report(tmp_path_factory.mktemp("report"), rich_page())[0]
    return written.rename(tmp_path_factory.mktemp("mail") / "report.html")


def open_in(tab: Tab, path: Path, width: int = 1200, height: int = 900) -> None:
    tab.set_viewport_size({"width": width, "height": height})
    tab.emulate_media(reduced_motion="reduce")
    tab.goto(path.as_uri())


def wait_until(tab: Tab, condition: str) -> None:
    """Wait for a condition in the page. Playwright's own way evaluates text in the page, which its policy forbids."""
    deadline = time.monotonic() + 30
    while not tab.evaluate(condition):
        assert time.monotonic() < deadline, condition
        tab.wait_for_timeout(50)


def test_every_figure_is_drawn_and_its_numbers_can_be_opened(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    count = len(figures())
    assert tab.locator("figure.ready .drawn svg").count() == count
    assert tab.locator(".numbers[open]").count() == 0
    tab.locator(".numbers summary").first.click()
    assert tab.locator("figure").first.locator(".numbers tbody tr").count() == 33 + 2, (
        "its points, the reference and the star"
    )


def test_without_scripts_the_numbers_of_every_figure_are_there(chromium: Browser, report: Path) -> None:
    with chromium.new_context(java_script_enabled=False) as context:
        tab = context.new_page()
        open_in(tab, report)
        assert tab.locator("figure .numbers table").first.is_visible()
        assert tab.locator("figure .numbers td").first.text_content() == "gradient-matching"
        assert tab.locator("figure svg").count() == 0 and tab.locator(".files button").count() == 0


def hovered(tab: Tab, figure: int, marks: str, index: int) -> str:
    mark = tab.locator("figure").nth(figure).locator(f".drawn svg .{marks} path").nth(index)
    mark.scroll_into_view_if_needed()
    tab.wait_for_timeout(100)  # a tooltip goes when the page scrolls
    mark.hover(force=True)
    return str(tab.evaluate("document.getElementById('tip').innerText"))


def test_a_hovered_point_shows_its_values(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    words = hovered(tab, 0, "mark-symbol.role-mark", 18)
    assert words == "ties\nλ: 0.7\nloss (nats): 0.36\n± standard error: 0.02\nseed 1"
    box = tab.evaluate(
        "(b => [b.left, b.top, innerWidth - b.right, innerHeight - b.bottom])"
        "(document.getElementById('tip').getBoundingClientRect())"
    )
    assert min(box) >= 0
    tab.locator("h1").hover()
    assert tab.evaluate("document.getElementById('tip').hidden") is True


def test_bars_and_cells_show_their_values(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    assert hovered(tab, 1, "mark-rect.role-mark", 0) == "ours\nimdb\nloss (nats): 0.1"
    # The cells without a value are none.
    assert hovered(tab, 2, "mark-rect.role-mark", 3 * 3 + 1) == "layer.3\nyelp\nv (nats): 2"


def saved(tab: Tab, figure: str, kind: str) -> tuple[str, bytes]:
    button = tab.locator(f".files[data-name={figure}] button", has_text=kind)
    with tab.expect_download() as download:
        button.click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_a_figure_can_be_saved_from_a_report_that_lies_alone(tab: Tab, report: Path) -> None:
    assert len(list(report.parent.iterdir())) == 1
    open_in(tab, report)
    tab.emulate_media(color_scheme="dark")
    name, drawn = saved(tab, "sweep", "SVG")
    root = ET.fromstring(drawn)
    words = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert name == "sweep.svg" and {"Sweep", "λ", "loss (nats)", *METHODS} <= set(words)
    assert theme.colors_of(METHODS)[METHODS.index("ties")].encode() in drawn and b"var(" not in drawn, (
        "on paper, also from the dark"
    )
    name, drawn = saved(tab, "layers", "PNG")
    image = Image.open(io.BytesIO(drawn))
    assert name == "layers.png" and image.width >= 1500 and image.getpixel((2, 2))[:3] == (255, 255, 255)
    name, numbers = saved(tab, "loss", "CSV")
    assert name == "loss.csv" and numbers.decode() == figures()[1].csv().replace("0.0\n", "0\n")


def test_one_method_has_its_color_in_the_light_and_in_the_dark(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    place = "[...document.querySelectorAll('figure')[0].querySelectorAll('.mark-symbol.role-mark path')][18]"
    for scheme, colors in (("light", theme.LIGHT), ("dark", theme.DARK)):
        tab.emulate_media(color_scheme=scheme)
        name = next(
            key for key, value in theme.LIGHT.items() if value == theme.colors_of(METHODS)[METHODS.index("ties")]
        )
        rgb = ", ".join(str(part) for part in bytes.fromhex(colors[name][1:]))
        assert tab.evaluate(f"getComputedStyle({place}).fill") == f"rgb({rgb})"


def column(tab: Tab, index: int) -> list[str]:
    rows = "[...document.querySelector('.table').querySelectorAll('tbody tr')]"
    return list(tab.evaluate(f"{rows}.map(row => row.cells[{index}].textContent)"))


def test_a_clicked_header_sorts_numbers_as_numbers(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    button = tab.locator(".table th button").nth(1)
    button.click()
    assert column(tab, 1) == ["−1e−07", "9.5", "10.25", "–"]
    assert tab.evaluate("document.querySelectorAll('.table th')[1].ariaSort") == "ascending"
    button.click()
    assert column(tab, 1) == ["10.25", "9.5", "−1e−07", "–"]
    assert tab.evaluate("document.querySelectorAll('.table th')[1].ariaSort") == "descending"


def test_the_recipe_can_be_copied(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    tab.evaluate(
        "navigator.clipboard.writeText = () => Promise.reject(new Error('no'));"
        "document.addEventListener('copy', () => window.copied = document.activeElement.value)"
    )
    tab.evaluate("document.querySelector('details.recipe').open = true")
    button = tab.locator("details.recipe button").first
    button.click()
    wait_until(tab, "document.querySelector('details.recipe button').textContent != 'Copy'")
    assert button.text_content() == "Copied"
    assert str(tab.evaluate("copied")).startswith("method: task-arithmetic\n#")


def test_no_name_runs_as_a_script(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    assert tab.evaluate("window.bad") is None
    run = "[...document.scripts].filter(s => !s.type).length"
    assert tab.evaluate(f"[{run}, document.images.length]") == [3, 0]
    assert NASTY in str(tab.locator("body").text_content())


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_no_width_needs_sideways_scrolling(tab: Tab, report: Path, width: int) -> None:
    open_in(tab, report, width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_the_dark_is_dark_and_paper_is_light(tab: Tab, report: Path) -> None:
    ground = "getComputedStyle(document.querySelector('figure')).backgroundColor"
    open_in(tab, report)
    tab.emulate_media(color_scheme="light")
    light, white = tab.screenshot(), tab.evaluate(ground)
    tab.emulate_media(color_scheme="dark")
    dark, black = tab.screenshot(), tab.evaluate(ground)
    assert light != dark and white == "rgb(255, 255, 255)" and black != white
    tab.emulate_media(color_scheme="dark", media="print")
    assert tab.evaluate(ground) == white
    assert tab.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert tab.evaluate("getComputedStyle(document.querySelector('.numbers')).display") == "none"
    assert tab.pdf().startswith(b"%PDF")


def test_a_figure_is_drawn_anew_for_another_width(tab: Tab, report: Path) -> None:
    open_in(tab, report, 1200)
    width = "document.querySelector('figure svg').getBoundingClientRect().width"
    before = tab.evaluate(width)
    tab.set_viewport_size({"width": 390, "height": 800})
    wait_until(tab, f"{width} < {before} / 2")
    letters = "parseFloat(getComputedStyle(document.querySelector('figure svg text')).fontSize)"
    wait_until(tab, f"document.querySelector('figure svg').viewBox.baseVal.width < 400 && {letters} >= 11")


def test_no_letters_leave_their_drawing(tab: Tab, report: Path) -> None:
    outside = """[...document.querySelectorAll('figure svg text')].filter(t => {
        const box = t.ownerSVGElement.getBoundingClientRect(), b = t.getBoundingClientRect();
        return b.width && Math.max(box.left - b.left, b.right - box.right, b.bottom - box.bottom, box.top - b.top) > 1;
    }).map(t => t.textContent)"""
    for width in (360, 1200):
        open_in(tab, report, width)
        assert tab.evaluate(outside) == []
