"""What the page shows and does: one explorer that all open pages share, and the state of each page.

Gradio runs handlers in threads. A newer move of the same page ends a long measurement, so that the latest one wins.
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

from ..compare.evaluate import Superseded
from ..compare.ranking import Outcome, Preview
from ..compare.settings import BASE, Setting
from ..errors import GradmergeError, MachineError
from ..text import size
from . import html
from .explorer import CalibrationComparison, Explorer
from .html import Lane, Score, esc

T = TypeVar("T")
#: Seconds after which a measurement ends for a newer move: while a slider is dragged, quick results are still shown.
PATIENCE = 0.5
#: Seconds between updates of progress.
INTERVAL = 0.25
MAX_ROWS = 24
#: Letters of a prediction that is still a label.
LABEL_LENGTH = 24
#: Steps of a sweep over the weight.
SWEEP_STEPS = 10


@dataclass
class Visit:
    """One open page."""

    wanted: Setting | None = None
    """The setting of its sliders."""
    notes: int = 0
    """How often its sliders moved."""
    shown: Outcome | None = None
    moves: int = 0
    """How often its board changed."""
    seconds: float | None = None
    closed: bool = False

    def note(self, setting: Setting) -> None:
        self.wanted = setting
        self.notes += 1


@dataclass
class Work:
    """Progress of long work."""

    text: str
    ended: Callable[[], bool] = lambda: False
    """Whether the page is closed: then work that reports progress ends."""
    unit: str = "bytes"
    share: float | None = None
    _total: int = 0
    _done: int = field(default=0, repr=False)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.text, self._total, self._done = what, total, done
        self.share = done / total if total else None

    def advance(self, amount: int) -> None:
        if self.ended():
            raise MachineError("the page was closed")
        self._done += amount
        self.share = self._done / self._total if self._total else None

    def html(self) -> str:
        amounts = f"{size(self._done)} of {size(self._total)}"
        if self.unit != "bytes":
            amounts = f"{self._done} of {self._total} {self.unit}"
        return html.state(f"{self.text}{f', {amounts}' if self._total else ''} …", self.share)


def error_text(error: BaseException) -> str:
    """What the page says about an error."""
    if isinstance(error, GradmergeError):
        return str(error)
    if isinstance(error, MemoryError):
        return "out of memory. Use fewer rows with --limit, or a smaller --batch-size."
    traceback.print_exception(error)
    return f"internal error: {type(error).__name__}: {error}. The terminal has the traceback."


class Session:
    """An explorer, and the pages that use it."""

    def __init__(self, explorer: Explorer) -> None:
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
        """End the measurements of a page that was closed."""
        gone = self._visits.pop(str(request.session_hash), None)
        if gone is not None:
            gone.closed = True

    def run(self, work: Callable[[], T]) -> Iterator[T | None]:
        """Run in a thread, starting now: yields None until the result is there."""
        return _poll(self._threads.submit(work))

    def measured(self, visit: Visit, setting: Setting) -> Iterator[tuple[str | None, str]]:
        """Measure a setting: yields (board, state); a board of None means no change."""
        begun, before, noted = time.perf_counter(), visit.notes, visit.wanted == setting

        def stop() -> bool:
            # One note of an earlier move may arrive late; notes arrive in order, each after the last.
            nonlocal noted
            noted = noted or visit.wanted == setting
            newer = visit.wanted != setting and (noted or visit.notes > before + 1)
            return visit.closed or (newer and time.perf_counter() - begun > PATIENCE)

        work = Work("measuring" if self.explorer.history else "measuring the models and the recipe’s merge")

        def advance(share: float) -> None:
            work.share = share

        try:
            for outcome in self.run(lambda: self.explorer.measure(setting, stop, advance)):
                if outcome is None:
                    yield None, work.html()
                    continue
                visit.shown, visit.seconds = outcome, time.perf_counter() - begun
                visit.moves += 1
                yield self.board(visit), ""
        except Superseded:
            yield None, work.html()

    def board(self, visit: Visit) -> str:
        """The present merge beside the best so far, the base and the fine-tuned models."""
        explorer, now = self.explorer, visit.shown
        assert now is not None
        found, best = explorer.preview(), explorer.best()
        lanes = []
        for task in explorer.tasks:
            metric = str(found.metric(task))
            base, tuned = explorer.alone.get(BASE, {}), explorer.alone.get(task, {}) if task != BASE else {}
            top = best.metrics if best is not None and best is not now else {}
            models = {"now": now.metrics, "base": base, "tuned": tuned, "best": top}
            scores = {name: html.score_of(metrics.get(task), metric) for name, metrics in models.items()}
            lanes.append(Lane(task, explorer.examples[task], metric, removed=task in explorer.removes, **scores))
        took = f" in {visit.seconds:.2f} s" if visit.seconds and visit.seconds >= 0.005 else ""
        how = f"measured on {sum(explorer.examples.values()):,} rows{took} · bars: ± 1 standard error"
        cards = self._removal_cards(lanes) if explorer.removes else self._cards(lanes, now, best, found)
        return html.board(lanes, f'<div class="gm-cards">{cards}</div>', how, visit.moves)

    def _cards(self, lanes: Sequence[Lane], now: Outcome, best: Outcome | None, found: Preview) -> str:
        mean = html.average([lane.now for lane in lanes if lane.now is not None])
        metric = html.words(lanes[0].metric)
        if len(lanes) > 1:
            metric = f"average {metric} over {len(lanes)} tasks"
        chip = self._comparison(now, best, found) if best is not None and len(self.explorer.history) > 1 else None
        below = metric if mean is not None else "tasks have different metrics"
        cards = html.card("now", "This merge", mean, below, chip)
        if best is None:
            return cards
        scores = [html.score_of(best.metrics.get(lane.task), lane.metric) for lane in lanes]
        top = html.average([score for score in scores if score is not None])
        ties = sum(map(found.among_best, found.rows)) - 1
        more = f" · {ties} other{'s' if ties > 1 else ''} tried tie{'' if ties > 1 else 's'} with it" if ties else ""
        return cards + html.card("best", "Best so far", top, f"<code>{esc(best.setting.name)}</code>{more}")

    def _comparison(self, now: Outcome, best: Outcome, found: Preview) -> tuple[str, str]:
        if now.setting == best.setting:
            return "good", "the best so far"
        gap = found.difference(_row(found, now.setting), _row(found, best.setting))
        if gap is None:
            return "tied", "tied with the best" if self.explorer.tied(now, best) else "differs from the best"
        metric = "accuracy" if found.criterion.shares else found.metric(self.explorer.tasks[0])
        apart = f"{html.number(metric, abs(gap.value))} ± {html.number(metric, gap.error)}"
        if gap.tied:
            return "tied", f"tied with the best: {apart} apart"
        better = (gap.value > 0) == found.criterion.higher
        return ("good", f"better by {apart}") if better else ("bad", f"behind by {apart}")

    def _removal_cards(self, lanes: Sequence[Lane]) -> str:
        cards = []
        for lane in lanes:
            kept = "the retain set" if lane.task == BASE else lane.task
            title = f"Forgotten: {lane.task}" if lane.removed else f"Kept: {kept}"
            before = html.number(lane.metric, lane.base.value) + html.unit(lane.metric) if lane.base else ""
            below = f"{html.words(lane.metric)}{f', was {before} before' if before else ''}"
            cards.append(html.card("gone" if lane.removed else "kept", title, lane.now, below))
        return "".join(cards)

    def answers(self, visit: Visit, task: str) -> str:
        """The same rows, answered by the base, the fine-tuned model and the merge."""
        explorer = self.explorer
        assert visit.shown is not None
        found = explorer.answers(task, explorer.shown_rows(task), visit.shown.setting)
        tuned = [] if task == BASE else ["fine-tuned"]
        rows = [
            [
                html.row_input(one),
                esc(one.label) or "–",
                html.prediction(one.base),
                *([html.prediction(one.tuned)] if tuned else []),
                html.prediction(one.merged),
            ]
            for one in found
        ]
        kind = _table_class(x for one in found for x in (one.base, one.tuned, one.merged))
        return html.table(["row", "label", "base", *tuned, "this merge"], rows, kind)

    def flips(self, visit: Visit, task: str, against: str) -> str:
        """The rows that turned right or wrong."""
        assert visit.shown is not None
        found = self.explorer.flips(task, visit.shown.setting, against)
        names = {"base": "the base", "tuned": f"the model fine-tuned on {task}"}
        kinds = dict.fromkeys(one.change for one in found)
        counts = " and ".join(f"{sum(one.change == kind for one in found):,} turned {kind}" for kind in kinds)
        total = self.explorer.examples[task]
        text = f"Compared with {names[against]}, of {total:,} rows {counts or 'none is answered differently'}."
        if len(found) > MAX_ROWS:
            text += f" The first {MAX_ROWS} are shown."
        rows = [
            [
                html.row_input(one),
                esc(one.label) or "–",
                html.prediction(one.before),
                html.prediction(one.after),
                html.chip("good" if one.change == "right" else "bad", one.change),
            ]
            for one in found[:MAX_ROWS]
        ]
        kind = _table_class(x for one in found for x in (one.before, one.after))
        table = html.table(["row", "label", "before", "this merge", ""], rows, kind) if rows else ""
        return f'<p class="gm-told">{esc(text)}</p>{table}'

    def tried(self) -> str:
        """Every setting that was measured, best first."""
        explorer = self.explorer
        found, front, best = explorer.preview(), [row.setting for row in explorer.front()], explorer.best()
        places = {row.setting: place for place, row in enumerate(explorer.history)}
        rows = []
        for row in sorted(found.rows, key=lambda row: row.rank or 0)[:100]:
            scores = [html.score_of(row.metrics.get(task), found.metric(task)) for task in explorer.tasks]
            mean = html.average([score for score in scores if score is not None])
            signs = "★ " if best is not None and row.setting == best.setting else ""
            signs += "◇" if row.setting in front else ""
            button = html.setting_button(places[row.setting], row.setting.name)
            rows.append([signs, button, f"<b>{mean}</b>" if mean else "–", *map(str, scores)])
        text = "Click a row to show its setting. ★ the best so far; ◇ no other setting is better on every task. "
        text += "Shares in percent, ± 1 standard error."
        table = html.table(["", "setting", "average", *explorer.tasks], rows, "gm-tried")
        return f'{table}<p class="gm-told">{text}</p>'

    def trade_offs(self, visit: Visit) -> str:
        assert visit.shown is not None
        chart = self.explorer.trade_offs(visit.shown)
        if self.explorer.removes:
            text = "What a removal costs the rest, for every strength that was measured."
            return html.figure(chart, "Forgetting against keeping", text)
        text = (
            "Every measured setting. The line joins settings that no other beats on both axes; the ring is this merge."
        )
        return html.figure(chart, "Trade-offs", text)

    def sweep(self, present: Setting) -> list[Setting]:
        """Settings of a curve: the same weight for all models, or strengths of a removal."""
        explorer, method, changes = self.explorer, present.method, present.changes
        if explorer.removes:
            weights = [one.weights for one in explorer.choices.strengths(method)]
            return [explorer.setting(method, dict(zip(explorer.models, w, strict=True)), changes) for w in weights]  # type: ignore[arg-type]
        control = explorer.choices.weight_control(method)
        if control is None:
            return [present]
        step = (control.high - control.low) / SWEEP_STEPS
        shared = [round(control.low + number * step, 3) for number in range(SWEEP_STEPS + 1)]
        return [explorer.setting(method, dict.fromkeys(explorer.models, weight), changes) for weight in shared]

    def swept(self, visit: Visit, settings: Sequence[Setting]) -> Iterator[tuple[str, str]]:
        """Measure settings one after another: yields (state, figure)."""
        work = Work("measuring")
        for number, setting in enumerate(settings, 1):
            work.text = f"measuring {number} of {len(settings)}: {setting.name}"
            work.share = (number - 1) / len(settings)
            for outcome in self.run(functools.partial(self.explorer.measure, setting, lambda: visit.closed)):
                if outcome is None:
                    yield work.html(), ""
            yield work.html(), self.trade_offs(visit)
        yield "", self.trade_offs(visit)

    def calibrated(self, visit: Visit, setting: Setting) -> Iterator[str]:
        """Calibrate a setting's merge: yields progress, then every task before and after."""

        def closed() -> bool:
            return visit.closed or self._closed

        work = Work("preparing the calibration", closed, "blocks")
        for found in self.run(lambda: self.explorer.calibrate(setting, stop=closed, progress=work)):
            yield work.html() if found is None else _before_and_after(setting, found)

    def saved(self, setting: Setting, out: str) -> Iterator[str]:
        """Merge a setting to disk: yields progress, then the folder."""
        work = Work("merging", lambda: self._closed)
        done = f"Saved {setting.name} in {Path(out.strip()).absolute()}"
        yield from self._written(out, work, lambda: self.explorer.save(setting, out.strip(), progress=work), done)

    def reported(self, out: str) -> Iterator[str]:
        """Write a report of all that was measured."""
        done = f"The report is {Path(out.strip()).absolute() / 'report.html'}"
        yield from self._written(out, Work("writing"), lambda: self.explorer.write_report(out.strip()), done)

    def _written(self, out: str, work: Work, write: Callable[[], Any], done: str) -> Iterator[str]:
        if not out.strip():
            yield html.message("Name a new folder to write to.")
            return
        if os.path.lexists(out.strip()):
            yield html.message(f"{Path(out.strip()).absolute()}: exists already. Name another folder.")
            return
        for result in self.run(write):
            yield work.html() if result is None else html.message(done, "good")


def _before_and_after(setting: Setting, found: CalibrationComparison) -> str:
    rows = []
    for task, metric in found.metric.items():
        scores = [html.score_of(metrics[task], metric) for metrics in (found.before, found.after)]
        apart, change = found.differences[task], "tied"
        if not found.result.improved:
            change = "unchanged"
        elif apart is None or not apart.tied:
            gap = apart.value if apart is not None else found.after[task][metric] - found.before[task][metric]
            change = "better" if (gap > 0) == html.higher_is_better(metric) else "worse"
        chip = html.chip({"better": "good", "worse": "bad"}.get(change, "tied"), change)
        about = f"{esc(task)} <small>{html.words(metric)}{html.unit(metric)}</small>"
        rows.append([about, f"{found.rows[task]:,}", *map(str, scores), chip])
    table = html.table(["task", "rows", "before", "after", ""], rows)
    notes = [str(note) for note in found.result.notes]
    if not found.result.improved:
        notes.insert(0, "The calibrated merge was not closer to the fine-tuned models, so the merge stays as it is.")
    return f"<p><code>{esc(setting.name)}</code></p>{table}{html.notes(notes)}"


def _poll(future: concurrent.futures.Future[T]) -> Iterator[T | None]:
    while True:
        try:
            yield future.result(timeout=INTERVAL)
            return
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            yield None


def _table_class(predictions: Iterable[Any]) -> str:
    """Short labels take little room, long texts all that there is."""
    long = any(len(one.text) > LABEL_LENGTH for one in predictions if one is not None)
    return "gm-answers gm-long" if long else "gm-answers"


def _row(found: Preview, setting: Setting) -> Outcome:
    return next(row for row in found.rows if row.setting == setting)


__all__ = ["Score", "Session", "Visit", "error_text"]
