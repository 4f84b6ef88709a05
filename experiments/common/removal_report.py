"""Tables and a figure of the ways of removal, from results.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from .figures import LOOKS, figure
from .removal import WAYS
from .tables import markdown, shown

Entry = Mapping[str, Any]
Column = tuple[str, Callable[[Entry], float | None], int]
"""Title, value of a test, digits."""

_LOOKS: dict[str, dict[str, Any]] = {
    "negation": LOOKS["task-arithmetic"],
    "negation-theory": {"color": "#333333", "marker": "*"},
    "matching": LOOKS["gradient-matching"],
    "matching-theory": {"color": "#56B4E9", "marker": "X"},
    "influence-kronecker": {"color": "#D55E00", "marker": "^"},
    "influence-diagonal": {"color": "#E69F00", "marker": "v"},
    "npo": {"color": "#009E73", "marker": "D"},
}
#: The figure ends where perplexity has risen by this share.
WIDEST_RISE = 0.25


def share_closed(seed: Entry, entry: Entry, floor: Entry | None = None) -> float | None:
    """100 · (1 − KL / KL before) on text that goes, with the noise floor taken off both where it is given."""
    before, now = seed["comparison"]["limits"]["base"]["kl_forget"], entry["kl_forget"]
    off = floor["kl_forget"] if floor is not None else 0.0
    return None if now is None or before <= off else 100 * (1 - (now - off) / (before - off))


def shares(results: Mapping[str, Any], way: str, which: str = "chosen", floors: bool = False) -> list[float | None]:
    """Of every seed, the share of the gap that a way closes, where it is ``chosen`` or at its ``default``."""
    known = results["floors"] if floors else [None] * len(results["seeds"])
    pairs = zip(results["seeds"], known, strict=True)
    return [share_closed(seed, seed["comparison"]["ways"][way][which], floor) for seed, floor in pairs]


def closed(entry: Entry, before: Entry, target: Entry) -> tuple[float, float]:
    """What is gone, in per cent, of KL to the target and of the gap in loss, on what is removed."""
    loss = (entry["forget"] - before["forget"]) / (target["forget"] - before["forget"])
    return 100 * (1 - entry["kl_forget"] / before["kl_forget"]), 100 * loss


def both(results: Mapping[str, Any], way: str | None) -> list[tuple[float, float]]:
    """Of every seed, what a way has ``closed`` where it is chosen; None is the target of another seed."""
    found = []
    for seed, floor in zip(results["seeds"], results["floors"], strict=True):
        compared = seed["comparison"]
        entry = floor if way is None else compared["ways"][way]["chosen"]
        found.append(closed(entry, compared["limits"]["base"], compared["limits"]["target"]))
    return found


def ways_of(results: Mapping[str, Any]) -> dict[str, str]:
    """The ways that a run has, and what they are called."""
    return {way: label for way, label in WAYS.items() if way in results["seeds"][0]["comparison"]["ways"]}


def sections(results: Mapping[str, Any], columns: Sequence[Column], goes: str, stays: str) -> str:
    """Markdown: the ways at equal cost and at their defaults, what they took, and what follows for influence steps."""
    budget = 100 * results["settings"]["comparing"]["budget"]
    told = (
        "Test data, mean ± standard deviation over seeds. KL(target ‖ model) is in nats per token, on "
        f"{goes} (goes) and {stays} (stays). Gap closed is 1 − KL / KL before, on what goes; in brackets with the "
        "noise floor taken off both, where the model before is farther than it. "
    )
    told += (
        "The noise floor is the target of another seed, trained on the same data with other random numbers, beside "
        "this one's; models of one seed share theirs, and may be nearer to its target than that."
        if results["floors"]
        else "With one seed there is no noise floor."
    )
    return "\n".join(
        [
            f"## Where the perplexity of what stays rose by {budget:g} %\n",
            "Each way has one dial, which is turned as far as the perplexity of validation data that stay rises by at "
            f"most {budget:g} %.\n",
            _table(results, "chosen", columns),
            f"{told}\n\n{_claim(results)}\n\n![KL to the target against what is lost](figures/removal.svg)\n",
            "## At the default of each way\n",
            "Strength 1, the budget of `gradmerge remove` (2 % of the mean loss on held-out rows of the retain "
            "set), or the end of training.\n",
            _table(results, "default", columns),
            "## What each way took\n",
            _took(results),
        ]
    )


def _table(results: Mapping[str, Any], which: str, columns: Sequence[Column]) -> str:
    seeds, floors = results["seeds"], results["floors"]
    limits = {name: [seed["comparison"]["limits"][name] for seed in seeds] for name in seeds[0]["comparison"]["limits"]}
    every: list[Column] = [
        ("perplexity, stays", lambda e: _exp(e["kept"]), 1),
        ("perplexity, goes", lambda e: _exp(e["forget"]), 1),
        ("KL, stays", lambda e: e["kl_kept"], 3),
        ("KL, goes", lambda e: e["kl_forget"], 3),
    ]
    header = ["", "rise on validation data, %", *(title for title, _, _ in every), "gap closed, %"]
    header += [title for title, _, _ in columns]

    def row(label: str, entries: Sequence[Entry], closed: str, rise: str = "") -> list[str]:
        cells = [cell([value(e) for e in entries], digits) for _, value, digits in every]
        own = [
            cell([value(e) for e in entries], digits) if "toxicity" in entries[0] or "bleu" in entries[0] else ""
            for _, value, digits in columns
        ]
        return [label, rise, *cells, closed, *own]

    rows = [row("before", limits["base"], ""), row("tuned on what goes", limits["taught-plain"], "")]
    for way, label in ways_of(results).items():
        entries = [seed["comparison"]["ways"][way][which] for seed in seeds]
        closed = cell(shares(results, way, which), 0)
        beyond = shares(results, way, which, floors=True) if floors else [None]
        if None not in beyond:
            closed += f" ({cell(beyond, 0)})"
        rises = cell([None if e["rise"] is None else 100 * e["rise"] for e in entries], 1)
        rows.append(row(label, entries, closed, rises))
    rows.append(row("trained without it (target)", limits["target"], "100"))
    if floors:
        rows.append(row("target of another seed (noise floor)", floors, ""))
    return markdown(header, rows)


def _claim(results: Mapping[str, Any]) -> str:
    """How influence steps stand beside negation, in words."""
    said = []
    for floors in (False, True) if results["floors"] else (False,):
        found = {way: shares(results, way, floors=floors) for way in ("negation", "influence-kronecker")}
        if any(value is None for values in found.values() for value in values):
            continue
        theirs, ours = (fmean(value for value in values if value is not None) for values in found.values())
        times = f" ({ours / theirs:.1f} times as much)" if theirs > 0 < ours else ""
        numbers = [cell(values, 0) for values in found.values()]
        off = " with the noise floor taken off" if floors else ""
        said.append(f"negation closes {numbers[0]} % of the gap and influence steps {numbers[1]} %{times}{off}")
    return f"At equal cost {'; '.join(said)}." if said else "No share of the gap can be told."


def _took(results: Mapping[str, Any]) -> str:
    seeds = results["seeds"]
    rows = []
    for way, label in ways_of(results).items():
        found = [seed["comparison"]["ways"][way] for seed in seeds]
        dials = [cell([one[which]["dial"] for one in found], 2) for which in ("chosen", "default")]
        took = cell([one.get("seconds") for one in found], 0) if "seconds" in found[0] else ""
        rows.append([label, *dials, took])
    residual = cell([seed["comparison"]["training"]["theory"]["residual"] for seed in seeds], 2)
    return (
        f"{markdown(['', 'dial, chosen', 'dial, default', 'seconds'], rows)}\n"
        "The dial is a strength; of influence steps it is the number of steps, and of NPO how many of "
        f"{results['settings']['comparing']['snapshots']} equal parts of the training. Weights between two places are "
        f"interpolated. Tuned under H_0, the gradient of loss and penalty together that is left is {residual} times "
        "that of the loss alone (0 at the minimum).\n"
    )


def cell(values: Sequence[float | None], digits: int) -> str:
    """Mean and spread over seeds; in words where one is no number, and as a power of ten where it is huge."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    if len(found) < len(values):
        return "not finite"
    return f"10^{math.log10(max(found)):.0f}" if max(found) >= 1e5 else shown(found, digits)


def _exp(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(loss, 700.0))


def draw(results: Mapping[str, Any], path: Path) -> None:
    """KL to the target over the rise of perplexity of what stays, on test data: of what goes, and of what stays."""
    seeds, floors = results["seeds"], results["floors"]
    with figure(path, 10.5, 4.2, panels=2) as axes:
        for axis, (key, title) in zip(axes, (("kl_forget", "what goes"), ("kl_kept", "what stays")), strict=True):
            before = fmean(seed["comparison"]["limits"]["base"][key] for seed in seeds)
            for way, label in ways_of(results).items():
                if way not in _LOOKS:  # the paper's formula ruins the model at once
                    continue
                for number, seed in enumerate(seeds):
                    points = list(_curve(seed, way, key))
                    style = _LOOKS[way] | {"label": label if number == 0 else None, "linewidth": 1.5, "alpha": 0.85}
                    axis.plot(*zip(*points, strict=True), markersize=4, markerfacecolor="white", **style)
            axis.axhline(before, color="black", linewidth=1, linestyle="--", label="before")
            if floors:
                floor = fmean(one[key] for one in floors)
                axis.axhline(floor, color="black", linewidth=1, linestyle=":", label="target of another seed")
            axis.axvline(100 * results["settings"]["comparing"]["budget"], color="#bbbbbb", linewidth=1, zorder=0)
            axis.set_xlabel("rise of the perplexity of what stays, %")
            axis.set_ylabel(f"KL to the target on {title}, nats per token")
            axis.set_ylim(0, 1.5 * max(before, floor if floors else 0.0))
        axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))


def _curve(seed: Entry, way: str, key: str) -> Sequence[tuple[float, float]]:
    """(rise in %, KL) along a path on test data, as far as the figure goes."""
    points: list[tuple[float, float]] = []
    start = seed["comparison"]["limits"]["base"]["kept"]
    for point in seed["comparison"]["ways"][way]["curve"]:
        kept, value = point["test"]["kept"], point["test"][key]
        if kept is None or value is None or math.expm1(min(kept - start, 700.0)) > WIDEST_RISE:
            break
        points.append((100 * math.expm1(kept - start), value))
    return points
