"""The page in a real browser: moves, saving, hostile names, errors, phones, two tabs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import gradmerge as gm

from ..report.conftest import new_tab
from .making import HOSTILE, LABELS, predicted

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page


@pytest.fixture(scope="module")
def opened_page(chromium: Browser, address: str) -> Iterator[Page]:
    """The page, opened once. A request to another host, and anything that a name runs, fails the tests."""
    asked: list[str] = []
    with new_tab(chromium) as tab:
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("dialog", lambda dialog: pytest.fail(f"a name ran: {dialog.message}"))
        opened(tab, address)
        yield tab
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


@pytest.fixture
def page(opened_page: Page) -> Page:
    """The page with the recipe's own setting, measured, and its first tab."""
    opened_page.get_by_role("tab", name="Answers", exact=True).click()
    with measured(opened_page):
        opened_page.get_by_role("button", name="Recipe’s own").click()
    return opened_page


def opened(tab: Page, address: str, width: int = 1280) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto(address)
    tab.wait_for_selector(".gm-board[data-move]")


def lane(page: Page, task: str) -> Locator:
    return page.locator(".gm-lane").filter(has=page.locator(".gm-task b", has_text=task))


@contextmanager
def measured(page: Page) -> Iterator[None]:
    """Wait until what was done is measured and shown."""
    before = page.locator(".gm-board").get_attribute("data-move")
    yield
    page.wait_for_function(f"document.querySelector('.gm-board:not(.stale)')?.dataset.move > {before}")


def move(page: Page, model: str, value: float) -> None:
    with measured(page):
        page.get_by_label(f"number input for {model}", exact=True).fill(str(value))


def toast(page: Page) -> str:
    """The message that the page shows, which is then closed."""
    text = page.get_by_test_id("toast-body").first.inner_text()
    page.get_by_test_id("toast-close").first.click()
    page.wait_for_function("!document.querySelector('[data-testid=toast-body]')")
    return text


def share(texts: list[str], labels: list[int], model: Path) -> str:
    right = sum(a == b for a, b in zip(predicted(model, texts), labels, strict=True))
    return f"{100 * right / len(texts):.1f}"


def test_a_moved_slider_is_measured_and_what_is_saved_answers_as_the_page_says(page: Page, folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "yelp.jsonl").read_text().splitlines()]
    texts, labels = [row["text"] for row in rows], [row["label"] for row in rows]
    value = lane(page, "yelp").locator(".gm-value")
    assert (value.text_content() or "").startswith(f"{share(texts, labels, folder / 'base')} ±")
    move(page, "yelp", 1)
    assert (value.text_content() or "").startswith("100.0 ±")  # the model itself, which labelled these rows
    move(page, "yelp", 0.6)
    move(page, HOSTILE, 0.3)
    page.get_by_label("New folder for the merge").fill("merged here")
    page.get_by_role("button", name="Save merge").click()
    assert f"Saved task-arithmetic 0.6, 0.3 in {folder / 'merged here'}" in toast(page)
    assert (value.text_content() or "").startswith(f"{share(texts, labels, folder / 'merged here')} ±")
    record = json.loads((folder / "merged here" / "gradmerge.json").read_text())
    assert [model["weight"] for model in record["recipe"]["models"]] == [0.6, 0.3]


def test_a_number_is_typed_letter_by_letter(page: Page) -> None:
    box = page.get_by_label("number input for yelp", exact=True)
    for typed, taken in (("", "0"), ("9", "1.5"), ("0.7", "0.7")):
        box.click()
        page.keyboard.press("ControlOrMeta+A")
        page.keyboard.press("Backspace")
        box.press_sequentially(typed, delay=30)
        page.get_by_role("heading", name="gradmerge studio").click()
        page.wait_for_function(f"document.querySelector('.gm-weight input[type=number]').value === '{taken}'")
    page.wait_for_function("document.querySelector('.gm-board:not(.stale)')")
    assert page.get_by_test_id("toast-body").count() == 0


def test_of_many_quick_moves_the_last_is_shown(page: Page) -> None:
    number = page.get_by_label("number input for yelp", exact=True)
    for weight in (0.1, 0.3, 0.5, 0.7, 0.9, 1):
        number.fill(str(weight))
    value = lane(page, "yelp").locator(".gm-value")
    page.wait_for_function("document.querySelector('.gm-board:not(.stale) .gm-value')?.textContent.startsWith('100.0')")
    assert (value.text_content() or "").startswith("100.0 ±")


def test_what_was_tried_can_be_shown_again(page: Page) -> None:
    number = page.get_by_label("number input for yelp", exact=True)
    move(page, "yelp", 0.45)
    with measured(page):
        page.get_by_role("button", name="Recipe’s own").click()
    page.get_by_role("tab", name="Tried", exact=True).click()
    with measured(page):
        page.get_by_role("gridcell", name="task-arithmetic 0.45, 0", exact=True).click()
    assert number.input_value() == "0.45"


def test_a_sweep_draws_a_point_for_each_weight(page: Page) -> None:
    page.get_by_role("tab", name="Trade-offs", exact=True).click()
    points = page.locator(".gm-plot .mark-symbol.role-mark path")
    points.first.wait_for()
    few = points.count()
    with measured(page):
        page.get_by_role("button", name="Sweep one weight for all").click()
    page.wait_for_function(f"document.querySelectorAll('.gm-plot .mark-symbol.role-mark path').length >= {few + 8}")
    points.last.hover(force=True)
    page.wait_for_function("document.querySelector('#vg-tooltip-element.visible')?.innerText.includes('now')")


def test_a_merge_is_calibrated_and_shown_before_and_after(page: Page) -> None:
    move(page, "yelp", 0.6)
    page.get_by_role("tab", name="Calibrate", exact=True).click()
    page.get_by_role("button", name="Calibrate", exact=True).click()
    row = page.locator(".gm-table:visible tbody tr")
    row.first.wait_for()
    assert row.count() == 2 and all("±" in (text or "") for text in row.all_text_contents())
    assert page.get_by_text("task-arithmetic 0.6, 0", exact=True).first.is_visible()


def test_names_labels_and_texts_are_shown_and_never_run(page: Page) -> None:
    assert page.get_by_text(HOSTILE, exact=True).count() > 0
    page.wait_for_selector(".gm-answers td")
    said = page.locator(".gm-answers").first.text_content() or ""
    assert any(label in said for label in LABELS.values()) and "<script>alert(1)</script>" in said
    move(page, HOSTILE, 0.4)
    for name in ("What flipped", "Tried", "Recipe"):
        page.get_by_role("tab", name=name, exact=True).click()
        page.wait_for_timeout(300)
    assert (
        page.evaluate(
            "document.querySelectorAll('img[src=\"x\"], .gm-answers script, .gm-answers b[onmouseover]').length"
        )
        == 0
    )


def test_errors_are_shown_and_the_page_goes_on(page: Page, folder: Path) -> None:
    for name, message in (("base", "exists already"), ("", "Name a new folder")):
        page.get_by_label("New folder for the merge").fill(name)
        page.get_by_role("button", name="Save merge").click()
        assert message in toast(page)
    move(page, "yelp", 0.25)
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []


def test_another_method_brings_its_options_and_the_recipe_follows(page: Page, tmp_path: Path) -> None:
    with measured(page):
        page.get_by_label("Method").click()
        page.get_by_role("option", name="ties", exact=True).click()
    move(page, "density", 0.3)
    move(page, "yelp", 0.5)
    page.get_by_role("tab", name="Recipe", exact=True).click()
    (tmp_path / "recipe.yml").write_text(page.locator(".gm-recipe .cm-content").inner_text())
    recipe = gm.load_recipe(tmp_path / "recipe.yml")
    assert (recipe.method, recipe.weights[0], recipe.options["density"]) == ("ties", 0.5, 0.3)


def test_two_tabs_have_sliders_of_their_own(page: Page, address: str, chromium: Browser) -> None:
    with chromium.new_context() as context:
        other = context.new_page()
        opened(other, address)
        move(page, "yelp", 0.9)
        assert other.get_by_label("number input for yelp", exact=True).input_value() == "0"
        move(other, "yelp", 0.1)
        assert page.get_by_label("number input for yelp", exact=True).input_value() == "0.9"
        move(page, "yelp", 0.8)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(tab: Page, address: str, scheme: str) -> None:
    page = tab
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    opened(page, address, 390)
    page.wait_for_selector(".gm-answers td")
    for name in ("What flipped", "Trade-offs", "Calibrate", "Tried"):
        if page.get_by_role("tab", name=name, exact=True).is_visible():
            page.get_by_role("tab", name=name, exact=True).click()
            page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_other_pages_are_refused(address: str) -> None:
    for headers in ({"Origin": "https://elsewhere.example"}, {"Host": "elsewhere.example"}, {"Origin": "null"}):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(address, headers=headers))
    assert urllib.request.urlopen(address).status == 200
