"""Tables and figures of the sentiment experiment, with the paper's numbers next to ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ..common.report import STYLES, Report, Results, band, figure, markdown, spread
from .merges import ARITHMETIC, MATCHING, SWEPT, grid
from .settings import ALL_DATA, BASE, JOINT, SETS

Score = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Data set → split → right labels, rows and mean loss."""

TITLES = {"imdb": "IMDB", "yelp": "Yelp", "rotten_tomatoes": "RT", "sst2": "SST2", "amazon": "Amazon"}
#: Table sentiment_analysis of the paper (Daheim et al., ICLR 2024): RoBERTa-base, average of five test sets.
PAPER = {
    "all-data": 95.0,
    "imdb": 92.2,
    "average": 94.1,
    "fisher-averaging-mean": 94.3,
    "fisher-averaging-sum": 94.3,
    "regmean": 94.5,
    "ties": 94.2,
    "task-arithmetic": 91.8,
    "task-arithmetic tuned on test": 94.4,
    "gradient-matching-identity": 94.3,
    "gradient-matching-mean": 94.5,
    "gradient-matching-sum": 94.5,
}
#: Its figure scaling_factors_fig, right: average accuracy at the weights 0, 0.1, … 1.
PAPER_WEIGHTS = tuple(n / 10 for n in range(11))
PAPER_SCALING = {
    ARITHMETIC: (92.2, 93.5, 94.1, 94.3, 94.3, 94.3, 93.9, 93.6, 93.2, 92.7, 91.8),
    MATCHING: (92.2, 93.9, 94.3, 94.4, 94.5, 94.5, 94.5, 94.5, 94.4, 94.5, 94.5),
}
#: Its figure mismatch, right: (gradient mismatch, test error above the all-data model's in points). The figure numbers
#: its tasks and does not name them: the errors are those of table sentiment_analysis in alphabetical order.
PAPER_MISMATCH = {
    ARITHMETIC: {
        "amazon": (0.1487, 2.1),
        "imdb": (0.2831, 4.4),
        "rotten_tomatoes": (0.3742, 5.2),
        "sst2": (0.4061, 3.0),
        "yelp": (0.2832, 2.0),
    },
    MATCHING: {
        "amazon": (0.0357, 0.2),
        "imdb": (0.0643, 0.1),
        "rotten_tomatoes": (0.1161, 1.0),
        "sst2": (0.0695, 1.0),
        "yelp": (0.0808, 0.3),
    },
}


def accuracy(score: Score, name: str, split: str = "test") -> float:
    """Return the percentage of right labels."""
    return 100 * score[name][split]["right"] / score[name][split]["rows"]


def average(score: Score, split: str = "test") -> float:
    """Return the mean accuracy of the data sets."""
    return fmean(accuracy(score, name, split) for name in SETS)


def true_average(score: Score) -> float:
    """Return the accuracy over all predictions together."""
    right, rows = (sum(score[name]["test"][what] for name in SETS) for what in ("right", "rows"))
    return 100 * right / rows


def average_loss(score: Score) -> float:
    """Return the mean test loss of the data sets."""
    return fmean(score[name]["test"]["loss"] for name in SETS)


def at_weight(seed: Mapping[str, Any], weights: Sequence[float], method: str, weight: float) -> Score:
    """Return the score of a method at one weight."""
    found: Score = seed["sweep"][method][list(weights).index(weight)]
    return found


def best_weight(seed: Mapping[str, Any], weights: Sequence[float], method: str, split: str) -> float:
    """Return the weight up to 1 with the best average on a split, the smallest of several."""

    def key(weight: float) -> tuple[float, float]:
        return average(at_weight(seed, weights, method, weight), split), -weight

    return max((weight for weight in weights if weight <= 1), key=key)


def tuned_scores(results: Results, method: str, split: str | None) -> list[Score]:
    """Return every seed's score at the weight that is best on a split, or at 1."""
    weights = results["settings"]["weights"]
    chosen = [best_weight(seed, weights, method, split) if split else 1.0 for seed in results["seeds"]]
    return [at_weight(seed, weights, method, w) for seed, w in zip(results["seeds"], chosen, strict=True)]


def merging_table(results: Results) -> str:
    """Return the accuracies of all merges and of the models that they are compared with."""

    def row(title: str, scores: Sequence[Score], key: str = "") -> list[str]:
        means = [spread([of(one) for one in scores]) for of in (average, true_average)]
        loss = spread([average_loss(one) for one in scores], 3)
        return [title, *means, loss, f"{PAPER[key]:.1f}" if key else ""]

    def named(title: str, name: str, key: str | None = None) -> list[str]:
        return row(title, [seed["scores"][name] for seed in results["seeds"]], name if key is None else key)

    def tuned(title: str, method: str, split: str | None, key: str) -> list[str]:
        return row(title, tuned_scores(results, method, split), key)

    rows = [
        named("all data at once", ALL_DATA),
        named("joint: the four at once, from the base", JOINT, ""),
        named("base: IMDB alone", BASE),
        named("average of five", "average"),
        named("Fisher averaging, mean", "fisher-averaging-mean"),
        named("Fisher averaging, sum", "fisher-averaging-sum"),
        named("RegMean", "regmean"),
        named("TIES, top 20 %", "ties"),
        tuned("task arithmetic, weight 1", ARITHMETIC, None, ARITHMETIC),
        tuned("task arithmetic, tuned on development rows", ARITHMETIC, "dev", ""),
        tuned("task arithmetic, tuned on test, as in the paper", ARITHMETIC, "test", f"{ARITHMETIC} tuned on test"),
        named("gradient matching, weight 1, N · I", f"{MATCHING}-identity"),
        named("gradient matching, weight 1, mean", f"{MATCHING}-mean"),
        tuned("gradient matching, weight 1, sum", MATCHING, None, f"{MATCHING}-sum"),
    ]
    header = ["", "average of five test sets", "over all predictions", "loss", "paper: average (RoBERTa)"]
    return markdown(header, rows)


def by_set_table(results: Results) -> str:
    """Return the accuracy of models and merges on every test set."""
    rows = []
    for name in results["seeds"][0]["scores"]:
        scores = [seed["scores"][name] for seed in results["seeds"]]
        rows.append([name, *(spread([accuracy(one, each) for one in scores]) for each in SETS)])
    return markdown(["accuracy, %", *TITLES.values()], rows)


def weights_table(results: Results) -> str:
    """Return the average accuracy over the weight of all tasks, ours and the paper's."""
    weights = results["settings"]["weights"]
    rows = []
    for weight in weights:
        cells = [spread([average(at_weight(s, weights, method, weight)) for s in results["seeds"]]) for method in SWEPT]
        known = weight in PAPER_WEIGHTS
        cells += [f"{PAPER_SCALING[m][PAPER_WEIGHTS.index(weight)]:.1f}" if known else "" for m in SWEPT]
        rows.append([f"{weight:g}", *cells])
    names = [str(STYLES[method]["label"]) for method in SWEPT]
    return markdown(["weight", *names, *(f"paper: {name}" for name in names)], rows)


def _mismatch(results: Results, method: str, name: str) -> tuple[list[float], list[float]]:
    """Return, by seed, the gradient mismatch to the all-data model and the test error above its in points."""
    merged = tuned_scores(results, method, None)
    distances = [seed["mismatch"][name]["distance"][method][ALL_DATA] for seed in results["seeds"]]
    best = [accuracy(seed["scores"][ALL_DATA], name) for seed in results["seeds"]]
    return distances, [b - accuracy(one, name) for b, one in zip(best, merged, strict=True)]


def mismatch_table(results: Results) -> str:
    """Return mismatch and error of both methods at weight 1, ours and the paper's."""
    if not _has_mismatch(results):
        return ""
    rows = []
    for name in SETS:
        found = [_mismatch(results, method, name) for method in SWEPT]
        cells = [spread(found[m][part], digits) for part, digits in ((0, 4), (1, 1)) for m in (0, 1)]
        paper = [" → ".join(f"{PAPER_MISMATCH[m][name][part]:g}" for m in SWEPT) for part in (0, 1)]
        rows.append([TITLES[name], *cells, *paper])
    names = [str(STYLES[method]["label"]) for method in SWEPT]
    header = ["target: all data", *(f"mismatch, {n}" for n in names), *(f"error, {n}" for n in names)]
    return markdown([*header, "paper: mismatch", "paper: error"], rows)


def _has_mismatch(results: Results) -> bool:
    return all(seed["mismatch"].keys() == set(SETS) for seed in results["seeds"])


_LABELS = {"empirical": "the data's labels", "sampled": "drawn labels", "exact": "all labels"}


def grid_table(results: Results) -> str:
    """Return the table of Hessians: gradient matching with every curvature, with and without the penalty."""
    if "grid" not in results["seeds"][0]:
        return ""
    rows = []
    for merge in grid():
        if merge.penalty == "none":
            continue
        cells = []
        for penalty in ("H_0", "none"):
            key = ("plain", merge.curvature, merge.labels, merge.reduction, penalty)
            scores = [c["score"] for seed in results["seeds"] for c in seed["grid"]["cells"] if _key(c) == key]
            cells += [spread([average(one) for one in scores]), spread([average_loss(one) for one in scores], 3)]
        name = {"identity": "N · I"}.get(merge.curvature, merge.curvature)
        rows.append([", ".join(filter(None, [name, _LABELS.get(merge.labels, ""), merge.reduction])), *cells])
    return markdown(["curvature, labels, reduction", "P = H_0: accuracy", "loss", "P = 0: accuracy", "loss"], rows)


def _key(cell: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(cell[name] for name in ("tuning", "curvature", "labels", "reduction", "penalty"))


def draw_scaling(results: Results, path: Path) -> None:
    """Draw accuracy over the weight of all tasks, measured and in the paper."""
    seeds, weights = results["seeds"], results["settings"]["weights"]
    with figure(path, width=8.5, height=3.4, panels=2) as (ours, theirs):
        for method in SWEPT:
            runs = [[average(at_weight(seed, weights, method, weight)) for weight in weights] for seed in seeds]
            band(ours, weights, runs, **STYLES[method])
            band(theirs, PAPER_WEIGHTS, [PAPER_SCALING[method]], **STYLES[method])
        for target, label, style in ((ALL_DATA, "all data at once", ":"), (BASE, "base", "--")):
            level = fmean(average(seed["scores"][target]) for seed in seeds)
            for axes, height in ((ours, level), (theirs, PAPER[target])):
                axes.axhline(height, color="#767676", linestyle=style, linewidth=1.2, label=label)
        ours.set(title="measured", xlabel="weight of every task", ylabel="accuracy, mean of 5 sets (%)")
        theirs.set(title="the paper's (RoBERTa)", xlabel="weight of every task")
        ours.legend(loc="best", fontsize=8)


def draw_mismatch(results: Results, path: Path) -> None:
    """Draw test error over gradient mismatch; an arrow leads from task arithmetic to gradient matching."""

    def measured(method: str, name: str) -> tuple[float, float]:
        distances, errors = _mismatch(results, method, name)
        return fmean(distances), fmean(errors)

    panels: dict[str, Callable[[str, str], tuple[float, float]]] = {
        "measured": measured,
        "the paper's (RoBERTa)": lambda method, name: PAPER_MISMATCH[method][name],
    }
    with figure(path, width=8.5, height=3.6, panels=2) as every:
        for axes, (title, point) in zip(every, panels.items(), strict=True):
            if title == "measured" and not _has_mismatch(results):
                continue
            for method in SWEPT:
                x, y = zip(*(point(method, name) for name in SETS), strict=True)
                axes.plot(x, y, linestyle="", markersize=8, **STYLES[method])
            for name in SETS:
                start, end = (point(method, name) for method in SWEPT)
                axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#bbbbbb"})
                axes.annotate(TITLES[name], start, (5, 4), textcoords="offset points", fontsize=8)
            axes.set(title=title, xlabel="gradient mismatch ‖∇ℓ(merged) − ∇ℓ(all data)‖")
            axes.margins(x=0.15, y=0.12)
        every[0].set_ylabel("test error above the target's (points)")
        every[1].legend(loc="best", fontsize=8)


REPORT = Report(
    "Sentiment: four tasks merged into a model of IMDB",
    "Accuracies are percentages of right labels on test sets. Curvature is the sum of squared gradients of single "
    "examples, taken at the data's labels where nothing else is said. Everything is merged, the head too. Averages, "
    "Fisher averaging and RegMean merge five models, the base being one; *of four* leaves the base out. The paper's "
    "numbers are of RoBERTa-base and larger data sets.",
    {
        "Merged models": merging_table,
        "Every test set": by_set_table,
        "One weight for all tasks": weights_table,
        "Gradient mismatch": mismatch_table,
        "Every kind of curvature, at weight 1": grid_table,
    },
    {"scaling": draw_scaling, "mismatch": draw_mismatch},
)
