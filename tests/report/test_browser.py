"""The report in a real browser: hovering, sorting, copying, the dark, phones and paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gradmerge.report.charts import BarChart, HeatMap, LineChart, ScatterChart, Series

from gradmerge.report.page import Page, Section, Table, write_report

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab

NASTY = "<script>window.bad = 1</script><img src=x onerror='window.bad = 1'>"
LONG = "/a/very/long/path/that/has/no/place/to/break/checkpoint-with-a-name-of-its-own"


def rich_page() -> Page:
    lambdas = [i / 10 for i in range(11)]
    curves = [
        Series(f"method {m}", lambdas, [(x - 0.1 * m) ** 2 for x in lambdas], [f"seed {m}" for _ in lambdas])
        for m in range(3)
    ]
    tasks = ["imdb", "yelp", NASTY, "a-task-with-a-name-that-is-far-too-long-to-be-shown"]
    line = LineChart("Sweep", "sweep", "λ", "loss (nats)", curves, [("base", 0.5)], [("method 1", 0.1, 0.0)])
    bars = BarChart(
        "Loss", "loss", "loss (nats)", tasks, {"ours": [0.1, 0.2, None, 0.4], "ties": [0.3, -0.1, 0.2, 0.1]}
    )
    heat = HeatMap(
        "Layers", "layers", [f"layer.{i}" for i in range(14)], tasks, [[1.0, 2.0, None, 0.1]] * 14, "v (nats)"
    )
    tall = HeatMap("Tall", "tall", [f"layer.{i}" for i in range(60)], tasks, [[1.0, 2.0, None, 0.1]] * 60, "v (nats)")
    cloud = ScatterChart("Front", "front", "loss (nats)", "accuracy (%)", curves, [(0.0, 0.1), (0.5, 0.3)], True)
    rows = [["b", 9.5, LONG, None], ["a", 10.25, NASTY, 5], ["c10", -1e-7, "z", 3], ["c9", None, LONG, 1200]]
    table = Table("Best", "best", ["method", "loss (nats)", "checkpoint", "seconds"], rows, "A note.")
    sections = [Section("Sweep", "Text.", [line, bars], [table]), Section(NASTY, LONG, [heat, tall, cloud])]
    recipe = "method: task-arithmetic\n" + f"# {LONG * 3}\n"
    return Page(f"A report {LONG}", NASTY, ["First.", "Second."], sections, recipe, {"path": LONG * 3}, [f"run {LONG}"])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report"), rich_page())[0]


def open_in(tab: Tab, path: Path, width: int = 1200, height: int = 900) -> None:
    tab.set_viewport_size({"width": width, "height": height})
    tab.goto(path.as_uri())


def test_a_hovered_point_shows_its_values(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    tab.locator('#s0 .wide .s[data-s="2"] .pts > *').nth(7).hover()
    assert tab.evaluate("tip.innerText") == "method 2\nλ: 0.7\nloss (nats): 0.25\nseed 2"
    assert tab.evaluate("document.querySelectorAll('.wide.picked .s.on').length") == 1
    box = tab.evaluate(
        "(b => [b.left, b.top, innerWidth - b.right, innerHeight - b.bottom])(tip.getBoundingClientRect())"
    )
    assert min(box) >= 0
    tab.locator("h1").hover()
    assert tab.evaluate("tip.hidden") is True


def test_bars_and_cells_show_their_values(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    tab.locator('.bars.wide .s[data-s="1"] .pts > *').nth(0).hover()
    assert tab.evaluate("tip.innerText") == "ties\nimdb\nloss (nats): 0.3"
    tab.locator(".cells.wide .pts").nth(3).locator("> *").nth(1).hover()
    assert tab.evaluate("tip.innerText") == "layer.3\nyelp\nv (nats): 2"
    tab.locator(".cells.both .pts").nth(50).locator("> *").nth(2).hover()
    assert tab.evaluate("tip.innerText") == f"layer.50\n{NASTY}\nv (nats): –"


def test_a_phone_shows_the_same_words(tab: Tab, report: Path) -> None:
    open_in(tab, report, 360, 740)
    assert tab.evaluate("getComputedStyle(document.querySelector('.wide')).display") == "none"
    tab.locator('#s0 .narrow .s[data-s="2"] .pts > *').nth(7).hover()
    assert tab.evaluate("tip.innerText") == "method 2\nλ: 0.7\nloss (nats): 0.25\nseed 2"


def test_points_can_be_reached_by_keyboard(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    tab.evaluate("document.querySelector('.near.wide').focus()")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("tip.innerText") == "method 0\nλ: 0.1\nloss (nats): 0.01\nseed 0"
    tab.keyboard.press("Escape")
    assert tab.evaluate("tip.hidden") is True


def column(tab: Tab, index: int) -> list[str]:
    return list(tab.evaluate(f"[...document.querySelectorAll('tbody tr')].map(r => r.cells[{index}].textContent)"))


def test_a_clicked_header_sorts_numbers_as_numbers(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    button = tab.locator("th button").nth(1)
    button.click()
    assert column(tab, 1) == ["−1e−7", "9.50", "10.25", "–"]
    assert tab.evaluate("document.querySelectorAll('th')[1].ariaSort") == "ascending"
    button.click()
    assert column(tab, 1) == ["10.25", "9.50", "−1e−7", "–"]
    assert tab.evaluate("document.querySelectorAll('th')[1].ariaSort") == "descending"


def test_a_header_sorts_by_keyboard_and_words_by_their_numbers(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    tab.evaluate("document.querySelectorAll('th button')[0].focus()")
    tab.keyboard.press("Enter")
    assert column(tab, 0) == ["a", "b", "c9", "c10"]
    assert tab.evaluate("[...document.querySelectorAll('th')].map(h => h.ariaSort)") == [
        "ascending",
        "none",
        "none",
        "none",
    ]


def test_the_recipe_can_be_copied(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    tab.evaluate(
        "navigator.clipboard.writeText = () => Promise.reject(new Error('no'));"
        "document.addEventListener('copy', () => window.copied = document.activeElement.value)"
    )
    tab.evaluate("document.querySelector('details').open = true")
    button = tab.locator("details button").first
    button.click()
    tab.wait_for_function("document.querySelector('details button').textContent != 'Copy'")
    assert button.text_content() == "Copied"
    assert str(tab.evaluate("copied")).startswith("method: task-arithmetic\n#")


def test_no_name_runs_as_a_script(tab: Tab, report: Path) -> None:
    open_in(tab, report)
    assert tab.evaluate("window.bad") is None
    assert tab.evaluate("[document.scripts.length, document.images.length]") == [1, 0]


@pytest.mark.parametrize("width", [320, 360, 390, 768, 1200])
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
    assert tab.evaluate("getComputedStyle(document.querySelector('.wide')).display") != "none"
    assert tab.pdf().startswith(b"%PDF")


def test_no_letters_leave_their_drawing(tab: Tab, report: Path) -> None:
    outside = """[...document.querySelectorAll('svg.chart text')].filter(t => {
        const box = t.ownerSVGElement.getBoundingClientRect(), b = t.getBoundingClientRect();
        return box.width && (b.left < box.left - 1 || b.right > box.right + 1 || b.bottom > box.bottom + 1);
    }).map(t => t.textContent)"""
    for width in (360, 1200):
        open_in(tab, report, width)
        assert tab.evaluate(outside) == []
