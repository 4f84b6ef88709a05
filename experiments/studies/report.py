"""Tables and figures of the studies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ..common.report import STYLES, Report, Results, figure, markdown, spread
from .settings import FACTORS

Case = Mapping[str, Any]
Value = Callable[[Case, str], float]
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
#: Limits of the figures, in per cent of the gap.
LIMITS = (-65, 135)
_STYLES = {
    "task-arithmetic": {**STYLES["task-arithmetic"], "linestyle": ":"},
    "task-arithmetic, tuned": STYLES["task-arithmetic"],
    "fisher-averaging": STYLES["fisher-averaging"],
    "diagonal": {"color": "#56B4E9", "marker": "d"},
    "kronecker": {"color": "#0072B2", "marker": "o"},
}
#: Facts of the fine-tuned models.
FACTS = {
    "moved": "‖θ_t − θ_0‖ / ‖θ_0‖, mean of the tasks",
    "F_0": "mean entry of F_0, a sum over the base's rows",
    "F_0, held out": "the same on as many held-out rows",
    "F_t": "mean entry of F_t, a sum over a task's rows, mean of the tasks",
    "residual": "remaining gradient of loss and penalty, as a share of the penalty's",
    "weight": "weight of task arithmetic, tuned on validation rows",
}


def title_of(name: str) -> str:
    """Return a model's name in tables and figures."""
    known = max((key for key in NAMES if name.startswith(key)), key=len, default="")
    return NAMES[known] + name.removeprefix(known) if known else name


def mean(case: Case, name: str, what: str = "loss", *, by_rows: bool = False) -> float:
    """Return the mean over the test sets; ``by_rows`` weights each by its training rows, as joint training does."""
    rows = case["trained_on"] if by_rows else dict.fromkeys(case["trained_on"], 1)
    return sum(rows[kind] * one[what] for kind, one in case["scores"][name].items()) / sum(rows.values())


accuracy: Value = partial(mean, what="accuracy")


def share(case: Case, name: str, value: Value) -> float:
    """Return the part of the way from the average to joint training, in per cent; NaN if there is no gap."""
    start, here, end = (value(case, each) for each in ("average", name, "joint"))
    return 100 * (here - start) / (end - start) if end != start else math.nan


def cases_of(results: Results, factor: str) -> list[list[Case]]:
    """Return, for every value of the factor, the cases of all seeds."""
    return [list(cases) for cases in zip(*(seed["studies"][factor] for seed in results["seeds"]), strict=True)]


def _labels(results: Results, factor: str) -> list[str]:
    forms = {"sizes": "{:g} : 1", "kinds": "{:g} %"}
    values = [cases[0]["value"] for cases in cases_of(results, factor)]
    return [value if isinstance(value, str) else forms.get(factor, "{:g}").format(value) for value in values]


def share_table(results: Results, factor: str) -> str:
    """Return how much of the gap each model closes in loss / accuracy; the first two rows are its ends."""
    every = cases_of(results, factor)
    rows = []
    for name in every[0][0]["scores"]:
        if name in ("average", "joint"):
            ends = [(fmean(mean(c, name) for c in cases), fmean(accuracy(c, name) for c in cases)) for cases in every]
            cells = [f"{loss:.3f} / {100 * right:.1f} %" for loss, right in ends]
            rows.insert(0 if name == "average" else 1, [title_of(name), *cells])
        elif name != "base":
            parts = [[[share(c, name, value) for c in cases] for value in (mean, accuracy)] for cases in every]
            rows.append([title_of(name), *(" / ".join(map(_spread, part)) for part in parts)])
    return _unbroken([FACTORS[factor].label, *_labels(results, factor)], rows)


def _spread(values: Sequence[float]) -> str:
    return "none" if any(map(math.isnan, values)) else spread(values, 0)


def _unbroken(header: list[str], rows: list[list[str]]) -> str:
    """Return a table whose cells may be broken between loss and accuracy only."""
    kept = [[cell.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%") for cell in row] for row in rows]
    return markdown(header, kept)


def linear_table(results: Results) -> str:
    """Return how close each model is to the joint one, for both kinds of regression."""
    kinds = results["seeds"][0]["linear"]
    rows = []
    for name in next(iter(kinds.values())):
        row = [title_of(name)]
        for kind in kinds:
            seeds = [seed["linear"][kind] for seed in results["seeds"]]
            far = [seed[name]["distance"] for seed in seeds]
            power = math.floor(math.log10(max(far))) + 1 if max(far) else 0
            row.append(spread(far, 2) if max(far) > 1e-3 else f"< 1e{power}" if max(far) else "0")
            losses = [[seed[each]["loss"] for each in ("average", name, "joint")] for seed in seeds]
            row.append(spread([100 * (here - start) / (end - start) for start, here, end in losses], 0))
            row.append(spread([100 * seed[name]["accuracy"] for seed in seeds]))
        rows.append(row)
    columns = [f"{kind}: {what}" for kind in kinds for what in ("distance", "gap in loss, %", "accuracy, %")]
    return _unbroken(["", *columns], rows)


def section(results: Results, factor: str) -> str:
    """Return the tables of a study: the part of the gap that is closed, and facts of the models."""
    if factor not in results["seeds"][0]["studies"]:
        return ""
    every = cases_of(results, factor)
    rows = [
        [title, *(spread([case["facts"][key] for case in cases], 3) for cases in every)]
        for key, title in FACTS.items()
        if key in every[0][0]["facts"]
    ]
    return f"{share_table(results, factor)}\n\n{markdown(['', *_labels(results, factor)], rows)}"


def _lines(factor: str) -> dict[str, dict[str, Any]]:
    """Return model → style. The wrong P, or what the study compares with, is dashed."""
    right, wrong = ("P = H_0", "P = 0") if factor == "penalty" else ("P = 0", "P = H_0")
    other = {"sizes": f"{right}, mean", "base": f"{right}, held out"}.get(factor, wrong)
    lines = {name: _STYLES[name] for name in ("task-arithmetic", "task-arithmetic, tuned", "fisher-averaging")}
    for kind in ("diagonal", "kronecker"):
        lines[f"{kind}, {right}"] = _STYLES[kind]
        lines[f"{kind}, {other}"] = {**_STYLES[kind], "linestyle": "--"}
    if factor == "sizes":
        lines["fisher-averaging, mean"] = {**_STYLES["fisher-averaging"], "linestyle": "--"}
    if factor == "network":
        lines["whole, P = 0"] = {"color": "#D55E00", "marker": "^"}
    lines["joint again"] = {"color": "#000000", "marker": "x", "linestyle": ""}
    return {name: {**style, "label": title_of(name)} for name, style in lines.items()}


def draw_curves(results: Results, path: Path, factor: str) -> None:
    """Draw the part of the gap that is closed over the factor, with standard deviations over the seeds."""
    every, lines = cases_of(results, factor), _lines(factor)
    panels: dict[str, Value] = {"loss": mean, "accuracy": accuracy}
    if factor == "sizes":
        panels = {"loss": mean, "loss by rows": partial(mean, by_rows=True)}
    # No line connects one kind of network with another.
    words = [isinstance(cases[0]["value"], str) for cases in every]
    groups = [group for group in (np.flatnonzero(np.array(words) == word) for word in (False, True)) if len(group)]
    with figure(path, 9.5, 5.2, panels=len(panels)) as axes:
        for axis, (gap, value) in zip(axes, panels.items(), strict=True):
            for height, text in ((0, "average"), (100, "joint training")):
                axis.axhline(height, color="#000000", linewidth=1)
                axis.annotate(text, (0, height), (2, 2), ("axes fraction", "data"), "offset points", fontsize=8)
            for number, (name, style) in enumerate(lines.items()):
                found = np.array([[share(case, name, value) for case in cases] for cases in every])
                errors = found.std(1, ddof=1) if found.shape[1] > 1 else np.zeros(len(found))
                for group in groups:
                    x = group + 0.05 * (number - len(lines) / 2)
                    shown = {**style, "linewidth": 1.6, "markersize": 5, "markerfacecolor": "white", "capsize": 2}
                    shown["label"] = style["label"] if group is groups[0] else None
                    axis.errorbar(x, found.mean(1)[group], errors[group], **shown)
            ticks = [label.replace("transformer", "trans-\nformer") for label in _labels(results, factor)]
            axis.set_xticks(range(len(every)), [tick.replace(", tuned ", ",\n") for tick in ticks])
            axis.set_ylim(*LIMITS)
            axis.set(xlabel=FACTORS[factor].label, ylabel=f"of the gap in {gap}, %")
        handles, labels = axes[0].get_legend_handles_labels()
        axes[0].figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, handlelength=3.5)


def draw_distances(results: Results, path: Path) -> None:
    """Draw how close each merge of linear models is to the joint one."""
    kinds = list(results["seeds"][0]["linear"])
    names = ["task-arithmetic", "average", "fisher-averaging", "diagonal", "kronecker", "full"]
    with figure(path, 9.0, 2.8, panels=len(kinds)) as every:
        for axes, kind in zip(every, kinds, strict=True):
            for height, name in enumerate(names):
                values = [seed["linear"][kind][name]["distance"] for seed in results["seeds"]]
                axes.plot(values, [height] * len(values), "o", color="#767676", markersize=4, markerfacecolor="white")
                axes.plot([fmean(values)], [height], "|", color="#0072B2", markersize=14, markeredgewidth=2)
            axes.set_yticks(range(len(names)), map(title_of, names) if axes is every[0] else [])
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_xlim(left=-0.03)
            axes.set(title=kind, xlabel="‖θ − θ_joint‖ / ‖θ_0 − θ_joint‖")


REPORT = Report(
    "When does curvature help?",
    "How much of the gap between the average and joint training a merge closes, in per cent of loss / accuracy. The "
    "first two rows are both ends. Loss and accuracy are means over three test sets: the base's rows, and those of "
    "the tasks. P is the penalty that gradient matching assumes. Distance is ‖θ − θ_joint‖ / ‖θ_0 − θ_joint‖.\n\n"
    "A network 64 → 32 → 32 → 10 with tanh learns 300 digits, and is fine-tuned on two tasks of 310 other digits each: "
    "rotated by 30° to the left and to the right. All three kinds are tested on 577 digits. `mean` is `reduction: "
    "mean`. `held out` estimates the curvature of the base on held-out rows. The [main results](../README.md) are on "
    "one page.",
    {
        **{factor.title: partial(section, factor=name) for name, factor in FACTORS.items()},
        "Linear models": linear_table,
    },
    {**{name: partial(draw_curves, factor=name) for name in FACTORS}, "linear": draw_distances},
)
