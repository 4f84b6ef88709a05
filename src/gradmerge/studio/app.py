"""The page: how it is laid out, and which event calls which handler."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import gradio as gr

from ..errors import GradmergeError
from ..text import counted
from . import html as markup
from .controls import Panel
from .session import Workbench, explained
from .theme import COPY, DIM_BOARD, TAKEN

#: Events are the page's own: nothing is listed as an interface, nothing is drawn over what they change.
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
#: While one is under way the page remembers the latest of those that follow.
_MOVES: dict[str, Any] = {**_QUIET, "trigger_mode": "always_last", "concurrency_limit": None}

CALIBRATION = (
    "Calibration brings this merge closer to its fine-tuned models. It reads the inputs of every other row, without "
    "labels. Before and after are measured on the other half of the rows. For speed, it runs without output factors "
    "(<code>--curvature none</code>). <code>gradmerge calibrate</code> calibrates a saved merge."
)


def build(benches: Mapping[str, Workbench], read_only: bool) -> gr.Blocks:
    """The page of one or several workbenches, each by its title."""
    page: gr.Blocks
    with gr.Blocks(title="gradmerge studio", analytics_enabled=False, fill_width=True) as page:
        if len(benches) == 1:
            for title, bench in benches.items():
                _html("gm-header", header(title, bench))
                _Desk(page, bench, read_only)
        else:
            _html("gm-header", header("", None))
            with gr.Tabs(elem_classes="gm-jobs"):
                for title, bench in benches.items():
                    with gr.Tab(title):
                        _Desk(page, bench, read_only)
        page.load(_held, None, None, concurrency_limit=None, **_QUIET)
    return page


async def _held() -> AsyncIterator[None]:
    """An event that never ends. Gradio closes the stream of answers after the last, and an event that comes in that
    moment is answered only once another one opens the stream again."""
    while True:
        yield
        await asyncio.sleep(3600)


def header(title: str, bench: Workbench | None) -> str:
    facts = ""
    if bench is not None:
        explorer = bench.explorer
        models, tasks = counted(explorer.models, "model"), counted(explorer.tasks, "task")
        facts = f"<span>{markup.esc(title)} · {models} · {tasks}</span>"
    return f"<header><h1><b>gradmerge</b> studio</h1>{facts}</header>"


def _html(kind: str = "", value: str = "") -> gr.HTML:
    return gr.HTML(value, elem_classes=["gm-html", *kind.split()])


class _Desk:
    """The components of one workbench, and their events."""

    def __init__(self, page: gr.Blocks, bench: Workbench, read_only: bool) -> None:
        self._bench = bench
        explorer = bench.explorer
        removes = bool(explorer.removes)
        with gr.Row(elem_classes="gm-desk"):
            with gr.Column(scale=0, min_width=320, elem_classes="gm-side"):
                self.panel = Panel(explorer)
                with gr.Row(elem_classes="gm-buttons"):
                    self.own = gr.Button("Recipe’s own", size="sm")
                    self.best = gr.Button("Best so far", size="sm", visible=not removes)
                self._keeping(read_only)
            with gr.Column(scale=1, min_width=320, elem_classes="gm-main"):
                self.error = _html("gm-errors")
                self.board = _html("gm-board-box", markup.state("measuring"))
                self.predicted = _html("gm-predicted-box")
                self.state = _html("gm-state-box")
                self._views(removes)
                self.notes = _html("gm-notes-box", markup.notes(explorer.notes))
        self.version = gr.State(0)
        self._wire(page)

    def _keeping(self, read_only: bool) -> None:
        self._read_only = read_only
        with gr.Column(elem_classes="gm-keep"):
            self.copy = gr.Button("Copy recipe", size="sm", elem_classes="gm-copy")
            if not read_only:
                with gr.Row(elem_classes="gm-pair"):
                    self.folder = gr.Textbox("studio-merged", label="New folder for the merge", max_lines=1)
                    self.save = gr.Button("Save merge", size="sm", variant="primary")
                with gr.Row(elem_classes="gm-pair"):
                    self.report_folder = gr.Textbox("studio-report", label="New folder for a report", max_lines=1)
                    self.report = gr.Button("Write report", size="sm")
            self.kept = _html("gm-kept")

    def _views(self, removes: bool) -> None:
        explorer = self._bench.explorer
        chart = "trade-off" if removes else "front"
        self.active = gr.State("answers")
        with gr.Tabs(elem_classes="gm-views"):
            self.tabs: dict[str, gr.Tab] = {}
            with gr.Tab("Answers") as self.tabs["answers"]:
                self.task = gr.Radio(
                    explorer.tasks, value=explorer.tasks[0], show_label=False, container=False, elem_classes="gm-pick"
                )
                self.answers = _html()
            with gr.Tab("What flipped") as self.tabs["flips"]:
                with gr.Row(elem_classes="gm-picks"):
                    self.flip_task = gr.Radio(
                        explorer.tasks,
                        value=explorer.tasks[0],
                        show_label=False,
                        container=False,
                        elem_classes="gm-pick",
                    )
                    against = [("against the base", "base"), ("its tuned model", "tuned"), ("the recipe", "own")]
                    against += [] if removes else [("the best so far", "best")]
                    self.against = gr.Dropdown(
                        against, value="base", show_label=False, container=False, min_width=200, scale=0
                    )
                self.flips = _html()
            with gr.Tab("Forgetting" if removes else "Trade-offs") as self.tabs["front"]:
                self.front = _html()
                self._chart = chart
                with gr.Row(elem_classes="gm-buttons"):
                    curve = "Measure the curve" if removes else "Sweep one weight for all"
                    self.curve, self.every = gr.Button(curve, size="sm"), gr.Button("Try every method", size="sm")
            with gr.Tab("Layers") as self.tabs["layers"]:
                self.layers = _html()
            self.calibrate: gr.Button | None = None
            if not removes and set(explorer.tasks) & set(explorer.models):
                with gr.Tab("Calibrate") as self.tabs["calibrate"]:
                    _html("", f'<p class="gm-told">{CALIBRATION}</p>')
                    with gr.Row(elem_classes="gm-buttons"):
                        self.calibrate = gr.Button("Calibrate", size="sm")
                    self.calibrated = _html()
            with gr.Tab("Tried") as self.tabs["tried"]:
                self.tried = _html()
                self.taken, self.place = gr.Button("", elem_classes="gm-taken"), gr.Textbox(visible=False)
            with gr.Tab("Recipe") as self.tabs["recipe"]:
                self.recipe = gr.Code(language="yaml", show_label=False, interactive=False, elem_classes="gm-recipe")

    def _wire(self, page: gr.Blocks) -> None:
        panel, inputs = self.panel, self.panel.inputs
        # Which options there are changes first, then what they say is measured.
        shaped = panel.method.input(panel.changed, panel.movable, panel.outputs, queue=False, **_QUIET)
        flat = [slider for some in panel.layers for slider in some]
        layered = panel.by_layers.input(
            panel.layers_shown, [panel.by_layers, *panel.weights], [*panel.weights, *flat], queue=False, **_QUIET
        )
        words = []
        for knob in panel.knobs:
            if knob.word is not None:
                words.append(
                    knob.word.input(lambda on: gr.update(visible=not on), knob.word, knob.number, queue=False, **_QUIET)
                )
        explorer = self._bench.explorer
        own = self.own.click(lambda: panel.shaped(explorer.own), None, panel.outputs, queue=False, **_QUIET)
        best = self.best.click(self._to_best, None, panel.outputs, queue=False, **_QUIET)
        taken = self.taken.click(self._to_tried, self.place, panel.outputs, queue=False, js=TAKEN, **_QUIET)
        moving = [c for c in inputs if c not in (panel.method, panel.by_layers, *(k.word for k in panel.knobs))]
        measured = [self.board, self.state, self.error, self.version, self.predicted, self.recipe, self.notes]
        drawn = [component.input for component in moving]
        # At once with every move, and not with what follows it: a late answer to one move must not dim that to another.
        gr.on(drawn, None, None, None, js=DIM_BOARD, **_QUIET, trigger_mode="multiple")
        # An event of its own: those of one event are asked for one after the other, each once the last is answered.
        noted = [component.change for component in moving]
        gr.on(noted, self._note, inputs, None, queue=False, **_QUIET, trigger_mode="always_last")
        gr.on(drawn, self._measure, [self.version, *inputs], measured, **_MOVES)
        for event in (shaped, layered, *words, own, best, taken):
            event.then(None, None, None, js=DIM_BOARD, **_QUIET)
            event.then(self._note, inputs, None, queue=False, **_QUIET)
            event.then(self._measure, [self.version, *inputs], measured, concurrency_limit=None, **_QUIET)
        page.load(self._measure, [self.version, *inputs], measured, **_MOVES)
        views = [self.answers, self.flips, self.front, self.layers, self.tried]
        picked = [self.active, self.task, self.flip_task, self.against]
        self.version.change(self._look, picked, [*views, self.error], **_MOVES)
        for name, tab in self.tabs.items():
            chosen = tab.select(functools.partial(str, name), None, self.active, queue=False, **_QUIET)
            chosen.then(self._look, picked, [*views, self.error], **_QUIET, concurrency_limit=None)
        for component in (self.task, self.flip_task, self.against):
            component.input(self._look, picked, [*views, self.error], **_MOVES)
        for button, sweep in ((self.curve, self._sweep), (self.every, self._try_all)):
            button.click(
                sweep, inputs, [self.state, self.front, self.board, self.error], concurrency_limit=None, **_QUIET
            )
        if self.calibrate is not None:
            self.calibrate.click(self._calibrate, inputs, self.calibrated, **_QUIET, concurrency_limit=None)
        self.copy.click(None, self.recipe, None, js=COPY, **_QUIET)
        if not self._read_only:
            self.save.click(self._save, [self.folder, *inputs], self.kept, **_QUIET, concurrency_limit=None)
            self.report.click(self._report, self.report_folder, self.kept, **_QUIET, concurrency_limit=None)
        page.unload(self._bench.leave)

    def _to_best(self) -> list[Any]:
        best = self._bench.explorer.best()
        return self.panel.shaped(best.setting if best is not None else self._bench.explorer.own)

    def _to_tried(self, place: str) -> list[Any]:
        """The setting of a row that was clicked, which the page's script tells."""
        return self.panel.shaped(self._bench.explorer.history[int(place)].setting)

    def _note(self, request: gr.Request, *values: Any) -> None:
        """A move was made: what is measured for an earlier one may give way."""
        with contextlib.suppress(GradmergeError):  # which the measurement tells
            self._bench.visit(request).note(self.panel.read(values))

    def _measure(self, request: gr.Request, version: int, *values: Any) -> Iterator[tuple[Any, ...]]:
        """What is predicted of a move, then how far its measurement is, at last the board."""
        bench, explorer = self._bench, self._bench.explorer
        visit = bench.visit(request)
        same = gr.skip()
        try:
            setting = self.panel.read(values)
            steps = bench.measured(visit, setting)
            next(steps)  # from here on it is measured, while the rest is found out
            said = markup.predictions(explorer.predict(setting)), explorer.recipe_text(setting)
            yield same, same, "", same, *said, same
            for board, state in steps:
                if board is not None:
                    yield board, "", "", version + 1, same, same, bench.news(visit) or same
                elif visit.shown is None:  # the first of this page: there is no board yet
                    yield state, same, same, same, same, same, same
                else:
                    yield same, state, same, same, same, same, same
        except Exception as error:
            yield same if visit.shown else "", "", markup.message(explained(error)), same, same, same, same

    def _look(self, request: gr.Request, active: str, task: str, flip_task: str, against: str) -> list[Any]:
        """What the open tab shows of the merge on the board; the others wait until they are opened."""
        bench, visit = self._bench, self._bench.visit(request)
        views: dict[str, Callable[[], str]] = {
            "answers": lambda: bench.answers(visit, task),
            "flips": lambda: bench.flips(visit, flip_task, against),
            "front": lambda: bench.figures(visit, [self._chart]),
            "layers": lambda: bench.figures(visit, ["layers"]),
            "tried": bench.tried,
        }
        if active not in views or visit.shown is None:
            return [gr.skip()] * (len(views) + 1)
        try:
            return [views[name]() if name == active else gr.skip() for name in views] + [gr.skip()]
        except Exception as error:
            return [gr.skip()] * len(views) + [markup.message(explained(error))]

    def _sweep(self, request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield from self._swept(request, lambda: self._bench.sweep(self.panel.read(values)))

    def _try_all(self, request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        explorer = self._bench.explorer
        yield from self._swept(request, lambda: [explorer.setting(name) for name in explorer.methods])

    def _swept(self, request: gr.Request, settings: Callable[[], Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
        try:
            visit = self._bench.visit(request)
            for state, drawn in self._bench.swept(visit, settings(), self._chart):
                yield state, drawn or gr.skip(), gr.skip(), gr.skip()
            visit.moves += 1
            yield "", gr.skip(), self._bench.board(visit), gr.skip()
        except Exception as error:
            yield "", gr.skip(), gr.skip(), markup.message(explained(error))

    def _calibrate(self, request: gr.Request, *values: Any) -> Iterator[str]:
        visit = self._bench.visit(request)
        yield from self._told(lambda: self._bench.calibrated(visit, self.panel.read(values)))

    def _save(self, folder: str, *values: Any) -> Iterator[str]:
        yield from self._told(lambda: self._bench.saved(self.panel.read(values), folder))

    def _report(self, folder: str) -> Iterator[str]:
        yield from self._told(lambda: self._bench.reported(folder))

    def _told(self, do: Callable[[], Iterator[str]]) -> Iterator[str]:
        try:
            yield from do()
        except Exception as error:
            yield markup.message(explained(error))
