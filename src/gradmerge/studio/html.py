"""Results as HTML. All names, labels and rows go through `esc`, so that they are shown and never run."""

from __future__ import annotations

import base64
import html
import io
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..compare.ranking import higher_is_better
from ..text import Measured, printable

#: Metrics that are shares, shown in percent.
SHARES = ("accuracy", "f1", "exact_match", "recall", "precision", "rouge")
#: Letters of a text that are shown at first.
LETTERS = 280
#: Model → what the legend of the board calls it, in the order of the legend.
MARKS = {"now": "this merge", "best": "best so far", "base": "base", "tuned": "fine-tuned on the task"}


def esc(text: object) -> str:
    return html.escape(printable(str(text)))


def is_share(metric: str) -> bool:
    return any(word in metric for word in SHARES)


def number(metric: str, value: float | None) -> str:
    """A value of a metric: a share in percent without the sign, other values with four digits."""
    if value is None or not math.isfinite(value):
        return "–"
    shown = f"{100 * value:.1f}" if is_share(metric) else f"{value:.3f}" if abs(value) < 100 else f"{value:.4g}"
    return shown.replace("-", "−")


def with_error(metric: str, value: float | None) -> str:
    """A value with its standard error, if it has one."""
    error = getattr(value, "error", None)
    return number(metric, value) + (f" ± {number(metric, error)}" if error is not None else "")


def unit(metric: str) -> str:
    return " %" if is_share(metric) else " nats" if "loss" in metric else ""


def words(metric: str) -> str:
    """The name of a metric for people."""
    return esc(metric.replace("_", " "))


def mean(values: Sequence[float | None]) -> float | None:
    """The mean over tasks with its standard error; None if a value is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    errors = [getattr(value, "error", None) or math.nan for value in known]
    return Measured(sum(known) / len(known), math.hypot(*errors) / len(known))


@dataclass(frozen=True)
class Lane:
    """One task on the board."""

    task: str
    rows: int
    metric: str
    values: Mapping[str, float | None]
    """Model, as in `MARKS` → its metric."""
    removed: bool = False

    @property
    def known(self) -> dict[str, float]:
        return {name: v for name in MARKS if (v := self.values.get(name)) is not None and math.isfinite(v)}


def board(lanes: Sequence[Lane], cards: str, how: str) -> str:
    """The averages, then every task on a scale of its metric, with error bars."""
    spans = {metric: _span([lane for lane in lanes if lane.metric == metric]) for metric in {x.metric for x in lanes}}
    rows = "".join(_lane(lane, spans[lane.metric]) for lane in lanes)
    shown = [name for name in MARKS if any(name in lane.known for lane in lanes)]
    legend = "".join(f'<span><b class="gm-mark {name}"></b>{MARKS[name]}</span>' for name in shown)
    # The time makes every board a new one, so that a dimmed board lights up even if nothing changed.
    return (
        f'<div class="gm-board" data-move="{time.monotonic_ns() // 1000}"><div class="gm-cards">{cards}</div>'
        f'<div class="gm-lanes">{rows}</div>'
        f'<div class="gm-legend">{legend}<span class="gm-how">{how}</span></div></div>'
    )


def _span(lanes: Sequence[Lane]) -> tuple[float, float]:
    """The scale of lanes with the same metric."""
    values = [value for lane in lanes for value in lane.known.values()] or [0.0, 1.0]
    errors = [getattr(value, "error", None) or 0.0 for value in values]
    low = min(value - error for value, error in zip(values, errors, strict=False))
    high = max(value + error for value, error in zip(values, errors, strict=False))
    margin = 0.06 * (high - low) or 0.05 * (abs(high) or 1.0)
    low, high = low - margin, high + margin
    return (max(0.0, low), min(1.0, high)) if is_share(lanes[0].metric) else (low, high)


def _lane(lane: Lane, span: tuple[float, float]) -> str:
    low, high = span

    def position(value: float) -> str:
        return f"{100 * min(1.0, max(0.0, (value - low) / (high - low))):.2f}%"

    marks = []
    for name, value in reversed(lane.known.items()):
        error = getattr(value, "error", None)
        if error and name in ("now", "best"):
            ends = f"left:{position(value - error)};right:calc(100% - {position(value + error)})"
            marks.append(f'<i class="gm-error {name}" style="{ends}"></i>')
        hint = f"{MARKS[name]}: {number(lane.metric, value)}{unit(lane.metric)}"
        marks.append(f'<b class="gm-mark {name}" style="left:{position(value)}" title="{hint}"></b>')
    others = "".join(
        f'<span class="gm-small"><em>{name}</em> {number(lane.metric, lane.known[name])}</span>'
        for name in ("base", "tuned", "best")
        if name in lane.known
    )
    worth = "forget: lower is better" if lane.removed else words(lane.metric)
    if not lane.removed and not higher_is_better(lane.metric):
        worth += ", lower is better"
    scale = f"<i>{number(lane.metric, low)}</i><i>{number(lane.metric, high)}{unit(lane.metric)}</i>"
    shown, _, error = with_error(lane.metric, lane.values.get("now")).partition(" ")
    return (
        f'<div class="gm-lane">'
        f'<div class="gm-task"><b>{esc(lane.task)}</b><span>{worth} · {lane.rows:,} rows</span></div>'
        f'<div class="gm-track"><div class="gm-line">{"".join(marks)}</div><div class="gm-ends">{scale}</div></div>'
        f'<div class="gm-value">{shown} <i>{error}</i>{unit(lane.metric)}</div>'
        f'<div class="gm-others">{others}</div></div>'
    )


def chip(kind: str, text: str) -> str:
    return f'<span class="gm-chip {kind}">{esc(text)}</span>'


def card(kind: str, title: str, metric: str, value: float | None, below: str, remark: str = "") -> str:
    """A large number. ``below`` and ``remark`` are HTML."""
    shown, _, error = with_error(metric, value).partition(" ")
    big = f"{shown}<small>{unit(metric)}</small> <i>{error}</i>"
    return f'<div class="gm-card {kind}"><h3>{esc(title)}{remark}</h3><p class="gm-big">{big}</p><p>{below}</p></div>'


def notes(texts: Sequence[str]) -> str:
    """Notes that open with a click."""
    rows = "".join(f"<li>{esc(text)}</li>" for text in texts)
    return f'<details class="gm-notes"><summary>Notes ({len(texts)})</summary><ul>{rows}</ul></details>' if rows else ""


def picture(image: Any) -> str:
    """An image inside the page; the pixels of small ones are squares."""
    kept = io.BytesIO()
    shown = image.copy()
    shown.thumbnail((256, 256))
    shown.save(kept, "PNG")
    kind = "gm-image small" if max(shown.size) <= 64 else "gm-image"
    return f'<img class="{kind}" alt="" src="data:image/png;base64,{base64.b64encode(kept.getvalue()).decode()}">'


def passage(text: str, letters: int = LETTERS) -> str:
    """A text; the rest of a long one opens with a click."""
    if len(text) <= letters:
        return f'<span class="gm-text">{esc(text)}</span>'
    return f'<details class="gm-text"><summary>{esc(text[:letters])}…</summary>{esc(text[letters:])}</details>'


def prediction(said: Any) -> str:
    """A prediction, with a sign for right or wrong."""
    if said is None:
        return '<span class="gm-none">–</span>'
    kind, sign = {True: ("right", "✓"), False: ("wrong", "✗"), None: ("open", "")}[said.right]
    sure = f"<small>{100 * said.probability:.0f} %</small>" if said.probability is not None else ""
    text = passage(said.text, LETTERS // 2) if said.text else '<span class="gm-none">(nothing)</span>'
    return f'<span class="gm-reply {kind}"><b>{sign}</b>{text}{sure}</span>'


def answers(found: Sequence[Any], models: Sequence[str]) -> str:
    """A table of answers: the row, its label, the predictions of some models, and what changed."""
    changed = any(one.change for one in found)
    rows = []
    for one in found:
        cells = [picture(one.row.image) if one.row.image is not None else passage(one.row.text or "")]
        cells += [esc(one.row.label) or "–", *map(prediction, one.predictions)]
        rows.append([*cells, chip("good" if one.change == "right" else "bad", one.change)] if changed else cells)
    # Short labels take little room, long texts all that there is.
    long = any(len(said.text) > 24 for one in found for said in one.predictions if said is not None)
    return table(["row", "label", *models, *([""] if changed else [])], rows, "gm-answers" + " gm-long" * long)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells in HTML. Each cell names its column, because a row is a card on phones."""
    made = [
        "<tr>" + "".join(f'<td data-of="{esc(c)}">{cell}</td>' for c, cell in zip(columns, row, strict=True)) + "</tr>"
        for row in rows
    ]
    head = "".join(f"<th>{esc(column)}</th>" for column in columns)
    whole = f"<thead><tr>{head}</tr></thead><tbody>{''.join(made)}</tbody>"
    return f'<div class="gm-scroll"><table class="gm-table {kind}">{whole}</table></div>'
