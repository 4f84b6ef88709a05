"""Tables of docs/results.md and of the pages in results/, made from the JSON files in results/.

`python -m docs.pages` writes them into the pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.tables import table

from experiments.common import removal_report
from experiments.common.tables import shown
from experiments.sentiment import grid, paper, report as sentiment
from experiments.sentiment.settings import ALL_DATA, JOINT
from experiments.studies import report as studies
from experiments.studies.settings import DIALS
from experiments.vision import report as vision

RESULTS = Path(__file__).parent / "results"

Row = tuple[str, ...]


def read(*parts: str, file: str = "results") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.joinpath(*parts, f"{file}.json").read_text("utf-8"))
    return found


def demo_runs() -> list[dict[str, Any]]:
    """The demo of five seeds."""
    return [json.loads(file.read_text("utf-8")) for file in sorted((RESULTS / "demo").glob("seed-*.json"))]


def demo_row(run: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """The row whose name begins with ``prefix``; the weight that may follow differs between seeds."""
    return next(row for row in run["merging"] if row["name"].startswith(prefix))


def demo_table() -> str:
    runs = demo_runs()
    named = {
        "base": "base",
        "average": "average",
        "task-arithmetic, weight 1": "task arithmetic, weight 1",
        "task-arithmetic, tuned": "task arithmetic, tuned on validation images",
        "ties": "TIES",
        "regmean": "RegMean",
        "fisher-averaging": "Fisher averaging",
        "gradient-matching, weight 1": "gradient matching, weight 1",
        "trained on all": "trained on all",
    }
    rows = []
    for name, said in named.items():
        found = [demo_row(run, name) for run in runs]
        accuracies = [100 * one["mean"] for one in found]
        rows.append((said, f"{accuracies[0]:.1f}", shown(accuracies), shown([one["mean_loss"] for one in found], 3)))
    return numbers(("", "seed 0", "five seeds", "loss, five seeds"), rows)


def demo_removal() -> str:
    runs = demo_runs()
    rows = []
    for place, first in enumerate(runs[0]["removal"]):
        found = [run["removal"][place] for run in runs]
        tilted = fmean(100 * one["scores"]["tilted"] for one in found)
        rest = fmean(100 * one["mean_of_rest"] for one in found)
        rows.append((first["name"], f"{tilted:.1f}", f"{rest:.1f}", shown([one["kl"] for one in found], 3)))
    return numbers(("", "tilted", "rest", "KL"), rows)


def sentiment_table(*folder: str) -> str:
    results = read("sentiment", *folder)
    seeds, weights, encoder = results["seeds"], results["settings"]["weights"], not results["seq2seq"]
    reported = paper.ROBERTA if encoder else paper.T5

    def row(title: str, scores: Sequence[Any], known: str = "", average: float | None = None) -> Row:
        theirs = reported[known][5] if known and (encoder or known in reported) else average
        return (
            title,
            shown([sentiment.average(one) for one in scores]),
            shown([sentiment.true_average(one) for one in scores]),
            shown([sentiment.average_loss(one) for one in scores], 3),
            "" if theirs is None else f"{theirs:.1f}",
        )

    def plain(title: str, name: str, known: str = "", average: float | None = None) -> Row:
        return row(title, [seed["scores"][name] for seed in seeds], known, average)

    def swept(title: str, method: str, split: str | None = None, known: str = "") -> Row:
        chosen = [sentiment.best_weight(seed, weights, method, split) if split else 1.0 for seed in seeds]
        scores = [sentiment.at_weight(seed, weights, method, w) for seed, w in zip(seeds, chosen, strict=True)]
        return row(title, scores, known)

    arithmetic, matching = "task-arithmetic", "gradient-matching"
    rows = [
        plain("all data at once", ALL_DATA, "all-data"),
        plain("joint: the four at once, from the base", JOINT),
        plain("base: IMDB alone", "imdb", average=paper.SCALING[arithmetic][0] if encoder else None),
        plain("average of five", "average", "average"),
        plain("Fisher averaging, mean", "fisher-averaging-mean", "fisher-averaging-mean"),
        plain("Fisher averaging, sum", "fisher-averaging-sum", "fisher-averaging-sum"),
        plain("RegMean", "regmean", "regmean"),
        plain("TIES, top 20 %", "ties", "ties"),
        swept("task arithmetic, weight 1", arithmetic, known=arithmetic),
        swept("task arithmetic, tuned on development rows", arithmetic, "dev"),
        swept("task arithmetic, tuned on test, as in the paper", arithmetic, "test", f"{arithmetic} tuned on test"),
        plain("gradient matching, weight 1, N · I", f"{matching}-identity", f"{matching}-identity"),
        plain("gradient matching, weight 1, mean", f"{matching}-mean", f"{matching}-mean"),
        swept("gradient matching, weight 1, sum", matching, known=f"{matching}-sum"),
    ]
    model = "RoBERTa" if encoder else "T5 v1.1 base"
    return numbers(("", "average of five test sets", "over all predictions", "loss", f"paper: average ({model})"), rows)


def vision_table(*parts: str, fixed: Mapping[str, str], swept: Mapping[str, str]) -> str:
    """Base, limits, ``fixed`` merges and those over weights: at weight 1, and where validation rows say."""
    results = read("vision", *parts)
    seeds, weights = list(results["seeds"].values()), results["settings"]["weights"]
    with_loss = "loss" in seeds[0]["references"]["base"]

    def cells(found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        accuracy = shown([vision.over_tasks(one["test"]) for one in found])
        return (accuracy, shown([vision.over_tasks(one["loss"]) for one in found], 3)) if with_loss else (accuracy,)

    empty = ("", "") if with_loss else ("",)
    limits = {"base": "base", "individual": "each task's own model", "joint": "trained on all tasks"}
    rows: list[Row] = [(said, *cells([s["references"][name] for s in seeds]), *empty) for name, said in limits.items()]
    rows += [(said, *cells([s["fixed"][name] for s in seeds]), *empty) for name, said in fixed.items()]
    for name, said in swept.items():
        curves = [s["curves"][name] for s in seeds]
        places = [[weights.index(1.0)] * len(seeds), [vision.best(curve["validation"]) for curve in curves]]
        points = [
            cells(
                [
                    {part: vision.at(curve, place) for part, curve in one.items()}
                    for one, place in zip(curves, chosen, strict=True)
                ]
            )
            for chosen in places
        ]
        rows.append((said, *points[0], *points[1]))
    loss = ("loss",) if with_loss else ()
    header = ("mean of eight test sets", "as it is, or at weight 1", *loss, "at the weight tuned on validation rows")
    return numbers((*header, *loss), rows)


def grid_table() -> str:
    """The table of Hessians: gradient matching by every curvature, with either penalty, of models tuned plainly."""
    results = read("sentiment", "grid")
    rows = []
    kinds = dict.fromkeys((one.curvature, one.labels, one.reduction) for one in grid.cells() if one.penalty)
    for curvature, labels, reduction in kinds:
        cells = []
        for penalty in grid.PENALTIES:
            cell = {"curvature": curvature, "labels": labels, "reduction": reduction, "penalty": penalty}
            scores = sentiment.cell_scores(results, tuning="plain", **cell)
            cells += [shown([of(one) for one in scores], digits) for of, digits in _ACCURACY_AND_LOSS]
        name = {"identity": "N · I"}.get(curvature, curvature)
        rows.append((", ".join(word for word in (name, _LABELS.get(labels, ""), reduction) if word), *cells))
    return numbers(("curvature, labels, reduction", "P = H_0: accuracy", "loss", "P = 0: accuracy", "loss"), rows)


_ACCURACY_AND_LOSS: tuple[tuple[Callable[[Any], float], int], ...] = (
    (sentiment.average, 1),
    (sentiment.average_loss, 3),
)
_LABELS = {"empirical": "the data's labels", "sampled": "drawn labels", "exact": "all labels"}


def removal_table(folder: str, own: Mapping[str, tuple[Callable[[Any], float], int]]) -> str:
    """Ways of removal at equal cost, between their limits; ``own`` are the experiment's columns, and their digits."""
    results = read(folder)
    seeds, floors = results["seeds"], results["floors"]

    def row(title: str, entries: Sequence[Any], gone: Sequence[tuple[float, float]] = (), judged: bool = True) -> Row:
        plain = [[math.exp(one[key]) for one in entries] for key in ("kept", "forget")]
        far = [[one[key] for one in entries] for key in ("kl_kept", "kl_forget")]
        shares = [shown([one[part] for one in gone], 0) if gone else "" for part in (0, 1)]
        cells = [*(shown(values) for values in plain), *(shown(values, 3) for values in far), *shares]
        return (title, *cells, *(shown([of(one) for one in entries], d) if judged else "" for of, d in own.values()))

    limits = {name: [seed["comparison"]["limits"][name] for seed in seeds] for name in ("base", "target")}
    rows = [row("before", limits["base"])]
    for way, title in removal_report.ways_of(results).items():
        entries = [seed["comparison"]["ways"][way]["chosen"] for seed in seeds]
        rows.append(row(title, entries, removal_report.both(results, way)))
    rows.append(row("retrained without it (target)", limits["target"]))
    rows.append(row("target of another seed", floors, removal_report.both(results, None), judged=False))
    header = ("where what stays costs 5 %", "perplexity: stays", "goes", "KL to the target: stays", "goes")
    return numbers((*header, "gone of KL, %", "of the gap in loss, %", *own), rows)


def studies_table(dial: str) -> str:
    results = read("studies")
    header, rows = studies.linear(results) if dial == "linear" else studies.shares(results, dial)
    # A cell may be broken between loss and accuracy only.
    whole = [tuple(cell.replace(" ± ", "\u00a0±\u00a0").replace(" %", "\u00a0%") for cell in row) for row in rows]
    return numbers(tuple(header), whole)


def numbers(header: Row, rows: Sequence[Row]) -> str:
    """A table whose columns, but the first, are aligned to the right."""
    first, _, *rest = table(header, rows).split("\n")
    return "\n".join([first, "|---|" + "---:|" * (len(header) - 1), *rest])


_MATCHING = "gradient matching"
_SCALARS = {
    "gradient-matching": f"{_MATCHING}, H_0 = c · I",
    "gradient-matching, Fisher of the base": f"{_MATCHING}, H_0 = the base's Fisher",
}
TABLES: dict[str, Callable[[], str]] = {
    **{f"results-studies-{dial}": partial(studies_table, dial) for dial in (*DIALS, "linear")},
    "results-demo": demo_table,
    "results-demo-removal": demo_removal,
    "results-sentiment": sentiment_table,
    "results-t5": partial(sentiment_table, "t5"),
    "results-grid": grid_table,
    "results-toxicity": partial(
        removal_table, "toxicity", {"toxic, %": (lambda entry: 100 * entry["toxicity"]["share"], 1)}
    ),
    "results-hallucination": partial(
        removal_table,
        "hallucination",
        {
            "grounding, nats": (lambda entry: entry["forget"] - entry["kept"], 2),
            "hallucination, %": (itemgetter("hallucination"), 1),
        },
    ),
    "results-vision": partial(
        vision_table,
        fixed={"average": "average", "fisher-averaging, mean": "Fisher averaging, mean"},
        swept={
            "ties": "TIES",
            "task-arithmetic": "task arithmetic",
            "gradient-matching": _SCALARS["gradient-matching"],
            "gradient-matching, 0.01 · c": f"{_MATCHING}, H_0 = 0.01 · c · I",
            "gradient-matching, Fisher of the base": _SCALARS["gradient-matching, Fisher of the base"],
        },
    ),
    "results-deit-tiny": partial(
        vision_table,
        "deit-tiny",
        fixed={
            "average": "average",
            "fisher-averaging, mean": "Fisher averaging, the data's labels",
            "fisher-averaging, mean, sampled labels": "Fisher averaging, drawn labels",
            "regmean": "RegMean",
        },
        swept={
            "ties": "TIES",
            "tsv": "TSV",
            "iso-c": "Iso-C",
            "task-arithmetic": "task arithmetic",
            **_SCALARS,
            "gradient-matching, Fisher of the base, sampled labels": f"{_MATCHING}, H_0 = F_0, drawn labels",
            "gradient-matching, Fisher of the base, no penalty": f"{_MATCHING}, H_0 = F_0, `penalty: none`",
            "gradient-matching, Fisher of the base, no penalty, sampled labels": f"{_MATCHING}, H_0 = F_0, drawn "
            "labels, `penalty: none`",
        },
    ),
}
