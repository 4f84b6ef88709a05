"""Tables and figure of the removal experiment, with the paper's numbers next to ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..common.report import STYLES, Report, Results, figure, markdown, spread

Entry = Mapping[str, Any]
#: Name of a way in results.json → name in tables and figures.
WAYS = {
    "negation": "negation (task arithmetic)",
    "negation-theory": "negation, tuned under H_0",
    "matching": "gradient matching, bounded (the default)",
    "matching-paper": "gradient matching, the paper's formula",
    "matching-theory": "gradient matching, tuned under H_0",
    "influence-kronecker": "influence steps, Kronecker curvature",
    "influence-diagonal": "influence steps, diagonal curvature",
    "npo": "NPO, with loss on the retain set",
}
#: Measures of what a model writes: name → function, digits. A task has those that its entries have.
WRITTEN: dict[str, tuple[str, Callable[[Entry], float], int]] = {
    "toxic, %": ("toxicity", lambda entry: 100 * entry["toxicity"]["share"], 1),
    "grounding, nats": ("hallucination", lambda entry: entry["forget"] - entry["kept"], 2),
    "hallucination, %": ("hallucination", lambda entry: entry["hallucination"], 1),
}
_STYLES: dict[str, dict[str, Any]] = {
    "negation": STYLES["task-arithmetic"],
    "negation-theory": {"color": "#333333", "marker": "*"},
    "matching": STYLES["gradient-matching"],
    "matching-theory": {"color": "#56B4E9", "marker": "X"},
    "influence-kronecker": {"color": "#D55E00", "marker": "^"},
    "influence-diagonal": {"color": "#E69F00", "marker": "v"},
    "npo": STYLES["fisher-averaging"],
}
#: The figure ends where perplexity has risen by this share.
WIDEST_RISE = 0.25
#: Table tab:toxicity_hallucinations of the paper: task → header, rows.
PAPER = {
    "toxicity": (
        [
            "paper",
            "GPT-2: 100 · mean score",
            "toxic, %",
            "WikiText perplexity",
            "GPT-Neo 1.3B: 100 · mean",
            "toxic, %",
            "ppl.",
        ],
        [
            ["base", "11.2", "15.4", "24.9", "11.9", "16.6", "12.6"],
            ["task arithmetic", "9.8", "13.1", "30.3", "10.7", "14.5", "12.7"],
            ["gradient matching", "9.6", "12.8", "26.9", "10.2", "14.0", "12.8"],
        ],
    ),
    "hallucination": (
        ["paper", "FlanT5 250M: BLEU", "critic, %", "1 − Q², %", "FlanT5 780M: BLEU", "critic, %", "1 − Q², %"],
        [
            ["base", "17.3", "27.5", "11.7", "18.4", "31.5", "12.8"],
            ["task arithmetic", "18.2", "13.8", "7.4", "18.6", "11.8", "7.7"],
            ["gradient matching", "18.2", "12.8", "7.0", "18.0", "8.8", "5.0"],
        ],
    ),
}


def removed(entry: Entry, before: Entry, target: Entry) -> tuple[float, float]:
    """Return the percentage of KL to the target, and of the gap in loss on the forget set, that is removed."""
    loss = (entry["forget"] - before["forget"]) / (target["forget"] - before["forget"])
    return 100 * (1 - entry["kl_forget"] / before["kl_forget"]), 100 * loss


def shares(results: Results, way: str | None, which: str = "chosen") -> list[tuple[float, float]]:
    """Return what a way has ``removed``, by seed; None is the target of another seed."""
    found = []
    for seed, floor in zip(results["seeds"], results["floors"] or [{}] * len(results["seeds"]), strict=True):
        compared = seed["comparison"]
        entry = floor if way is None else compared["ways"][way][which]
        found.append(removed(entry, compared["limits"]["base"], compared["limits"]["target"]))
    return found


def ways_of(results: Results) -> dict[str, str]:
    """Return the ways that a run has, and their titles."""
    return {way: title for way, title in WAYS.items() if way in results["seeds"][0]["comparison"]["ways"]}


def comparison_table(results: Results, which: str = "chosen") -> str:
    """Return losses, KL and measures of what the models write, between base and target."""
    seeds = results["seeds"]
    limits = {name: [seed["comparison"]["limits"][name] for seed in seeds] for name in ("base", "target")}
    own = {title: (of, digits) for title, (key, of, digits) in WRITTEN.items() if key in limits["base"][0]}

    def row(title: str, entries: Sequence[Entry], gone: Sequence[tuple[float, float]] = (), judged: bool = True) -> Any:
        losses = [cell([_exp(one[key]) for one in entries]) for key in ("kept", "forget")]
        far = [cell([one[key] for one in entries], 3) for key in ("kl_kept", "kl_forget")]
        parts = [cell([one[part] for one in gone], 0) if gone else "" for part in (0, 1)]
        written = [cell([of(one) for one in entries], d) if judged else "" for of, d in own.values()]
        return [title, *losses, *far, *parts, *written]

    rows = [row("before", limits["base"])]
    for way, title in ways_of(results).items():
        rows.append(row(title, [s["comparison"]["ways"][way][which] for s in seeds], shares(results, way, which)))
    rows.append(row("retrained without it (target)", limits["target"]))
    if results["floors"]:
        rows.append(row("target of another seed", results["floors"], shares(results, None), judged=False))
    title = "where the retain set costs 5 %" if which == "chosen" else "at the default of each way"
    header = [title, "perplexity: retain set", "forget set", "KL to the target: retain set", "forget set"]
    return markdown([*header, "removed of KL, %", "of the gap in loss, %", *own], rows)


def default_table(results: Results) -> str:
    """Return the same at strength 1, the budget of `gradmerge remove`, or the end of training."""
    return comparison_table(results, "default")


def robustness_table(results: Results) -> str:
    """Return how much of the gap in loss is removed after quantization and after relearning."""
    seeds = results["seeds"]
    if "robust" not in seeds[0]["comparison"]:
        return ""
    rows = []
    for name, title in {"base": "before", **ways_of(results), "target": "retrained without it (target)"}.items():
        cells = []
        for state in ("as it is", "4 bits", "relearned"):
            found = [seed["comparison"]["robust"][name][state] for seed in seeds]
            limits = [[seed["comparison"]["robust"][n]["as it is"] for n in ("base", "target")] for seed in seeds]
            parts = [removed(one, *ends)[1] for one, ends in zip(found, limits, strict=True)]
            cells += [cell([_exp(one["forget"]) for one in found]), cell(parts, 0)]
            cells += [cell([_exp(one["kept"]) for one in found])]
        rows.append([title, *cells])
    columns = ("forget set", "removed, %", "retain set")
    states = ("perplexity", "4 bits", "relearned")
    return markdown(["", *(f"{state}: {column}" for state in states for column in columns)], rows)


def paper_table(results: Results) -> str:
    """Return the paper's numbers, of another model, classifier and choice of prompts."""
    first = results["seeds"][0]["comparison"]["limits"]["base"]
    return markdown(*PAPER["toxicity" if "toxicity" in first else "hallucination"])


def cell(values: Sequence[float | None], digits: int = 1) -> str:
    """Return mean and spread; in words where one is not a number, and as a power of ten where it is huge."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    if len(found) < len(values):
        return "not finite"
    return f"10^{math.log10(max(found)):.0f}" if max(found) >= 1e5 else spread(found, digits)


def _exp(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(loss, 700.0))


def draw(results: Results, path: Path) -> None:
    """Draw KL to the target over the rise of the perplexity of the retain set, on test rows of both sets."""
    seeds, floors = results["seeds"], results["floors"]
    with figure(path, 10.5, 4.2, panels=2) as axes:
        for axis, (key, title) in zip(axes, (("kl_forget", "forget set"), ("kl_kept", "retain set")), strict=True):
            before = fmean(seed["comparison"]["limits"]["base"][key] for seed in seeds)
            for way in filter(_STYLES.__contains__, ways_of(results)):  # the paper's formula ruins the model at once
                for number, seed in enumerate(seeds):
                    style = _STYLES[way] | {
                        "label": WAYS[way] if number == 0 else None,
                        "linewidth": 1.5,
                        "alpha": 0.85,
                    }
                    points = _curve(seed, way, key)
                    axis.plot(*zip(*points, strict=True), markersize=4, markerfacecolor="white", **style)
            axis.axhline(before, color="black", linewidth=1, linestyle="--", label="before")
            floor = fmean(one[key] for one in floors) if floors else 0.0
            if floors:
                axis.axhline(floor, color="black", linewidth=1, linestyle=":", label="target of another seed")
            axis.set_xlabel("rise of the perplexity of the retain set, %")
            axis.set_ylabel(f"KL to the target on the {title}, nats per token")
            axis.set_ylim(0, 1.5 * max(before, floor))
        axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))


def _curve(seed: Entry, way: str, key: str) -> list[tuple[float, float]]:
    """Return (rise in %, KL) along a path on test rows, up to the end of the figure."""
    points: list[tuple[float, float]] = []
    start = seed["comparison"]["limits"]["base"]["kept"]
    for point in seed["comparison"]["ways"][way]["curve"]:
        kept, value = point["test"]["kept"], point["test"][key]
        if kept is None or value is None or math.expm1(min(kept - start, 700.0)) > WIDEST_RISE:
            break
        points.append((100 * math.expm1(kept - start), value))
    return points


REPORT = Report(
    "Removing a data set from a language model",
    "Every way has one strength. It is raised until the perplexity of validation rows of the retain set has risen by "
    "5 %. Numbers are of test rows. KL(target ‖ model) is in nats per token. The target of another seed is the noise "
    "floor: it was trained on the same data with other random numbers. *Relearned* results were fine-tuned on a tenth "
    "of the forget set, with the settings of the model that negation subtracts. *4 bits* are the NF4 weights of "
    "bitsandbytes. *Removed* is the percentage of the gap in loss between base and target.",
    {
        "Where the perplexity of the retain set rose by 5 %": comparison_table,
        "At the default of each way": default_table,
        "After quantization and relearning": robustness_table,
        "In the paper": paper_table,
    },
    {"removal": draw},
)
