"""What the page's handlers do: one explorer that all visits share, and what each visit looks at.

Gradio runs handlers in threads. A move is measured while the page goes on; a newer move of the same visit makes a
measurement that takes long give up, so that the latest wins.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import gradio as gr

import gradmerge as gm

from ..errors import GradmergeError, MachineError
from ..text import size
from . import html as markup
from .html import Lane, Score, esc

T = TypeVar("T")
#: Seconds after which a measurement gives way to a newer move: while a slider is drawn, quick ones are still shown.
PATIENCE = 0.5
#: Seconds between two looks at how far work is.
BEAT = 0.25
#: Rows of a table of the page.
MOST_ROWS = 24
ANSWERS = 8
#: Letters of an answer that still is a label.
LABEL = 24
#: Steps of a sweep over the weight.
POINTS = 10


@dataclass
class Visit:
    """One open page."""

    wanted: Any = None
    """The setting that its sliders show."""
    notes: int = 0
    shown: Any = None
    """The outcome that is on its board."""
    moves: int = 0
    seconds: float | None = None
    closed: bool = False
    told: str = ""
    """The notes that it shows."""

    def note(self, setting: Any) -> None:
        self.wanted = setting
        self.notes += 1


@dataclass
class LongWork:
    """Something long, in a thread of its own: what it does now, and how far it is."""

    text: str
    ended: Callable[[], bool] = lambda: False
    """Whether the page is being closed: then work that tells how far it is gives up, and cleans up behind itself."""
    unit: str = "bytes"
    share: float | None = None
    _total: int = 0
    _done: int = field(default=0, repr=False)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.text, self._total, self._done = what, total, done
        self._tell()

    def advance(self, amount: int) -> None:
        if self.ended():
            raise MachineError("the page was closed")
        self._done += amount
        self._tell()

    def _tell(self) -> None:
        self.share = self._done / self._total if self._total else None

    def shown(self) -> str:
        far = f", {size(self._done)} of {size(self._total)}" if self._total else ""
        if self._total and self.unit != "bytes":
            far = f", {self._done} of {self._total} {self.unit}"
        return markup.state(f"{self.text}{far} …", self.share)


def explained(error: BaseException) -> str:
    """What to say of an error in the page."""
    if isinstance(error, GradmergeError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory. Take fewer rows with --limit, or a smaller --batch-size."
    traceback.print_exception(error)
    return f"internal error: {type(error).__name__}: {error}. What led to it is printed in the terminal."


class Workbench:
    """An explorer, and the visits of the page that use it."""

    def __init__(self, explorer: Any) -> None:
        self.explorer = explorer
        self._visits: dict[str, Visit] = {}
        self._closed = False
        self._threads = concurrent.futures.ThreadPoolExecutor(8, thread_name_prefix="studio")

    def close(self) -> None:
        self._closed = True
        for visit in list(self._visits.values()):
            visit.closed = True
        self._threads.shutdown(cancel_futures=True)

    def visit(self, request: gr.Request) -> Visit:
        return self._visits.setdefault(str(request.session_hash), Visit())

    def leave(self, request: gr.Request) -> None:
        """A page was closed: nothing need be measured for it any more."""
        gone = self._visits.pop(str(request.session_hash), None)
        if gone is not None:
            gone.closed = True

    def running(self, do: Callable[[], T]) -> Iterator[T | None]:
        """Do something in a thread, from now on: nothing again and again while it runs, at last its result."""
        return _awaited(self._threads.submit(do))

    def measured(self, visit: Visit, setting: Any) -> Iterator[tuple[str | None, str]]:
        """Measure a setting: (board, state) again and again, at first as it begins; a board of None stays as it is."""
        begun, before, noted = time.perf_counter(), visit.notes, visit.wanted == setting

        def stop() -> bool:
            # The note of an earlier move may come late, but only one: notes come in order, each after the last.
            nonlocal noted
            noted = noted or visit.wanted == setting
            newer = visit.wanted != setting and (noted or visit.notes > before + 1)
            return visit.closed or (newer and time.perf_counter() - begun > PATIENCE)

        work = LongWork("measuring" if self.explorer.history else "measuring the models and the recipe’s merge")
        told = functools.partial(setattr, work, "share")
        measuring = self.running(functools.partial(self.explorer.measure, setting, stop, told))
        yield None, ""
        try:
            for outcome in measuring:
                if outcome is None:
                    yield None, work.shown()
                    continue
                visit.shown, visit.seconds = outcome, time.perf_counter() - begun
                visit.moves += 1
                yield self.board(visit), ""
        except gm.Superseded:
            yield None, work.shown()

    def news(self, visit: Visit) -> str:
        """The notes, if there are others than a visit shows: some are known once something is measured."""
        notes = markup.notes(self.explorer.notes)
        changed, visit.told = notes != visit.told, notes
        return notes if changed else ""

    def board(self, visit: Visit) -> str:
        """What is measured now, beside the best so far, the base and the tuned models."""
        explorer, now = self.explorer, visit.shown
        found, best = explorer.preview(), explorer.best()
        lanes = []
        for task in explorer.tasks:
            metric = str(found.metric(task))

            def of(metrics: Any, task: str = task, metric: str = metric) -> Score | None:
                return markup.score_of(metrics.get(task) if metrics else None, metric)

            own = None if task == "base" else of(explorer.alone.get(task))
            top = of(best.metrics) if best is not None and best is not now else None
            scores = of(now.metrics), of(explorer.alone.get("base")), own, top
            lane = Lane(task, explorer.examples[task], metric, *scores, removed=task in explorer.removes)
            lanes.append(lane)
        took = f" in {visit.seconds:.2f} s" if visit.seconds and visit.seconds >= 0.005 else ""
        how = f"measured on {sum(explorer.examples.values()):,} rows{took} · bars: ± 1 standard error"
        return markup.board(lanes, self._cards(lanes, now, best, found), how, visit.moves)

    def _cards(self, lanes: Sequence[Lane], now: Any, best: Any, found: Any) -> str:
        if self.explorer.removes:
            return self._removal_cards(lanes)
        mean = markup.average([lane.now for lane in lanes if lane.now is not None])
        over = markup.words(lanes[0].metric)
        if len(lanes) > 1:
            over = f"average {over} over {len(lanes)} tasks"
        chip = None
        if best is not None and len(self.explorer.history) > 1:
            chip = self._compared(now, best, found)
        cards = markup.card(
            "now", "This merge", mean, over if mean is not None else "tasks have different metrics", chip
        )
        if best is None:
            return f'<div class="gm-cards">{cards}</div>'
        metrics = [(lane.task, lane.metric) for lane in lanes]
        scores = [markup.score_of(best.metrics.get(task), metric) for task, metric in metrics]
        top = markup.average([score for score in scores if score is not None])
        pinned = markup.card("best", "Best so far", top, self._named(best.setting, found))
        return f'<div class="gm-cards">{cards}{pinned}</div>'

    def _named(self, setting: Any, found: Any) -> str:
        """A setting's name, and how many others are as good."""
        ties = len(found.tied(_row(found, setting)))
        more = f" · {ties} other{'s' if ties > 1 else ''} tried tie{'' if ties > 1 else 's'} with it" if ties else ""
        return f"<code>{esc(setting.name)}</code>{more}"

    def _compared(self, now: Any, best: Any, found: Any) -> tuple[str, str]:
        if now.setting == best.setting:
            return "good", "the best so far"
        gap = found.difference(_row(found, now.setting), _row(found, best.setting))
        if gap is None:
            return "tied", "tied with the best" if self.explorer.tied(now, best) else "differs from the best"
        metric = found.metric(self.explorer.tasks[0])
        apart = f"{markup.number(metric, abs(gap.value))} ± {markup.number(metric, gap.error)}"
        if gap.tied:
            return "tied", f"tied with the best: {apart} apart"
        better = (gap.value > 0) == markup.higher_is_better(metric)
        return ("good", f"better by {apart}") if better else ("bad", f"behind by {apart}")

    def _removal_cards(self, lanes: Sequence[Lane]) -> str:
        cards = []
        for lane in lanes:
            title = (
                f"Forgotten: {lane.task}"
                if lane.removed
                else f"Kept: {'what stays' if lane.task == 'base' else lane.task}"
            )
            was = f", was {_brief(lane.base)} before" if lane.base is not None else ""
            cards.append(
                markup.card("gone" if lane.removed else "kept", title, lane.now, f"{markup.words(lane.metric)}{was}")
            )
        return f'<div class="gm-cards">{"".join(cards)}</div>'

    def answers(self, visit: Visit, task: str) -> str:
        """The same rows, answered by the base, the tuned model and the merge."""
        explorer, setting = self.explorer, visit.shown.setting
        found = explorer.answers(task, explorer.shown_rows(task, ANSWERS), setting)
        tuned = [] if task == "base" else ["tuned on it"]
        rows = []
        for one in found:
            asked = markup.picture(one.image) if one.image is not None else markup.passage(one.text or "")
            own = [markup.reply(one.tuned)] if tuned else []
            rows.append([asked, esc(one.truth) or "–", markup.reply(one.base), *own, markup.reply(one.merged)])
        return markup.table(
            ["row", "truth", "base", *tuned, "this merge"],
            rows,
            _shaped(x for one in found for x in (one.base, one.tuned, one.merged)),
        )

    def flips(self, visit: Visit, task: str, against: str) -> str:
        """Which rows turned right or wrong; of a task without right and wrong, whose loss changed most."""
        found = self.explorer.flips(task, visit.shown.setting, against)
        other = {
            "base": "the base",
            "tuned": f"the model tuned on {task}",
            "best": "the best so far",
            "own": "the recipe",
        }
        turns = {kind: sum(one.turned == kind for one in found) for kind in dict.fromkeys(one.turned for one in found)}
        counts = (
            " and ".join(f"{count:,} turned {kind}" for kind, count in turns.items()) or "none is answered otherwise"
        )
        told = f"Against {other[against]}, of {self.explorer.examples[task]:,} rows {counts}."
        if len(found) > MOST_ROWS:
            told += f" The first {MOST_ROWS} are shown."
        rows = [
            [
                markup.picture(one.image) if one.image is not None else markup.passage(one.text or ""),
                esc(one.truth) or "–",
                markup.reply(one.before),
                markup.reply(one.after),
                markup.chip("good" if one.turned in ("right", "better") else "bad", one.turned),
            ]
            for one in found[:MOST_ROWS]
        ]
        kind = _shaped(x for one in found for x in (one.before, one.after))
        shown = markup.table(["row", "truth", "before", "this merge", ""], rows, kind) if rows else ""
        return f'<p class="gm-told">{esc(told)}</p>{shown}'

    def tried(self) -> str:
        """Every setting that was measured, the best first."""
        explorer = self.explorer
        found, front, best = explorer.preview(), [row.setting for row in explorer.front()], explorer.best()
        rows = []
        for row in sorted(found.rows, key=lambda row: row.rank or 0)[:100]:
            scores = [markup.score_of(row.metrics.get(task), found.metric(task)) for task in explorer.tasks]
            mean = markup.average([score for score in scores if score is not None])
            signs = "★ " if best is not None and row.setting == best.setting else ""
            signs += "◇" if any(row.setting == one for one in front) else ""
            name = markup.take_up(self._place(row.setting), row.setting.name)
            rows.append([signs, name, f"<b>{mean}</b>" if mean else "–", *map(str, scores)])
        said = "A click takes a setting up again. ★ the best so far; ◇ nothing tried is better on every task. "
        said += "Shares in per cent, ± 1 standard error."
        table = markup.table(["", "setting", "average", *explorer.tasks], rows, "gm-tried")
        return f'{table}<p class="gm-told">{said}</p>'

    def _place(self, setting: Any) -> int:
        """Of what was measured, the how-manieth a setting was."""
        return next(place for place, row in enumerate(self.explorer.history) if row.setting == setting)

    def figures(self, visit: Visit, names: Sequence[str]) -> str:
        """Charts of the explorer, each with what it shows."""
        drawn = self.explorer.figures(visit.shown)
        told = FIGURES | ({} if self.explorer.predict(visit.shown.setting) else {"layers": DISTANCES})
        made = [markup.figure(drawn[name], *told[name]) for name in names if name in drawn]
        return "".join(made) or '<p class="gm-empty">There is nothing to draw here.</p>'

    def sweep(self, present: Any) -> list[Any]:
        """Settings to measure in a row: the same weight for all models, or strengths of a removal."""
        explorer, method = self.explorer, present.method
        options = dict(present.changes)
        if explorer.removes:
            weights_of = [dict(zip(explorer.models, one.weights, strict=True)) for one in explorer.strengths(method)]
            return [explorer.setting(method, weights, options) for weights in weights_of]
        control = explorer.weight_control(method)
        if control is None:
            return [present]
        weights = [round(control.low + step * (control.high - control.low) / POINTS, 3) for step in range(POINTS + 1)]
        return [explorer.setting(method, dict.fromkeys(explorer.models, weight), options) for weight in weights]

    def swept(self, visit: Visit, settings: Sequence[Any], chart: str) -> Iterator[tuple[str, str]]:
        """Measure settings one after another: (state, figure); moves that are made meanwhile come in between."""
        work = LongWork("measuring")
        for number, setting in enumerate(settings, 1):
            work.text = f"measuring {number} of {len(settings)}: {setting.name}"
            work.share = (number - 1) / len(settings)
            measure = functools.partial(self.explorer.measure, setting, lambda: visit.closed)
            for outcome in self.running(measure):
                if outcome is None:
                    yield work.shown(), ""
            yield work.shown(), self.figures(visit, [chart])
        yield "", self.figures(visit, [chart])

    def calibrated(self, visit: Visit, setting: Any) -> Iterator[str]:
        """Calibrate a setting's merge: how far it is again and again, at last every task before and after."""

        def closed() -> bool:
            return visit.closed or self._closed

        work = LongWork("preparing the calibration", closed, "blocks")
        calibrate = functools.partial(self.explorer.calibrate, setting, stop=closed, progress=work)
        for found in self.running(calibrate):
            yield work.shown() if found is None else self._before_and_after(setting, found)

    def _before_and_after(self, setting: Any, found: Any) -> str:
        rows = []
        for task, metric in found.metric.items():
            scores = [markup.score_of(metrics[task], metric) for metrics in (found.before, found.after)]
            apart, better = found.differences[task], markup.chip("tied", "tied")
            if apart is None or not apart.tied:
                gap = apart.value if apart is not None else found.after[task][metric] - found.before[task][metric]
                good = (gap > 0) == markup.higher_is_better(metric)
                better = markup.chip(*(("good", "better") if good else ("bad", "worse")))
            if not found.result.improved:
                better = markup.chip("tied", "unchanged")
            about = f"{esc(task)} <small>{markup.words(metric)}{markup.unit(metric)}</small>"
            rows.append([about, f"{found.rows[task]:,}", *map(str, scores), better])
        table = markup.table(["task", "rows", "before", "after", ""], rows)
        notes = [str(note) for note in found.result.notes]
        if not found.result.improved:
            notes.insert(
                0, "The calibrated merge was not closer to the fine-tuned models, so the merge stays as it is."
            )
        return f"<p><code>{esc(setting.name)}</code></p>{table}{markup.notes(notes)}"

    def saved(self, setting: Any, out: str) -> Iterator[str]:
        """Merge a setting to disk: how far it is again and again, at last where it lies."""
        work = LongWork("merging", lambda: self._closed)
        save = functools.partial(self.explorer.save, setting, out.strip(), progress=work)
        yield from self._written(out, work, save, f"Saved {setting.name} in {Path(out.strip()).absolute()}")

    def reported(self, out: str) -> Iterator[str]:
        """Write a report of all that was measured."""
        write = functools.partial(self.explorer.write_report, out.strip())
        done = f"The report is {Path(out.strip()).absolute() / 'report.html'}"
        yield from self._written(out, LongWork("writing"), write, done)

    def _written(self, out: str, work: LongWork, write: Callable[[], Any], done: str) -> Iterator[str]:
        if not out.strip():
            yield markup.message("Name a new folder to write to.")
            return
        if os.path.lexists(out.strip()):
            yield markup.message(f"{Path(out.strip()).absolute()}: exists already. Name another folder.")
            return
        for result in self.running(write):
            yield work.shown() if result is None else markup.message(done, "good")


#: Chart → its title and what it shows.
FIGURES = {
    "tasks": ("Every task", "Measured, with one standard error on each side."),
    "front": (
        "Trade-offs",
        "Everything tried; the line joins what nothing else beats on both axes, the ring is this merge.",
    ),
    "trade-off": ("Forgetting against keeping", "What removal costs the rest, for every strength tried."),
    "layers": ("Layers", "How much each layer of this merge costs each task, predicted from curvature."),
}
#: The layers without curvature.
DISTANCES = ("Layers", "How far each layer of this merge still is from the model tuned on a task.")


def _awaited(future: concurrent.futures.Future[T]) -> Iterator[T | None]:
    while True:
        try:
            yield future.result(timeout=BEAT)
            return
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            yield None


def _shaped(replies: Iterable[Any]) -> str:
    """How a table of answers is laid out: labels take little room, texts all that there is."""
    return "gm-answers gm-long" if any(len(one.text) > LABEL for one in replies if one is not None) else "gm-answers"


def _row(found: Any, setting: Any) -> Any:
    return next(row for row in found.rows if row.setting == setting)


def _brief(score: Score) -> str:
    return f"{markup.number(score.metric, score.value)}{markup.unit(score.metric)}"
