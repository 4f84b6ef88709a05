"""The page's handlers without a browser: the latest move wins, controls and settings say the same, text stays text."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gradio
import pytest

import gradmerge as gm
from gradmerge.compare.evaluate import Superseded
from gradmerge.studio import html
from gradmerge.studio.app import Panel, Workbench
from gradmerge.studio.explorer import Explorer
from gradmerge.studio.server import check_port

from .making import HOSTILE, tiny_recipe

PAGE: Any = SimpleNamespace(session_hash="a")


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    folder = tmp_path_factory.mktemp("models")
    recipe = tiny_recipe(folder, "yelp", HOSTILE, count=12)
    data = {name: str(folder / f"{name}.jsonl") for name in ("yelp", "base")}
    with contextlib.closing(Explorer(recipe, data)) as explorer, gradio.Blocks() as page:
        yield Workbench(page, explorer)


@pytest.fixture
def panel(workbench: Workbench) -> Panel:
    return workbench.panel


def values(panel: Panel) -> list[Any]:
    return [component.value for component in panel.inputs]


def slow(workbench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure until the measurement is stopped."""

    def measure(setting: Any, stop: Any, advance: Any) -> None:
        advance(0.25)
        while not stop():
            time.sleep(0.01)
        raise Superseded

    monkeypatch.setattr(workbench.explorer, "measure", measure)


def test_a_newer_move_or_a_closed_page_ends_a_long_measurement(
    workbench: Workbench, panel: Panel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "gm-board" in workbench._measure(PAGE, 1.0, *values(panel))[0]
    slow(workbench, monkeypatch)
    for end in (lambda: workbench._note_move(PAGE, 3.0), lambda: workbench._leave(PAGE)):
        timer = threading.Timer(0.1, end)
        timer.start()
        assert workbench._measure(PAGE, 2.0, *values(panel))[0] == gradio.skip()
        timer.join()


def test_a_late_result_of_an_earlier_move_is_not_shown(workbench: Workbench, panel: Panel) -> None:
    page: Any = SimpleNamespace(session_hash="b")
    assert "gm-board" in workbench._measure(page, 5.0, *values(panel))[0]
    assert workbench._measure(page, 4.0, *values(panel))[0] == gradio.skip()


def test_untouched_controls_are_the_recipes_own_setting(workbench: Workbench, panel: Panel) -> None:
    assert panel.read(*values(panel)) == workbench.explorer.own


def test_every_setting_can_be_put_back_into_the_controls(workbench: Workbench, panel: Panel) -> None:
    explorer = workbench.explorer
    weights = {"models.0.weight": 0.4, "models.1.weight": 1.1}
    settings = [
        explorer.setting("task-arithmetic", weights),
        explorer.setting("ties", weights | {"options.density": 0.33}),
        explorer.setting("dare", weights | {"options.seed": 3}),
        explorer.setting("average"),
        explorer.own,
    ]
    for setting in settings:
        shown = zip(values(panel), panel.show(setting), strict=True)
        assert panel.read(*(update.get("value", old) for old, update in shown)) == setting, setting.name


def test_calibration_shows_every_task_before_and_after(workbench: Workbench, panel: Panel) -> None:
    setting = workbench.explorer.setting("task-arithmetic", {"models.0.weight": 0.4})
    moved = [update.get("value") for update in panel.show(setting)]
    shown = workbench._calibrate(PAGE, *moved)
    _, tasks = workbench.explorer.calibrate(setting)
    for task, one in tasks.items():
        for value in (one.before, one.after):
            assert html.with_error("accuracy", value) in shown
        assert f"{task} <small>" in shown and one.rows == 6
    workbench.close()
    with pytest.raises(gradio.Error):
        workbench._calibrate(SimpleNamespace(session_hash="new"), *moved)  # type: ignore[arg-type]


def test_text_from_elsewhere_is_escaped() -> None:
    hostile = "<script>alert('\"')</script>\x1b"
    reply = SimpleNamespace(text=hostile, right=False, probability=0.5)
    for made in (
        html.passage(hostile * 40),
        html.prediction(reply),
        html.table([hostile], [["x"]]),
        html.card("now", hostile, "accuracy", None, "", html.chip("good", hostile)),
        html.board([html.Lane(hostile, 3, "accuracy", {"now": 0.5})], "", ""),
    ):
        assert "<script" not in made and "\x1b" not in made and "&lt;script&gt;" in made


def test_a_port_in_use_is_refused() -> None:
    port = check_port(0)
    assert port and check_port(port) == port and check_port(None) is None
    with socket.create_server(("127.0.0.1", port)), pytest.raises(gm.InputError):
        check_port(port)
