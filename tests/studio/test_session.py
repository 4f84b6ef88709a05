"""The page's handlers without a browser: the latest move wins, controls and settings say the same, text stays text."""

from __future__ import annotations

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
from gradmerge.studio import html as markup
from gradmerge.studio.controls import Panel
from gradmerge.studio.explorer import Explorer
from gradmerge.studio.server import check_port
from gradmerge.studio.session import Session, Visit

from .making import HOSTILE, tiny_recipe


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models")
    recipe = tiny_recipe(folder, "yelp", HOSTILE, count=12)
    with Explorer(recipe, {"yelp": str(folder / "yelp.jsonl"), "base": str(folder / "base.jsonl")}) as found:
        yield found


class Slow:
    """An explorer that measures until it is told to stop, or let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.history: list[Any] = []

    def measure(self, setting: str, stop: Any, advance: Any) -> str:
        advance(0.25)
        while not self.let_go.wait(0.01):
            if stop():
                raise Superseded
        return f"outcome of {setting}"


def test_a_newer_move_ends_a_long_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = Slow()
    bench, visit = Session(slow), Visit()
    monkeypatch.setattr(bench, "board", lambda visit: f"board of {visit.shown}")
    visit.note("first")
    seen = []
    for board, state in bench.measured(visit, "first"):
        seen.append((board, "25" in state or 'value="0.250"' in state))
        visit.note("second")
    assert seen[-1][0] is None and seen[0] == (None, True) and visit.shown is None
    slow.let_go.set()
    assert list(bench.measured(visit, "second"))[-1] == ("board of outcome of second", "")
    bench.close()


def test_a_closed_page_is_not_measured_for() -> None:
    slow: Any = Slow()
    bench, request = Session(slow), SimpleNamespace(session_hash="a")
    visit = bench.visit(request)
    assert bench.visit(SimpleNamespace(session_hash="b")) is not visit
    threading.Timer(0.1, bench.leave, [request]).start()
    begun = time.monotonic()
    assert all(board is None for board, _ in bench.measured(visit, "first"))
    assert visit.closed and time.monotonic() - begun < 60
    bench.close()


@pytest.fixture(scope="module")
def panel(explorer: Any) -> Panel:
    with gradio.Blocks(analytics_enabled=False):
        return Panel(explorer)


def values(panel: Panel) -> list[Any]:
    return [component.value for component in panel.inputs]


def moved(panel: Panel, updates: list[Any]) -> list[Any]:
    """The values of the inputs after updates of the outputs."""
    before = values(panel)
    return [update.get("value", old) for update, old in zip(updates, before, strict=False)]


def test_untouched_controls_are_the_recipes_own_setting(explorer: Any, panel: Panel) -> None:
    assert panel.read(values(panel)) == explorer.own


def test_every_setting_can_be_put_back_into_the_controls(explorer: Any, panel: Panel) -> None:
    settings = [
        explorer.setting("task-arithmetic", {"yelp": 0.4, HOSTILE: 1.1}),
        explorer.setting("ties", {"yelp": 0.7}, {"options.density": 0.33}),
        explorer.setting("dare", {"yelp": 0.7}, {"options.seed": 3}),
        explorer.setting("average"),
        explorer.own,
    ]
    for setting in settings:
        assert panel.read(moved(panel, panel.show(setting))) == setting, setting.name


def test_calibration_shows_every_task_before_and_after(explorer: Any) -> None:
    bench, setting = Session(explorer), explorer.setting("task-arithmetic", {"yelp": 0.4, HOSTILE: 0.5})
    *states, shown = bench.calibrated(Visit(), setting)
    assert all("gm-state" in state for state in states)
    found = explorer.calibrate(setting)
    for task in ("yelp", "base"):
        for metrics in (found.before, found.after):
            assert f"{100 * metrics[task]['accuracy']:.1f} <i>±" in shown
        assert f"{task} <small>" in shown and found.rows[task] == 6
    assert "img src=x" not in shown
    with pytest.raises(gm.GradmergeError):
        list(bench.calibrated(Visit(closed=True), setting))
    bench.close()


def test_text_from_elsewhere_is_escaped() -> None:
    nasty = "<script>alert('\"')</script>\x1b"
    reply = SimpleNamespace(text=nasty, right=False, probability=0.5)
    for made in (
        markup.message(nasty),
        markup.passage(nasty * 40),
        markup.prediction(reply),
        markup.table([nasty], [["x"]]),
        markup.card("now", nasty, None, "", ("good", nasty)),
        markup.board(
            [markup.Lane(nasty, 3, "accuracy", markup.Score("accuracy", 0.5, 0.1), None, None, None)], "", "", 1
        ),
    ):
        assert "<script" not in made and "\x1b" not in made and "&lt;script&gt;" in made


def test_a_port_in_use_is_refused() -> None:
    port = check_port(0)
    assert port and check_port(port) == port and check_port(None) is None
    with socket.create_server(("127.0.0.1", port)), pytest.raises(gm.InputError):
        check_port(port)
