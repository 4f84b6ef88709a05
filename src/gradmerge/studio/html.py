"""Results as HTML. All names, labels and rows go through `esc`, so that they are shown and never run."""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..compare.ranking import higher_is_better as higher_is_better
from ..text import printable

#: Metrics that are shares, shown in percent.
_SHARES = ("accuracy", "f1", "exact_match", "recall", "precision", "rouge")
#: Letters of a text that are shown at first.
_LETTERS = 280


def esc(text: object) -> str:
    return html.escape(printable(str(text)))


def is_share(metric: str) -> bool:
    return any(word in metric for word in _SHARES)


def number(metric: str, value: float | None) -> str:
    """A value of a metric: a share in percent without the sign, other values with four digits."""
    if value is None or not math.isfinite(value):
        return "–"
    shown = f"{100 * value:.1f}" if is_share(metric) else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"
    return shown.replace("-", "−")


def unit(metric: str) -> str:
    return " %" if is_share(metric) else " nats" if "loss" in metric else ""


def words(metric: str) -> str:
    """The name of a metric for people."""
    return esc(metric.replace("_", " "))


@dataclass(frozen=True)
class Score:
    """A metric with its value and standard error."""

    metric: str
    value: float | None
    error: float | None = None

    def __str__(self) -> str:
        spread = f" <i>± {number(self.metric, self.error)}</i>" if self.error is not None else ""
        return f"{number(self.metric, self.value)}{spread}"

    @property
    def ends(self) -> list[float]:
        if self.value is None or not math.isfinite(self.value):
            return []
        return [self.value - (self.error or 0), self.value + (self.error or 0)]


def score_of(metrics: Mapping[str, Any] | None, metric: str) -> Score | None:
    """A metric of a task with its standard error; None if it was not measured."""
    if not metrics or metric not in metrics:
        return None
    return Score(metric, metrics[metric], metrics.get("standard_errors", {}).get(metric))


def average(scores: Sequence[Score]) -> Score | None:
    """The mean over tasks; None if they have different metrics."""
    if not scores or len({score.metric for score in scores}) > 1 or any(score.value is None for score in scores):
        return None
    values = [score.value for score in scores if score.value is not None]
    errors = [score.error for score in scores if score.error is not None]
    spread = math.sqrt(sum(e * e for e in errors)) / len(scores) if len(errors) == len(scores) else None
    return Score(scores[0].metric, sum(values) / len(scores), spread)


@dataclass(frozen=True)
class Lane:
    """One task on the board."""

    task: str
    rows: int
    metric: str
    now: Score | None
    base: Score | None
    tuned: Score | None
    best: Score | None
    removed: bool = False

    @property
    def scores(self) -> list[Score]:
        return [score for score in (self.now, self.base, self.tuned, self.best) if score is not None]


def board(lanes: Sequence[Lane], cards: str, how: str, move: int) -> str:
    """The averages, then every task on a scale of its metric, with error bars."""
    spans = {metric: _span([lane for lane in lanes if lane.metric == metric]) for metric in {x.metric for x in lanes}}
    rows = "".join(_lane(lane, spans[lane.metric]) for lane in lanes)
    keys = (("now", "this merge"), ("best", "best so far"), ("base", "base"), ("tuned", "fine-tuned on the task"))
    shown = {name for name, _ in keys if any(getattr(lane, name) is not None for lane in lanes)}
    legend = "".join(f'<span><b class="gm-mark {name}"></b>{text}</span>' for name, text in keys if name in shown)
    # The number of the move makes every board a new one, so that a dimmed board lights up even if nothing changed.
    return (
        f'<div class="gm-board" data-move="{move}">{cards}<div class="gm-lanes">{rows}</div>'
        f'<div class="gm-legend">{legend}<span class="gm-how">{how}</span></div></div>'
    )


def _span(lanes: Sequence[Lane]) -> tuple[float, float]:
    ends = [end for lane in lanes for score in lane.scores for end in score.ends] or [0.0, 1.0]
    low, high = min(ends), max(ends)
    air = 0.06 * (high - low) or 0.05 * (abs(high) or 1.0)
    low, high = low - air, high + air
    return (max(0.0, low), min(1.0, high)) if is_share(lanes[0].metric) else (low, high)


def _lane(lane: Lane, span: tuple[float, float]) -> str:
    low, high = span

    def place(value: float) -> str:
        return f"{100 * min(1.0, max(0.0, (value - low) / (high - low))):.2f}%"

    marks = []
    for name in ("base", "tuned", "best", "now"):
        score: Score | None = getattr(lane, name)
        if score is None or not score.ends:
            continue
        first, last = map(place, score.ends)
        what = {"now": "this merge", "tuned": f"fine-tuned on {lane.task}", "best": "best so far"}.get(name, "base")
        if score.error and name in ("now", "best"):
            marks.append(f'<i class="gm-error {name}" style="left:{first};right:calc(100% - {last})"></i>')
        hint = f"{what}: {number(score.metric, score.value)}{unit(score.metric)}"
        marks.append(f'<b class="gm-mark {name}" style="left:{place(score.value or 0.0)}" title="{esc(hint)}"></b>')
    numbers = "".join(
        f'<span class="gm-small"><em>{label}</em> {number(score.metric, score.value)}</span>'
        for label, score in (("base", lane.base), ("tuned", lane.tuned), ("best", lane.best))
        if score is not None
    )
    worth = "forget: lower is better" if lane.removed else words(lane.metric)
    if not lane.removed and not higher_is_better(lane.metric):
        worth += ", lower is better"
    ends = f"<i>{number(lane.metric, low)}</i><i>{number(lane.metric, high)}{unit(lane.metric)}</i>"
    about = f"<b>{esc(lane.task)}</b><span>{worth} · {lane.rows:,} rows</span>"
    return (
        f'<div class="gm-lane"><div class="gm-task">{about}</div>'
        f'<div class="gm-track"><div class="gm-line">{"".join(marks)}</div><div class="gm-ends">{ends}</div></div>'
        f'<div class="gm-value">{lane.now if lane.now is not None else "–"}{unit(lane.metric)}</div>'
        f'<div class="gm-others">{numbers}</div></div>'
    )


def chip(kind: str, text: str) -> str:
    return f'<span class="gm-chip {kind}">{esc(text)}</span>'


def card(kind: str, title: str, score: Score | None, below: str, remark: tuple[str, str] | None = None) -> str:
    """A large number. ``below`` is HTML; a remark is a class and its text."""
    big = f"{number(score.metric, score.value)}<small>{unit(score.metric)}</small>" if score is not None else "–"
    spread = f"<i>± {number(score.metric, score.error)}</i>" if score is not None and score.error is not None else ""
    said = chip(*remark) if remark else ""
    top = f'<h3>{esc(title)}{said}</h3><p class="gm-big">{big} {spread}</p>'
    return f'<div class="gm-card {kind}">{top}<p>{below}</p></div>'


def state(text: str, share: float | None = None) -> str:
    """A text with a progress bar."""
    bar = f'<progress max="1" value="{share:.3f}"></progress>' if share is not None else "<progress></progress>"
    return f'<div class="gm-state" role="status">{bar}<span>{esc(text)}</span></div>'


def notes(texts: Sequence[str]) -> str:
    """Notes that open with a click."""
    rows = "".join(f"<li>{esc(text)}</li>" for text in texts)
    return f'<details class="gm-notes"><summary>Notes ({len(texts)})</summary><ul>{rows}</ul></details>' if rows else ""


def message(text: str, kind: str = "error") -> str:
    """An error, or what was done."""
    return f'<div class="gm-message {kind}" role="alert">{esc(text)}</div>' if text else ""


def picture(image: Any) -> str:
    """An image inside the page; the pixels of small ones are squares."""
    kept = io.BytesIO()
    shown = image.copy()
    shown.thumbnail((256, 256))
    shown.save(kept, "PNG")
    kind = "gm-image small" if max(shown.size) <= 64 else "gm-image"
    return f'<img class="{kind}" alt="" src="data:image/png;base64,{base64.b64encode(kept.getvalue()).decode()}">'


def passage(text: str, letters: int = _LETTERS) -> str:
    """A text; the rest of a long one opens with a click."""
    if len(text) <= letters:
        return f'<span class="gm-text">{esc(text)}</span>'
    return f'<details class="gm-text"><summary>{esc(text[:letters])}…</summary>{esc(text[letters:])}</details>'


def row_input(row: Any) -> str:
    """The image or text of a row."""
    return picture(row.image) if row.image is not None else passage(row.text or "")


def prediction(said: Any) -> str:
    """A prediction, with a sign for right or wrong."""
    if said is None:
        return '<span class="gm-none">–</span>'
    kind, sign = {True: ("right", "✓"), False: ("wrong", "✗"), None: ("open", "")}[said.right]
    sure = f"<small>{100 * said.probability:.0f} %</small>" if said.probability is not None else ""
    text = passage(said.text, _LETTERS // 2) if said.text else '<span class="gm-none">(nothing)</span>'
    return f'<span class="gm-reply {kind}"><b>{sign}</b>{text}{sure}</span>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells in HTML. Each cell names its column, because a row is a card on phones."""
    made = [
        "<tr>" + "".join(f'<td data-of="{esc(c)}">{cell}</td>' for c, cell in zip(columns, row, strict=True)) + "</tr>"
        for row in rows
    ]
    head = "".join(f"<th>{esc(column)}</th>" for column in columns)
    whole = f"<thead><tr>{head}</tr></thead><tbody>{''.join(made)}</tbody>"
    return f'<div class="gm-scroll"><table class="gm-table {kind}">{whole}</table></div>'


def setting_button(place: int, name: str) -> str:
    """A button that shows a measured setting again; ``place`` is its number in the history."""
    return f'<button type="button" data-row="{place}" title="Show this setting again"><code>{esc(name)}</code></button>'


def figure(chart: Any, title: str, text: str) -> str:
    """A box that the page's script draws an Altair chart into."""
    if chart is None:
        return '<p class="gm-empty">There is nothing to draw.</p>'
    spec = esc(json.dumps(chart.to_dict(), ensure_ascii=False))
    return (
        f'<figure class="gm-figure"><figcaption><b>{esc(title)}</b><span>{esc(text)}</span></figcaption>'
        f'<div class="gm-chart" data-spec="{spec}"></div></figure>'
    )
