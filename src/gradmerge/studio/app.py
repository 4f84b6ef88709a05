"""The page: its layout, and the handlers of its events.

Gradio runs handlers in threads. While a slider moves, the page keeps only the latest of the next measurements, and a
newer move of the same page ends a long one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import json
import os
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import gradio as gr
from gradio.components.plot import PlotData

from ..compare.evaluate import Superseded
from ..compare.ranking import Outcome, Preview, higher_is_better, with_error
from ..compare.settings import BASE, Setting
from ..errors import GradmergeError, InputError, MachineError
from ..report.theme import LIGHT
from ..text import counted
from . import html
from .explorer import CalibratedTask, Explorer
from .html import Lane, esc

Handler = TypeVar("Handler", bound=Callable[..., Any])
#: Seconds after which a measurement ends for a newer move: while a slider is dragged, quick results are still shown.
PATIENCE = 0.5
#: Rows of a table.
MAX_FLIPS, MAX_TRIED = 24, 100
#: Events are not listed as an API, and Gradio's progress bar is shown in one place only.
_QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
_PARALLEL: dict[str, Any] = {**_QUIET, "concurrency_limit": None}
#: While one event runs, the page keeps only the latest of the next ones.
_LATEST: dict[str, Any] = {**_PARALLEL, "trigger_mode": "always_last"}
_FAST: dict[str, Any] = {**_QUIET, "queue": False}
#: The time of a move by the clock of the browser, before the values of the controls.
_WITH_TIME = "(time, ...values) => [Date.now(), ...values]"
#: Until the new numbers arrive, those on the board are of an earlier move.
_MOVED = """() => {
    document.querySelectorAll(".gm-board").forEach((board) => board.classList.add("stale"));
    return [Date.now()];
}"""

CALIBRATION = (
    "Calibration brings this merge closer to its fine-tuned models. It reads the inputs of every other row, without "
    "labels. Before and after are measured on the other half of the rows. For speed, it runs without output factors "
    "(<code>--curvature none</code>). <code>gradmerge calibrate</code> calibrates a saved merge."
)
TRADE_OFFS = "Every measured setting. The line joins settings that no other beats on both axes; the ring is this merge."
FORGETTING = "What a removal costs the rest, for every strength that was measured; the ring is this merge."
TRIED = "Click a row to show its setting again. ★ is the best so far. Shares in percent, ± 1 standard error."


def build(explorers: Mapping[str, Explorer]) -> tuple[gr.Blocks, list[Workbench]]:
    """The page, and its workbenches: a tab for each explorer."""
    workbenches = []
    page: gr.Blocks
    with gr.Blocks(title="gradmerge studio", analytics_enabled=False, fill_width=True) as page:
        _html("gm-header", "<header><h1><b>gradmerge</b> studio</h1></header>")
        with gr.Tabs(elem_classes="gm-jobs"):
            for title, explorer in explorers.items():
                models, tasks = counted(explorer.models, "model"), counted(explorer.tasks, "task")
                with gr.Tab(f"{title} · {models} · {tasks}" if len(explorers) == 1 else title):
                    workbenches.append(Workbench(page, explorer))
        page.load(_keep_stream_open, None, None, **_PARALLEL)
    return page, workbenches


async def _keep_stream_open() -> AsyncIterator[None]:
    """An event that never ends.

    Gradio closes the stream of results after the last event, and an event at that moment gets no result until the next.
    """
    while True:
        yield
        await asyncio.sleep(3600)


def _html(classes: str = "", value: str = "") -> gr.HTML:
    return gr.HTML(value, elem_classes=["gm-html", *classes.split()])


def _text(value: str) -> gr.HTML:
    return _html("", f'<p class="gm-told">{value}</p>')


def _choice(choices: Sequence[Any]) -> gr.Radio:
    return gr.Radio(choices, value=choices[0], show_label=False, container=False, elem_classes="gm-pick")


def _output(what: str, name: str, button: str, variant: Any = "secondary") -> tuple[gr.Textbox, gr.Button]:
    with gr.Row(elem_classes="gm-pair"):
        box = gr.Textbox(name, label=f"New folder for {what}", max_lines=1)
        return box, gr.Button(button, size="sm", variant=variant)


class Panel:
    """The controls of a merge: its method, and a slider for each weight and option."""

    def __init__(self, explorer: Explorer) -> None:
        self._explorer, own = explorer, explorer.own
        methods = list(explorer.controls)
        self.method = gr.Dropdown(
            methods, value=own.method, label="Method", filterable=len(methods) > 8, elem_classes="gm-method"
        )
        self.sliders: dict[str, gr.Slider] = {}
        for method, controls in explorer.controls.items():  # the recipe's own method is the first
            for key, control in controls.items():
                if key not in self.sliders:
                    look = control.slider(control.value) | {"visible": method == own.method}
                    kind = "gm-weight" if control.is_weight else None
                    self.sliders[key] = gr.Slider(**look, buttons=[], elem_classes=kind)

    @property
    def inputs(self) -> list[Any]:
        """The components, in the order of the values that :meth:`read` takes and :meth:`show` returns."""
        return [self.method, *self.sliders.values()]

    def read(self, method: str, *positions: float) -> Setting:
        """The setting of the components' values; what was not moved stays the recipe's."""
        controls = self._explorer.controls[method]
        values = {
            key: controls[key].value_at(position)
            for key, position in zip(self.sliders, positions, strict=True)
            if key in controls
        }
        return self._explorer.setting(method, {key: v for key, v in values.items() if v != controls[key].value})

    def show(self, values: Mapping[str, Any]) -> list[Any]:
        """Updates of the components for a setting, or for a method with some keys. Other keys are the recipe's."""
        method = values["method"]
        controls, updates = self._explorer.controls[method], [gr.update(value=method)]
        for key in self.sliders:
            control = controls.get(key)
            shown = {"visible": False} if control is None else control.slider(values.get(key, control.value))
            updates.append(gr.update(**shown))
        return updates

    def change_method(self, method: str, *positions: float) -> list[Any]:
        """Updates for another method. Weights stay if they are in its range."""
        controls = self._explorer.controls[method]
        weights = {key: value for key, value in zip(self.sliders, positions, strict=True) if key in controls}
        kept = {k: v for k, v in weights.items() if controls[k].is_weight and controls[k].low <= v <= controls[k].high}
        return self.show({"method": method, **kept})


@dataclass
class Visit:
    """One open page. Times are those of the browser's clock."""

    moved: float = 0.0
    """When a slider last moved."""
    shown: Outcome | None = None
    shown_time: float = 0.0
    """When the move was made whose result is shown."""
    closed: bool = False


class Reporter:
    """Shows the progress of an event as Gradio does. Threads of the work may share it."""

    def __init__(self, text: str, stop: Callable[[], bool] = lambda: False) -> None:
        self._text, self._stop = text, stop
        self._context, self._lock = contextvars.copy_context(), threading.Lock()
        self._total = self._done = 0
        self.share(0)

    def share(self, share: float) -> None:
        with self._lock:
            self._context.run(gr.Progress(), share, desc=self._text)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._text, self._total, self._done = what, total, done

    def advance(self, amount: int) -> None:
        if self._stop():
            raise MachineError("the page was closed")
        self._done += amount
        self.share(min(1.0, self._done / max(1, self._total)))


def _shows_errors(handler: Handler) -> Handler:
    """Show the errors of a handler on the page."""

    @functools.wraps(handler)
    def run(*args: Any) -> Any:
        try:
            return handler(*args)
        except GradmergeError as error:
            text = str(error)
        except MemoryError:
            text = "out of memory. Use fewer rows with --limit, or a smaller --batch-size."
        except Exception as error:
            traceback.print_exception(error)
            text = f"internal error: {type(error).__name__}: {error}. The terminal has the traceback."
        raise gr.Error(esc(text), duration=None, print_exception=False)

    return cast(Handler, run)


class Workbench:
    """The components and events of one explorer."""

    def __init__(self, page: gr.Blocks, explorer: Explorer) -> None:
        self.explorer = explorer
        self._visits: dict[str, Visit] = {}
        self._closed = False
        with gr.Row(elem_classes="gm-desk"):
            with gr.Column(scale=0, min_width=320, elem_classes="gm-side"):
                self.panel = Panel(explorer)
                with gr.Row(elem_classes="gm-buttons"):
                    self.own = gr.Button("Recipe’s own", size="sm")
                    self.best = gr.Button("Best so far", size="sm", visible=not explorer.removes)
                with gr.Column(elem_classes="gm-keep"):
                    self.folder, self.save = _output("the merge", "studio-merged", "Save merge", "primary")
                    self.report_folder, self.report = _output("a report", "studio-report", "Write report")
            with gr.Column(scale=1, min_width=320, elem_classes="gm-main"):
                self.board = _html("gm-board-box")
                self.progress = _html("gm-progress")
                self._add_tabs()
                self.notes = _html("gm-notes-box", html.notes(explorer.evaluator.notes()))
        self._connect(page)

    def _add_tabs(self) -> None:
        explorer, removes = self.explorer, bool(self.explorer.removes)
        self.time, self.active = gr.Number(visible=False), gr.State("answers")
        self.tabs: dict[str, gr.Tab] = {}
        with gr.Tabs(elem_classes="gm-views"):
            with gr.Tab("Answers") as self.tabs["answers"]:
                self.task = _choice(explorer.tasks)
                self.answers = _html()
            with gr.Tab("What flipped") as self.tabs["flips"]:
                self.flip_task = _choice(explorer.tasks)
                self.against = _choice(["against the base", "against the fine-tuned model"])
                self.flips = _html()
            with gr.Tab("Forgetting" if removes else "Trade-offs") as self.tabs["trade-offs"]:
                _text(FORGETTING if removes else TRADE_OFFS)
                self.trade_offs = gr.Plot(show_label=False, container=False, elem_classes="gm-plot")
                with gr.Row(elem_classes="gm-buttons"):
                    self.curve = gr.Button("Measure the curve" if removes else "Sweep one weight for all", size="sm")
                    self.every = gr.Button("Try every method", size="sm")
            possible = not removes and bool(set(explorer.tasks) & set(explorer.models))
            with gr.Tab("Calibrate", visible=possible) as self.tabs["calibrate"]:
                _text(CALIBRATION)
                self.calibrate = gr.Button("Calibrate", size="sm")
                self.calibrated = _html()
            with gr.Tab("Tried") as self.tabs["tried"]:
                _text(TRIED)
                headers = ["#", "setting", "average", *explorer.tasks]
                look: dict[str, Any] = {"show_label": False, "buttons": [], "max_height": 1000}
                self.tried = gr.Dataframe(headers=headers, interactive=False, elem_classes="gm-tried", **look)
            with gr.Tab("Recipe") as self.tabs["recipe"]:
                self.recipe = gr.Code(language="yaml", show_label=False, interactive=False, elem_classes="gm-recipe")

    def _connect(self, page: gr.Blocks) -> None:
        panel, inputs = self.panel, self.panel.inputs
        progress = {**_PARALLEL, "show_progress": "full", "show_progress_on": self.progress}
        measure: dict[str, Any] = {
            "fn": self._measure,
            "inputs": [self.time, *inputs],
            "outputs": [self.board, self.recipe, self.notes],
            "js": _WITH_TIME,
            **progress,
        }
        views = [self.answers, self.flips, self.trade_offs, self.tried]
        show: dict[str, Any] = {
            "fn": self._show_tab,
            "inputs": [self.active, self.task, self.flip_task, self.against],
            "outputs": views,
        }
        # These first change the controls; then the new values are measured.
        changes = [
            panel.method.input(panel.change_method, inputs, inputs, **_FAST),
            self.own.click(lambda: panel.show(self.explorer.own), None, inputs, **_FAST),
            self.best.click(self._show_best, None, inputs, **_FAST),
            self.tried.select(self._show_tried, None, inputs, **_FAST),
        ]
        for event in changes:
            event.then(self._note_move, self.time, None, js=_MOVED, **_FAST)
            event.then(**measure).then(**show, **_PARALLEL)
        moves = [slider.input for slider in panel.sliders.values()]
        gr.on(moves, self._note_move, self.time, None, js=_MOVED, **_FAST, trigger_mode="multiple")
        gr.on(moves, **measure, trigger_mode="always_last").then(**show, **_LATEST)
        page.load(**measure).then(**show, **_PARALLEL)
        for name, tab in self.tabs.items():
            selected = tab.select(functools.partial(str, name), None, self.active, **_FAST)
            selected.then(**show, **_PARALLEL)
        for component in (self.task, self.flip_task, self.against):
            component.input(**show, **_LATEST)
        for button, settings in ((self.curve, self._sweep), (self.every, self._every_method)):
            button.click(settings, inputs, self.board, **progress).then(**show, **_PARALLEL)
        self.calibrate.click(self._calibrate, inputs, self.calibrated, **progress)
        self.save.click(self._save, [self.folder, *inputs], None, **progress)
        self.report.click(self._report, self.report_folder, None, **progress)
        page.unload(self._leave)

    def close(self) -> None:
        """End all work."""
        self._closed = True
        for visit in list(self._visits.values()):
            visit.closed = True

    def _visit(self, request: gr.Request) -> Visit:
        return self._visits.setdefault(str(request.session_hash), Visit(closed=self._closed))

    def _leave(self, request: gr.Request) -> None:
        """End the measurements of a page that was closed."""
        self._visits.pop(str(request.session_hash), Visit()).closed = True

    def _show_best(self) -> list[Any]:
        best = self.explorer.best()
        return self.panel.show(self.explorer.own if best is None else best.setting)

    def _show_tried(self, event: gr.SelectData) -> list[Any]:
        """The setting of a row that was clicked."""
        return self.panel.show(self.explorer.history[int(event.row_value[0]) - 1].setting)

    def _note_move(self, request: gr.Request, moved: float) -> None:
        """Note the time of a move, so that the measurement of an earlier one may end."""
        visit = self._visit(request)
        visit.moved = max(visit.moved, moved)

    @_shows_errors
    def _measure(self, request: gr.Request, moved: float, *values: Any) -> tuple[Any, ...]:
        """Measure the setting of the controls, and show it on the board."""
        explorer, visit, begun = self.explorer, self._visit(request), time.perf_counter()

        def stop() -> bool:
            return visit.closed or (visit.moved > moved and time.perf_counter() - begun > PATIENCE)

        setting = self.panel.read(*values)
        report = Reporter("measuring" if explorer.history else "measuring all models, and the merge of the recipe")
        with contextlib.suppress(Superseded):
            outcome = explorer.measure(setting, stop, report.share)
            if moved >= visit.shown_time:
                visit.shown, visit.shown_time = outcome, moved
                board = self._board(outcome, time.perf_counter() - begun)
                return board, explorer.recipe_text(setting), html.notes(explorer.evaluator.notes())
        return gr.skip(), gr.skip(), gr.skip()

    @_shows_errors
    def _sweep(self, request: gr.Request, *values: Any) -> Any:
        return self._measure_all(self._visit(request), self.explorer.shared_weights(self.panel.read(*values)))

    @_shows_errors
    def _every_method(self, request: gr.Request, *values: Any) -> Any:
        return self._measure_all(self._visit(request), list(map(self.explorer.setting, self.explorer.controls)))

    def _measure_all(self, visit: Visit, settings: Sequence[Setting]) -> Any:
        report = Reporter("measuring")
        with contextlib.suppress(Superseded):
            for number, setting in enumerate(settings):
                report.begin(setting.name, len(settings), number)
                report.share(number / len(settings))
                self.explorer.measure(setting, lambda: visit.closed)
        return self._board(visit.shown) if visit.shown is not None else gr.skip()

    @_shows_errors
    def _calibrate(self, request: gr.Request, *values: Any) -> str:
        """Calibrate the setting of the controls, and show every task before and after."""
        visit = self._visit(request)
        setting, report = self.panel.read(*values), Reporter("preparing the calibration", lambda: visit.closed)
        result, tasks = self.explorer.calibrate(setting, stop=lambda: visit.closed, progress=report)
        notes = [str(note) for note in result.notes]
        if not result.improved:
            notes.insert(0, "The calibrated merge was not closer to the fine-tuned models, so the merge is unchanged.")
        table = _before_and_after(tasks, result.improved)
        return f"<p><code>{esc(setting.name)}</code></p>{table}{html.notes(notes)}"

    @_shows_errors
    def _save(self, folder: str, *values: Any) -> None:
        setting, out = self.panel.read(*values), _new_folder(folder)
        self.explorer.save(setting, out, progress=Reporter("merging", lambda: self._closed))
        gr.Success(esc(f"Saved {setting.name} in {out}"), duration=None)

    @_shows_errors
    def _report(self, folder: str) -> None:
        page = self.explorer.write_report(_new_folder(folder))
        gr.Success(esc(f"The report is {page}"), duration=None)

    @_shows_errors
    def _show_tab(self, request: gr.Request, active: str, task: str, flip_task: str, against: str) -> list[Any]:
        """Update the open tab for the merge on the board."""
        shown = self._visit(request).shown
        views: dict[str, Callable[[Outcome], Any]] = {
            "answers": lambda shown: self._answers(shown, task),
            "flips": lambda shown: self._flips(shown, flip_task, BASE if against == "against the base" else flip_task),
            "trade-offs": self._trade_offs,
            "tried": self._tried,
        }
        return [gr.skip() if shown is None or name != active else view(shown) for name, view in views.items()]

    def _answers(self, shown: Outcome, task: str) -> str:
        """The same rows, answered by the base, the fine-tuned model and the merge."""
        models = ["base", *([] if task == BASE else ["fine-tuned"]), "this merge"]
        return html.answers(self.explorer.answers(task, shown.setting), models)

    def _flips(self, shown: Outcome, task: str, other: str) -> str:
        """The rows that turned right or wrong."""
        found = self.explorer.flips(task, shown.setting, other)
        kinds = dict.fromkeys(one.change for one in found)
        counts = " and ".join(f"{sum(one.change == kind for one in found):,} turned {kind}" for kind in kinds)
        model = "the base" if other == BASE else f"the model fine-tuned on {task}"
        text = (
            f"Compared with {model}, of {self.explorer.examples[task]:,} rows {counts or 'none turned right or wrong'}."
        )
        if len(found) > MAX_FLIPS:
            text += f" The first {MAX_FLIPS} are shown."
        table = html.answers(found[:MAX_FLIPS], ["before", "this merge"]) if found else ""
        return f'<p class="gm-told">{esc(text)}</p>{table}'

    def _trade_offs(self, shown: Outcome) -> PlotData | None:
        """All measured settings as a chart, which takes its colors and its width from the page."""
        chart = self.explorer.trade_offs(shown.setting)
        if chart is None:
            return None
        spec = chart.properties(width="container", background="transparent").to_dict()
        del spec["$schema"]  # it names a newer version than Gradio's
        spec["usermeta"] = {"embedOptions": {"actions": False, "renderer": "svg"}}
        spec["config"]["legend"] |= {"offset": 27, "columns": 2}  # above the title of the axis
        text = json.dumps(spec)
        for name, color in LIGHT.items():
            text = text.replace(f'"{color}"', f'"var(--gm-{name})"')
        return PlotData(type="altair", plot=text)

    def _tried(self, shown: Outcome) -> list[list[str]]:
        """Every setting that was measured, best first."""
        explorer = self.explorer
        found, best = explorer.preview(), explorer.best()
        numbers = {row.setting: number for number, row in enumerate(explorer.history, 1)}
        rows = []
        for row in found.ranked()[:MAX_TRIED]:
            values = {task: found.shown_value(row, task) for task in explorer.tasks}
            star = "★ " if best is not None and row.setting == best.setting else ""
            cells = [html.with_error(found.metric(task), value) for task, value in values.items()]
            average = html.with_error(found.metric(explorer.tasks[0]), self._mean(found, row))
            rows.append([str(numbers[row.setting]), star + row.setting.name, average, *cells])
        return rows

    def _mean(self, preview: Preview, row: Outcome) -> float | None:
        """The mean over tasks; None if they have different metrics."""
        tasks = self.explorer.tasks
        if len({preview.metric(task) for task in tasks}) > 1:
            return None
        return html.mean([preview.shown_value(row, task) for task in tasks])

    def _board(self, now: Outcome, seconds: float = 0.0) -> str:
        """The present merge beside the best so far, the base and the fine-tuned models."""
        explorer = self.explorer
        found, best, alone, lanes = explorer.preview(), explorer.best(), explorer.evaluator.alone, []
        for task in explorer.tasks:
            metric = found.metric(task)
            models = {"now": now.metrics, "base": alone.get(BASE, {})}
            models["tuned"] = alone.get(task, {}) if task != BASE else {}
            models["best"] = best.metrics if best is not None and best is not now else {}
            values = {name: with_error(metrics.get(task) or {}, metric) for name, metrics in models.items()}
            lanes.append(Lane(task, explorer.examples[task], metric, values, task in explorer.removes))
        took = f" in {seconds:.2f} s" if seconds >= 0.005 else ""
        how = f"measured on {sum(explorer.examples.values()):,} rows{took} · bars: ± 1 standard error"
        cards = "" if self.explorer.removes else self._cards(now, best, found)
        return html.board(lanes, cards, how)

    def _cards(self, now: Outcome, best: Outcome | None, preview: Preview) -> str:
        mean, metric = self._mean(preview, now), preview.metric(preview.tasks[0])
        below = "tasks have different metrics" if mean is None else html.words(metric)
        if mean is not None and len(preview.tasks) > 1:
            below = f"average {below} over {len(preview.tasks)} tasks"
        chip = _comparison(now, best, preview) if best is not None and len(preview.rows) > 1 else ""
        cards = html.card("now", "This merge", metric, mean, below, chip)
        if best is None:
            return cards
        ties = sum(map(preview.among_best, preview.rows)) - 1
        more = f" · {ties} other{'s' if ties > 1 else ''} tried tie{'' if ties > 1 else 's'} with it" if ties else ""
        name = f"<code>{esc(best.setting.name)}</code>{more}"
        return cards + html.card("best", "Best so far", metric, self._mean(preview, best), name)


def _new_folder(text: str) -> Path:
    if not text.strip():
        raise InputError("Name a new folder to write to.")
    out = Path(text.strip()).absolute()
    if os.path.lexists(out):
        raise InputError(f"{out}: exists already. Name another folder.")
    return out


def _comparison(now: Outcome, best: Outcome, preview: Preview) -> str:
    """How a merge compares with the best so far."""
    if now.setting == best.setting:
        return html.chip("good", "the best so far")
    of = {row.setting: row for row in preview.rows}
    gap = preview.difference(of[now.setting], of[best.setting])
    if gap is None:
        return html.chip("tied", "differs from the best")
    metric = "accuracy" if preview.criterion.shares else preview.metric(preview.tasks[0])
    apart = f"{html.number(metric, abs(gap.value))} ± {html.number(metric, gap.error)}"
    if gap.tied:
        return html.chip("tied", f"tied with the best: {apart} apart")
    better = (gap.value > 0) == preview.criterion.higher
    return html.chip("good", f"better by {apart}") if better else html.chip("bad", f"behind by {apart}")


def _before_and_after(tasks: Mapping[str, CalibratedTask], improved: bool) -> str:
    rows = []
    for task, one in tasks.items():
        change, kind = "unchanged", "tied"
        if improved and one.difference is not None and one.difference.tied:
            change = "tied"
        elif improved:
            better = ((one.after or 0.0) > (one.before or 0.0)) == higher_is_better(one.metric)
            change, kind = ("better", "good") if better else ("worse", "bad")
        about = f"{esc(task)} <small>{html.words(one.metric)}{html.unit(one.metric)}</small>"
        values = [html.with_error(one.metric, value) for value in (one.before, one.after)]
        rows.append([about, f"{one.rows:,}", *values, html.chip(kind, change)])
    return html.table(["task", "rows", "before", "after", ""], rows)
