"""Tables and figures, from results.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ..common.report import STYLES, Report, Results, figure, markdown, spread
from .settings import DIALS

Value = Callable[[Mapping[str, Any], str], float]
"""(case, model) → one number."""

MATCHING = "gradient matching"
NAMES = {
    "task-arithmetic": "task arithmetic, weight 1",
    "task-arithmetic, tuned": "task arithmetic, tuned",
    "fisher-averaging": "Fisher averaging",
    "diagonal": f"{MATCHING}, diagonal",
    "kronecker": f"{MATCHING}, Kronecker",
    "full": f"{MATCHING}, whole Hessians",
    "whole": f"{MATCHING}, whole Gauss-Newton",
    "joint": "joint training",
    "joint again": "joint training again, in another order",
    "joint, from elsewhere": "joint training again, from another start",
    "all data": "all rows at once, the base's too",
}
#: Of the figures, in per cent of the gap: what is far worse than the average lies outside.
LIMITS = (-65, 135)
_BLUE = STYLES["gradient-matching"]["color"]
_LOOKS = {
    "task-arithmetic": {**STYLES["task-arithmetic"], "linestyle": ":"},
    "task-arithmetic, tuned": STYLES["task-arithmetic"],
    "fisher-averaging": STYLES["fisher-averaging"],
    "diagonal": {"color": "#56B4E9", "marker": "d"},
    "kronecker": {"color": _BLUE, "marker": "o"},
}


def said(name: str) -> str:
    """A model's name in tables and figures."""
    known = max((key for key in NAMES if name.startswith(key)), key=len, default="")
    return NAMES[known] + name.removeprefix(known) if known else name


def mean(case: Mapping[str, Any], name: str, what: str = "loss", *, by_rows: bool = False) -> float:
    """Over the test sets; ``by_rows`` each counts by its training rows, as in the sum that joint training minimises."""
    rows = case["trained_on"] if by_rows else dict.fromkeys(case["trained_on"], 1)
    return sum(rows[kind] * one[what] for kind, one in case["scores"][name].items()) / sum(rows.values())


def own_task(case: Mapping[str, Any], name: str) -> float:
    """Accuracy on the base's kind of rows, in per cent."""
    return float(100 * case["scores"][name]["upright"]["accuracy"])


def share(case: Mapping[str, Any], name: str, value: Value) -> float:
    """The part of the way from the average to joint training, in per cent; NaN where there is no way to go."""
    start, here, end = (value(case, each) for each in ("average", name, "joint"))
    return 100 * (here - start) / (end - start) if end != start else math.nan


def cases(results: Results, dial: str) -> list[list[Mapping[str, Any]]]:
    """Places of the dial → the case of every seed."""
    return [list(place) for place in zip(*(seed["studies"][dial] for seed in results["seeds"]), strict=True)]


def methods(results: Results, dial: str) -> list[str]:
    """What is compared in a study: all but the base and the two ends of the gap."""
    return [name for name in cases(results, dial)[0][0]["scores"] if name not in ("base", "average", "joint")]


def _at(value: float | str, dial: str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:g} : 1" if dial == "sizes" else f"{value:g} %" if dial == "kinds" else f"{value:g}"


def shares(results: Results, dial: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows: the ends of the gap as loss / accuracy, and how much of it each model closes in either."""
    places = cases(results, dial)
    accuracy = partial(mean, what="accuracy")
    rows = [
        [
            said(name),
            *(
                f"{fmean(mean(c, name) for c in place):.3f} / {fmean(100 * accuracy(c, name) for c in place):.1f} %"
                for place in places
            ),
        ]
        for name in ("average", "joint")
    ]
    rows += [
        [
            said(name),
            *(" / ".join(_parts([share(c, name, v) for c in place]) for v in (mean, accuracy)) for place in places),
        ]
        for name in methods(results, dial)
    ]
    return [DIALS[dial].label, *(_at(place[0]["value"], dial) for place in places)], rows


def _parts(values: Sequence[float]) -> str:
    """Without a gap there is no part of it."""
    return "none" if any(map(math.isnan, values)) else spread(values, 0)


def linear(results: Results) -> tuple[list[str], list[list[str]]]:
    """How near each model is to the joint one, for both kinds of regression."""
    kinds = list(results["seeds"][0]["linear"])
    names = list(results["seeds"][0]["linear"][kinds[0]])
    header = ["", *(f"{kind}: {what}" for kind in kinds for what in ("distance", "gap in loss, %", "accuracy, %"))]
    rows = []
    for name in names:
        cells = []
        for kind in kinds:
            seeds = [seed["linear"][kind] for seed in results["seeds"]]
            far = [seed[name]["distance"] for seed in seeds]
            cells.append(spread(far, 2) if max(far) > 1e-3 else "0" if max(far) == 0 else f"< {_power(max(far))}")
            cells.append(spread([linear_share(seed, name) for seed in seeds], 0))
            cells.append(spread([100 * seed[name]["accuracy"] for seed in seeds]))
        rows.append([said(name), *cells])
    return header, rows


def linear_share(seed: Mapping[str, Any], name: str) -> float:
    start, here, end = (seed[each]["loss"] for each in ("average", name, "joint"))
    return float(100 * (here - start) / (end - start))


def _power(value: float) -> str:
    """The next power of ten."""
    return f"1e{math.floor(math.log10(value)) + 1}"


def _facts(results: Results, dial: str) -> str:
    places = cases(results, dial)
    names = {
        "moved": "‖θ_t − θ_0‖ / ‖θ_0‖, mean of the tasks",
        "F_0": "mean entry of F_0, a sum over the base's rows",
        "F_0, held out": "the same on as many held-out rows",
        "F_t": "mean entry of F_t, a sum over a task's rows, mean of the tasks",
        "residual": "what is left of the gradient of loss and penalty, as a share of the penalty's",
        "weight": "weight that task arithmetic was given by validation rows",
    }
    rows = [
        [text, *(spread([case["facts"][key] for case in place], 3) for place in places)]
        for key, text in names.items()
        if key in places[0][0]["facts"]
    ]
    return markdown(["", *(_at(place[0]["value"], dial) for place in places)], rows)


def section(results: Results, dial: str) -> str:
    """Return the tables of a study: the part of the gap that is closed, and facts of the models."""
    return f"{share_table(results, dial)}\n\n{_facts(results, dial)}" if dial in results["seeds"][0]["studies"] else ""


def share_table(results: Results, dial: str) -> str:
    """Return how much of the gap each model closes; a cell may be broken between loss and accuracy only."""
    header, rows = shares(results, dial)
    return markdown(
        header, [[cell.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%") for cell in r] for r in rows]
    )


def linear_table(results: Results) -> str:
    """Return how close each model is to the joint one."""
    header, rows = linear(results)
    return markdown(
        header, [[cell.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%") for cell in r] for r in rows]
    )


def _lines(dial: str) -> dict[str, dict[str, Any]]:
    """Model → look. Where P is not what the models were tuned under, or what the study compares with, it is dashed."""
    plain = ["task-arithmetic", "task-arithmetic, tuned", "fisher-averaging"]
    lines = {name: {**_LOOKS[name], "label": said(name)} for name in plain}
    right, wrong = ("P = H_0", "P = 0") if dial == "penalty" else ("P = 0", "P = H_0")
    for kind in ("diagonal", "kronecker"):
        lines[f"{kind}, {right}"] = {**_LOOKS[kind], "label": said(f"{kind}, {right}")}
        other = {"sizes": f"{right}, mean", "base": f"{right}, held out"}.get(dial, wrong)
        lines[f"{kind}, {other}"] = {**_LOOKS[kind], "label": said(f"{kind}, {other}"), "linestyle": "--"}
    if dial == "sizes":
        dashed = {**_LOOKS["fisher-averaging"], "label": said("fisher-averaging, mean"), "linestyle": "--"}
        lines["fisher-averaging, mean"] = dashed
    if dial == "network":
        lines["whole, P = 0"] = {"color": "#D55E00", "marker": "^", "label": said("whole, P = 0")}
    return lines | {"joint again": {"color": "#000000", "marker": "x", "linestyle": "", "label": said("joint again")}}


def draw_curves(results: Results, path: Path, dial: str) -> None:
    """Part of the way from the average to joint training over the dial, with standard deviations over the seeds."""
    places = cases(results, dial)
    panels: dict[str, Value] = {
        "of the gap in loss, %": partial(share, value=mean),
        "of the gap in accuracy, %": partial(share, value=partial(mean, what="accuracy")),
    }
    if dial == "sizes":
        panels["of the gap in loss by rows, %"] = partial(share, value=partial(mean, by_rows=True))
        del panels["of the gap in accuracy, %"]
    lines, end = _lines(dial), 1.12 * len(places) - 0.65
    # No line from one kind of network to another.
    kinds = [[n for n, place in enumerate(places) if isinstance(place[0]["value"], str) == word] for word in (0, 1)]
    with figure(path, 9.5, 5.2, panels=len(panels)) as every:
        for axes, (label, value) in zip(every, panels.items(), strict=True):
            for height, text, at, side, above in (
                (0, "average", end, "right", 2),
                (100, "joint training", -0.47, "left", 8),
            ):
                axes.axhline(height, color="#000000", linewidth=1)
                axes.text(at, height + above, text, ha=side, va="bottom", fontsize=8)
            for number, (name, look) in enumerate(lines.items()):
                found = [[value(case, name) for case in place] for place in places]
                drawn = {"linewidth": 1.6, "elinewidth": 1, "capsize": 2, "markersize": 5, "markerfacecolor": "white"}
                for group in filter(None, kinds):
                    x = [place + 0.05 * (number - len(lines) / 2) for place in group]
                    y = [fmean(found[place]) for place in group]
                    error = [np.std(found[place], ddof=1) if len(found[place]) > 1 else 0 for place in group]
                    axes.errorbar(x, y, error, **drawn, **look if group == kinds[0] else look | {"label": None})
            ticks = [_at(place[0]["value"], dial) for place in places]
            axes.set_xticks(
                range(len(places)),
                [tick.replace("transformer", "trans-\nformer").replace(", tuned ", ",\n") for tick in ticks],
            )
            axes.set_xlim(-0.5, end)
            axes.set_ylim(*LIMITS)
            axes.set_xlabel(DIALS[dial].label)
            axes.set_ylabel(label)
        handles, labels = every[0].get_legend_handles_labels()
        every[0].figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, handlelength=3.5)


def draw_distances(results: Results, path: Path) -> None:
    """How near each merge of linear models is to the joint one."""
    kinds = list(results["seeds"][0]["linear"])
    names = ["task-arithmetic", "average", "fisher-averaging", "diagonal", "kronecker", "full"]
    with figure(path, 9.0, 2.8, panels=len(kinds)) as every:
        for axes, kind in zip(every, kinds, strict=True):
            for place, name in enumerate(names):
                values = [seed["linear"][kind][name]["distance"] for seed in results["seeds"]]
                axes.plot(values, [place] * len(values), "o", color="#767676", markersize=4, markerfacecolor="white")
                axes.plot([fmean(values)], [place], "|", color=_BLUE, markersize=14, markeredgewidth=2)
            axes.set_yticks(range(len(names)), [said(name) for name in names] if axes is every[0] else [])
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_xlim(left=-0.03)
            axes.set_title(kind, fontsize=10)
            axes.set_xlabel("‖θ − θ_joint‖ / ‖θ_0 − θ_joint‖")


REPORT = Report(
    "When does curvature help?",
    "Part of the way from the average to joint training that a merge closes, in per cent, in loss / accuracy; the two "
    "rows above have both ends. Loss and accuracy are means over three test sets: the base's kind of rows, and those "
    "of the two tasks. P is the penalty that gradient matching assumes. Distance is ‖θ − θ_joint‖ / ‖θ_0 − θ_joint‖. "
    "[The page of the studies](README.md) discusses the results.",
    {**{dial.title: partial(section, dial=name) for name, dial in DIALS.items()}, "Linear models": linear_table},
    {**{name: partial(draw_curves, dial=name) for name in DIALS}, "linear": draw_distances},
)
