"""The page: its layout, and the handlers of its events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import gradio as gr

from ..errors import GradmergeError
from ..text import counted
from . import html
from .controls import Panel
from .session import Session, error_text
from .theme import CHOSEN_ROW, COPY, DIM_BOARD

#: Events are not listed as an API, and Gradio does not show its progress bar.
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
_PARALLEL: dict[str, Any] = {**_QUIET, "concurrency_limit": None}
#: While one event runs, the page keeps only the latest of the next ones.
_LATEST: dict[str, Any] = {**_PARALLEL, "trigger_mode": "always_last"}
_FAST: dict[str, Any] = {**_QUIET, "queue": False}

CALIBRATION = (
    "Calibration brings this merge closer to its fine-tuned models. It reads the inputs of every other row, without "
    "labels. Before and after are measured on the other half of the rows. For speed, it runs without output factors "
    "(<code>--curvature none</code>). <code>gradmerge calibrate</code> calibrates a saved merge."
)


def build(sessions: Mapping[str, Session]) -> gr.Blocks:
    """The page, with a tab for each session."""
    page: gr.Blocks
    with gr.Blocks(title="gradmerge studio", analytics_enabled=False, fill_width=True) as page:
        if len(sessions) == 1:
            for title, session in sessions.items():
                _html("gm-header", header(title, session))
                _Workbench(page, session)
        else:
            _html("gm-header", header("", None))
            with gr.Tabs(elem_classes="gm-jobs"):
                for title, session in sessions.items():
                    with gr.Tab(title):
                        _Workbench(page, session)
        page.load(_keep_stream_open, None, None, **_PARALLEL)
    return page


async def _keep_stream_open() -> AsyncIterator[None]:
    """An event that never ends.

    Gradio closes the stream of results after the last event, and an event at that moment gets no result until the next.
    """
    while True:
        yield
        await asyncio.sleep(3600)


def header(title: str, session: Session | None) -> str:
    facts = ""
    if session is not None:
        models, tasks = counted(session.explorer.models, "model"), counted(session.explorer.tasks, "task")
        facts = f"<span>{html.esc(title)} · {models} · {tasks}</span>"
    return f"<header><h1><b>gradmerge</b> studio</h1>{facts}</header>"


def _html(classes: str = "", value: str = "") -> gr.HTML:
    return gr.HTML(value, elem_classes=["gm-html", *classes.split()])


def _task_choice(tasks: Sequence[str]) -> gr.Radio:
    return gr.Radio(tasks, value=tasks[0], show_label=False, container=False, elem_classes="gm-pick")


class _Workbench:
    """The components and events of one session."""

    def __init__(self, page: gr.Blocks, session: Session) -> None:
        self._session = session
        explorer = session.explorer
        self._removes = bool(explorer.removes)
        with gr.Row(elem_classes="gm-desk"):
            with gr.Column(scale=0, min_width=320, elem_classes="gm-side"):
                self.panel = Panel(explorer)
                with gr.Row(elem_classes="gm-buttons"):
                    self.own = gr.Button("Recipe’s own", size="sm")
                    self.best = gr.Button("Best so far", size="sm", visible=not self._removes)
                self._add_outputs()
            with gr.Column(scale=1, min_width=320, elem_classes="gm-main"):
                self.error = _html("gm-errors")
                self.board = _html("gm-board-box", html.state("measuring"))
                self.state = _html("gm-state-box")
                self._add_tabs()
                self.notes = _html("gm-notes-box", html.notes(explorer.notes))
        self.version = gr.State(0)
        self._connect(page)

    def _add_outputs(self) -> None:
        with gr.Column(elem_classes="gm-keep"):
            self.copy = gr.Button("Copy recipe", size="sm", elem_classes="gm-copy")
            with gr.Row(elem_classes="gm-pair"):
                self.folder = gr.Textbox("studio-merged", label="New folder for the merge", max_lines=1)
                self.save = gr.Button("Save merge", size="sm", variant="primary")
            with gr.Row(elem_classes="gm-pair"):
                self.report_folder = gr.Textbox("studio-report", label="New folder for a report", max_lines=1)
                self.report = gr.Button("Write report", size="sm")
            self.written = _html("gm-kept")

    def _add_tabs(self) -> None:
        explorer, removes = self._session.explorer, self._removes
        self.active = gr.State("answers")
        self.tabs: dict[str, gr.Tab] = {}
        with gr.Tabs(elem_classes="gm-views"):
            with gr.Tab("Answers") as self.tabs["answers"]:
                self.task = _task_choice(explorer.tasks)
                self.answers = _html()
            with gr.Tab("What flipped") as self.tabs["flips"]:
                with gr.Row(elem_classes="gm-picks"):
                    self.flip_task = _task_choice(explorer.tasks)
                    others = [("against the base", "base"), ("its fine-tuned model", "tuned")]
                    look: dict[str, Any] = {"show_label": False, "container": False, "min_width": 200, "scale": 0}
                    self.against = gr.Dropdown(others, value="base", **look)
                self.flips = _html()
            with gr.Tab("Forgetting" if removes else "Trade-offs") as self.tabs["trade-offs"]:
                self.trade_offs = _html()
                with gr.Row(elem_classes="gm-buttons"):
                    self.curve = gr.Button("Measure the curve" if removes else "Sweep one weight for all", size="sm")
                    self.every = gr.Button("Try every method", size="sm")
            self.calibrate: gr.Button | None = None
            if not removes and set(explorer.tasks) & set(explorer.models):
                with gr.Tab("Calibrate") as self.tabs["calibrate"]:
                    _html("", f'<p class="gm-told">{CALIBRATION}</p>')
                    with gr.Row(elem_classes="gm-buttons"):
                        self.calibrate = gr.Button("Calibrate", size="sm")
                    self.calibrated = _html()
            with gr.Tab("Tried") as self.tabs["tried"]:
                self.tried = _html()
                self.chosen = gr.Button("", elem_classes="gm-taken")
                self.chosen_row = gr.Textbox(visible=False)
            with gr.Tab("Recipe") as self.tabs["recipe"]:
                self.recipe = gr.Code(language="yaml", show_label=False, interactive=False, elem_classes="gm-recipe")

    def _connect(self, page: gr.Blocks) -> None:
        panel, inputs, explorer = self.panel, self.panel.inputs, self._session.explorer
        # These first change the controls; then the new values are measured.
        changes = [
            panel.method.input(panel.change_method, panel.weight_inputs, panel.outputs, **_FAST),
            self.own.click(lambda: panel.show(explorer.own), None, panel.outputs, **_FAST),
            self.best.click(self._show_best, None, panel.outputs, **_FAST),
            self.chosen.click(self._show_tried, self.chosen_row, panel.outputs, js=CHOSEN_ROW, **_FAST),
        ]
        boxes = [(option.checkbox, option.slider) for option in panel.options if option.checkbox is not None]
        for box, slider in boxes:
            changes.append(box.input(lambda on: gr.update(visible=not on), box, slider, **_FAST))
        measure: dict[str, Any] = {
            "fn": self._measure,
            "inputs": [self.version, *inputs],
            "outputs": [self.board, self.state, self.error, self.version, self.recipe, self.notes],
        }
        for event in changes:
            event.then(None, None, None, js=DIM_BOARD, **_QUIET)
            event.then(self._note, inputs, None, **_FAST)
            event.then(**measure, **_PARALLEL)
        moving = [c for c in inputs if c not in (panel.method, *(box for box, _ in boxes))]
        moved = [component.input for component in moving]
        # Dimming is a separate event, so that a late result of one move does not dim the board of another.
        gr.on(moved, None, None, None, js=DIM_BOARD, **_QUIET, trigger_mode="multiple")
        # So is the note, because the measurements of one event run one after the other.
        gr.on([c.change for c in moving], self._note, inputs, None, **_FAST, trigger_mode="always_last")
        gr.on(moved, **measure, **_LATEST)
        page.load(**measure, **_LATEST)
        views = [self.answers, self.flips, self.trade_offs, self.tried, self.error]
        choices = [self.active, self.task, self.flip_task, self.against]
        self.version.change(self._show_tab, choices, views, **_LATEST)
        for name, tab in self.tabs.items():
            selected = tab.select(functools.partial(str, name), None, self.active, **_FAST)
            selected.then(self._show_tab, choices, views, **_PARALLEL)
        for component in (self.task, self.flip_task, self.against):
            component.input(self._show_tab, choices, views, **_LATEST)
        shown = [self.state, self.trade_offs, self.board, self.error]
        self.curve.click(self._sweep, inputs, shown, **_PARALLEL)
        self.every.click(self._try_methods, inputs, shown, **_PARALLEL)
        if self.calibrate is not None:
            self.calibrate.click(self._calibrate, inputs, self.calibrated, **_PARALLEL)
        self.copy.click(None, self.recipe, None, js=COPY, **_QUIET)
        self.save.click(self._save, [self.folder, *inputs], self.written, **_PARALLEL)
        self.report.click(self._report, self.report_folder, self.written, **_PARALLEL)
        page.unload(self._session.leave)

    def _show_best(self) -> list[Any]:
        best = self._session.explorer.best()
        return self.panel.show(best.setting if best is not None else self._session.explorer.own)

    def _show_tried(self, row: str) -> list[Any]:
        """The setting of a row that was clicked."""
        return self.panel.show(self._session.explorer.history[int(row)].setting)

    def _note(self, request: gr.Request, *values: Any) -> None:
        """Note a move, so that the measurement of an earlier one may end."""
        with contextlib.suppress(GradmergeError):  # the measurement shows it
            self._session.visit(request).note(self.panel.read(values))

    def _measure(self, request: gr.Request, version: int, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Show the recipe, then the progress of the measurement, then the board."""
        session, explorer = self._session, self._session.explorer
        visit, same = session.visit(request), gr.skip()
        try:
            setting = self.panel.read(values)
            yield same, same, "", same, explorer.recipe_text(setting), same
            for board, state in session.measured(visit, setting):
                if board is not None:
                    yield board, "", "", version + 1, same, html.notes(explorer.notes)
                elif visit.shown is None:  # there is no board yet
                    yield state, same, same, same, same, same
                else:
                    yield same, state, same, same, same, same
        except Exception as error:
            yield same if visit.shown else "", "", html.message(error_text(error)), same, same, same

    def _show_tab(self, request: gr.Request, active: str, task: str, flip_task: str, against: str) -> list[Any]:
        """Update the open tab for the merge on the board."""
        session, visit = self._session, self._session.visit(request)
        views: dict[str, Callable[[], str]] = {
            "answers": lambda: session.answers(visit, task),
            "flips": lambda: session.flips(visit, flip_task, against),
            "trade-offs": lambda: session.trade_offs(visit),
            "tried": session.tried,
        }
        if active not in views or visit.shown is None:
            return [gr.skip()] * (len(views) + 1)
        try:
            return [views[name]() if name == active else gr.skip() for name in views] + [gr.skip()]
        except Exception as error:
            return [gr.skip()] * len(views) + [html.message(error_text(error))]

    def _sweep(self, request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._measure_all(request, lambda: self._session.sweep(self.panel.read(values)))

    def _try_methods(self, request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        explorer = self._session.explorer
        yield from self._measure_all(request, lambda: list(map(explorer.setting, explorer.choices.methods)))

    def _measure_all(self, request: gr.Request, settings: Callable[[], Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
        visit, same = self._session.visit(request), gr.skip()
        try:
            for state, figure in self._session.swept(visit, settings()):
                yield state, figure or same, same, same
            visit.moves += 1
            yield "", same, self._session.board(visit), same
        except Exception as error:
            yield "", same, same, html.message(error_text(error))

    def _calibrate(self, request: gr.Request, *values: Any) -> Iterator[str]:
        visit = self._session.visit(request)
        yield from self._with_errors(lambda: self._session.calibrated(visit, self.panel.read(values)))

    def _save(self, folder: str, *values: Any) -> Iterator[str]:
        yield from self._with_errors(lambda: self._session.saved(self.panel.read(values), folder))

    def _report(self, folder: str) -> Iterator[str]:
        yield from self._with_errors(lambda: self._session.reported(folder))

    def _with_errors(self, do: Callable[[], Iterator[str]]) -> Iterator[str]:
        try:
            yield from do()
        except Exception as error:
            yield html.message(error_text(error))
