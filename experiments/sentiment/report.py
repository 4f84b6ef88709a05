"""Tables and figures, from results.json alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..common.figures import LOOKS, band, figure
from ..common.tables import markdown, shown
from . import grid, paper
from .data import BASE, SETS, TASKS, TITLES
from .merging import RULES, SWEPT
from .settings import ALL_DATA, JOINT

Score = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Data set → split → right labels, rows and mean loss."""

TARGET_TITLES = {ALL_DATA: "all data", JOINT: "joint"}
_HEADER = [*TITLES.values(), "avg.", "true avg."]


def accuracy(score: Score, name: str, split: str = "test") -> float:
    """Percentage of right labels."""
    return 100 * score[name][split]["right"] / score[name][split]["rows"]


def average(score: Score, split: str = "test") -> float:
    """The mean over data sets of their accuracies."""
    return statistics.fmean(accuracy(score, name, split) for name in SETS)


def true_average(score: Score, split: str = "test") -> float:
    """The accuracy over all predictions together."""
    right, rows = (sum(score[name][split][what] for name in SETS) for what in ("right", "rows"))
    return 100 * right / rows


def average_loss(score: Score, split: str = "test") -> float:
    return statistics.fmean(score[name][split]["loss"] for name in SETS)


def standard_error(score: Score) -> float:
    """Of the average accuracy of one model, from the test sets being samples: √(Σ p(1−p)/n) / T, in points."""
    shares = [(accuracy(score, name) / 100, score[name]["test"]["rows"]) for name in SETS]
    return 100 * math.sqrt(sum(p * (1 - p) / n for p, n in shares)) / len(SETS)


def at_weight(seed: Mapping[str, Any], weights: Sequence[float], method: str, weight: float) -> Score:
    found: Score = seed["sweep"][method][list(weights).index(weight)]
    return found


def best_weight(seed: Mapping[str, Any], weights: Sequence[float], method: str, split: str) -> float:
    """The weight, up to 1, with the best average on a split; the smallest of several."""
    return max(
        (weight for weight in weights if weight <= 1),
        key=lambda weight: (average(at_weight(seed, weights, method, weight), split), -weight),
    )


def tables(results: Mapping[str, Any]) -> str:
    """results.md."""
    parts = [
        _head(results),
        _merging(results),
        _models(results),
        _of_four(results),
        _scaling(results),
    ]
    if _has_mismatch(results):
        parts.append(_mismatch(results))
    if all("grid" in seed for seed in results["seeds"]):
        parts.append(_grid(results))
    return "\n".join(parts)


def _has_mismatch(results: Mapping[str, Any]) -> bool:
    """Of all data sets: a run that was stopped may lack some."""
    return all(seed["mismatch"].keys() == set(SETS) for seed in results["seeds"])


def cell_scores(results: Mapping[str, Any], **cell: str) -> list[Score]:
    """Of a cell of the grid, on every seed that has it."""
    every = [one for seed in results["seeds"] for one in seed["grid"]["cells"]]
    return [one["score"] for one in every if all(one[name] == value for name, value in cell.items())]


def _head(results: Mapping[str, Any]) -> str:
    rows, settings, where = results["rows"], results["settings"], results["machine"]
    counts = [[TITLES[name], *(f"{rows[name][column]:,}" for column in rows[name])] for name in SETS]
    seeds = ", ".join(str(seed["seed"]) for seed in results["seeds"])
    seconds = [sum(seed["seconds"].values()) for seed in results["seeds"]]
    error = statistics.fmean(standard_error(seed["scores"][ALL_DATA]) for seed in results["seeds"])
    return (
        "# Sentiment: four tasks merged into a model of IMDB\n\n"
        f"`{results['command']}`\n\n"
        f"Seeds {seeds}; {where['device']}, torch {where['torch']}, transformers {where['transformers']}, gradmerge "
        f"{where['gradmerge']}; {shown(seconds, 0)} s a seed, all stages together. Learning rate "
        f"{settings['base_rate']:g} from the pre-trained model and {settings['task_rate']:g} from the base, batches of "
        f"{settings['batch_size']}, {settings['tokens']} tokens. Numbers are percentages of right labels on test sets, "
        "mean ± standard deviation over seeds; that the test sets are samples gives one model's average a standard "
        f"error of about {error:.2f} points. {_pretrained(results)}Curvature is the sum of squared gradients of "
        f"single examples with the data's labels over each model's training set{_at_most(settings)}, "
        f"δ = {settings['damping']:g}.\n\n" + markdown(["rows", *rows[BASE]], counts)
    )


def _pretrained(results: Mapping[str, Any]) -> str:
    if (found := results.get("pretrained")) is None:
        return ""
    how, without = results["settings"]["pretraining"], found["base without"]
    return (
        f"The T5 has {found['parameters'] / 1e6:.1f} million parameters and {found['vocabulary']:,} tokens. It was "
        f"pre-trained once for all seeds, in {found['seconds']:.0f} s: {how['training']['epochs']} epochs over "
        f"{found['examples']:,} pieces of {how['tokens']} tokens of {', '.join(how['texts'])}, without labels; it is "
        f"trained by {how['training'].get('optimizer', 'AdamW')}. "
        f"From random weights the base has {100 * without['right'] / without['rows']:.1f} on IMDB (loss "
        f"{without['loss']:.3f}). "
    )


def _at_most(settings: Mapping[str, Any]) -> str:
    most = settings["curvature_examples"]
    return "" if most is None else f" (at most {most:,} examples)"


def _cells(scores: Sequence[Score]) -> list[str]:
    return [
        *(shown([accuracy(score, name) for score in scores]) for name in SETS),
        shown([average(score) for score in scores]),
        shown([true_average(score) for score in scores]),
        shown([average_loss(score) for score in scores], 3),
    ]


def _published(results: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    return paper.T5 if results["seq2seq"] else paper.ROBERTA


def _merging(results: Mapping[str, Any]) -> str:
    seeds, weights = results["seeds"], results["settings"]["weights"]
    known = _published(results)

    def plain(name: str) -> list[Score]:
        return [seed["scores"][name] for seed in seeds]

    def tuned(split: str) -> list[Score]:
        return [
            at_weight(seed, weights, "task-arithmetic", best_weight(seed, weights, "task-arithmetic", split))
            for seed in seeds
        ]

    def full(method: str) -> list[Score]:
        return [at_weight(seed, weights, method, 1.0) for seed in seeds]

    listed: list[tuple[str, str, list[Score]]] = [
        ("all-data", "all data at once", plain(ALL_DATA)),
        ("", "joint: the four tasks at once, from the base", plain(JOINT)),
        ("", "base: IMDB alone", plain(BASE)),
        *((rule, RULES[rule], plain(rule)) for rule in ("average", "fisher-averaging-mean", "fisher-averaging-sum")),
        *((rule, RULES[rule], plain(rule)) for rule in ("regmean", "ties")),
        ("task-arithmetic", "task arithmetic (weight 1)", full("task-arithmetic")),
        ("", "task arithmetic (tuned on development rows)", tuned("dev")),
        ("task-arithmetic tuned on test", "task arithmetic (tuned on test, as in the paper)", tuned("test")),
        *((rule, RULES[rule], plain(rule)) for rule in ("gradient-matching-identity", "gradient-matching-mean")),
        ("gradient-matching-sum", "gradient matching (sum)", full("gradient-matching")),
    ]
    ours = [
        [title, *_cells(scores), *((f"{known[key][5]:.1f}", f"{known[key][6]:.1f}") if key in known else ("", ""))]
        for key, title, scores in listed
    ]
    theirs = [[title, *(f"{value:.1f}" for value in known[key])] for key, title, _ in listed if key in known]
    picked = {
        split: ", ".join(f"{best_weight(seed, weights, 'task-arithmetic', split):g}" for seed in seeds)
        for split in ("dev", "test")
    }
    model = "T5 v1.1 base, table t5" if results["seq2seq"] else "RoBERTa-base, tables sentiment_analysis and hessians"
    return (
        "## Merged models\n\n"
        + markdown(["", *_HEADER, "loss", "paper: avg.", "paper: true avg."], ours)
        + "\navg.: mean over the five test sets; true avg.: over all predictions; loss: mean over sets of −ln p of "
        "the right label. Averages, Fisher averaging and RegMean are of five models, the base being one. The paper "
        "does not say whether it counts the base; its average scores 94.1, as its task arithmetic does at weight 0.2 "
        "= 1/5, where the two are the same model. Everything is merged, the head too, and all but the tuned rows use "
        f"weight 1. Task arithmetic tuned on development rows takes the weight {picked['dev']} (per seed), tuned "
        f"on test {picked['test']}; N is the number of training rows.\n\n"
        f"The paper's ({model}):\n\n" + markdown(["", *_HEADER], theirs)
    )


def _models(results: Mapping[str, Any]) -> str:
    rows = [[TITLES[name], *_cells([seed["scores"][name] for seed in results["seeds"]])] for name in TASKS]
    return "## The fine-tuned models, each on every test set\n\n" + markdown(["fine-tuned on", *_HEADER, "loss"], rows)


def _of_four(results: Mapping[str, Any]) -> str:
    four = [rule for rule in RULES if rule.endswith(" of four")]
    rows = [[RULES[rule], *_cells([seed["scores"][rule] for seed in results["seeds"]])] for rule in four]
    return "## Averages of the four fine-tuned models alone\n\n" + markdown(["", *_HEADER, "loss"], rows)


def _scaling(results: Mapping[str, Any]) -> str:
    seeds, weights = results["seeds"], results["settings"]["weights"]
    published = dict(zip(paper.SCALING_WEIGHTS, zip(*(paper.SCALING[m] for m in SWEPT), strict=True), strict=True))
    rows = []
    for weight in weights:
        ours = [shown([average(at_weight(seed, weights, method, weight)) for seed in seeds]) for method in SWEPT]
        losses = [shown([average_loss(at_weight(seed, weights, m, weight)) for seed in seeds], 3) for m in SWEPT]
        rows.append([f"{weight:g}", *ours, *losses, *(f"{v:.1f}" for v in published.get(weight, ()))])
        rows[-1] += [""] * (7 - len(rows[-1]))
    names = [str(LOOKS[method]["label"]) for method in SWEPT]
    header = ["weight", *names, *(f"loss, {n}" for n in names), *(f"paper: {n}" for n in names)]
    return (
        "## One weight for all tasks\n\nAccuracy averaged over the five test sets; the paper's figure "
        "scaling_factors_fig, right, is of "
        "RoBERTa.\n\n![accuracy over weights](figures/scaling.svg)\n\n" + markdown(header, rows)
    )


def _points(results: Mapping[str, Any], method: str, target: str, name: str) -> tuple[list[float], list[float]]:
    """Seed by seed: gradient mismatch, and error above the target's in points."""
    weights = results["settings"]["weights"]
    distances, differences = [], []
    for seed in results["seeds"]:
        merged = at_weight(seed, weights, method, 1.0)
        distances.append(seed["mismatch"][name]["distance"][method][target])
        differences.append(accuracy(seed["scores"][target], name) - accuracy(merged, name))
    return distances, differences


def _mismatch(results: Mapping[str, Any]) -> str:
    text = (
        "## Gradient mismatch\n\n‖∇ℓ(merged) − ∇ℓ(target)‖ of the mean loss on each training set, without dropout, and "
        "the test error of the merged model above the target's in points; both merges at weight 1. The paper's figure "
        "mismatch, right, has RoBERTa and the target trained on all data.\n\n![mismatch against test "
        "error](figures/mismatch.svg)\n"
    )
    for target, title in TARGET_TITLES.items():
        rows, fell = [], 0
        for name in SETS:
            row = [TITLES[name]]
            found = {method: _points(results, method, target, name) for method in SWEPT}
            fell += sum(o < t for t, o in zip(found[SWEPT[0]][0], found[SWEPT[1]][0], strict=True))
            for part, digits in ((0, 4), (1, 1)):
                row += [shown(found[method][part], digits) for method in SWEPT]
            if target == ALL_DATA and not results["seq2seq"]:
                row += [" → ".join(f"{paper.MISMATCH[m][name][part]:g}" for m in SWEPT) for part in (0, 1)]
            rows.append(row)
        names = [str(LOOKS[method]["label"]) for method in SWEPT]
        header = [f"target: {title}", *(f"mismatch, {n}" for n in names), *(f"error, {n}" for n in names)]
        if target == ALL_DATA and not results["seq2seq"]:
            header += ["paper: mismatch", "paper: error"]
        text += (
            f"\n{markdown(header, rows)}\nGradient matching has the smaller mismatch in {fell} of "
            f"{len(SETS) * len(results['seeds'])} cases (data sets × seeds).\n"
        )
    return text


#: What the tables call curvature.
_CURVATURES = {"task-arithmetic": "none: task arithmetic", "identity": "N · I", "kronecker": "Kronecker"}
_GRID_LABELS = {"": "", "empirical": "the data's", "sampled": "drawn from the model", "exact": "all, weighted"}
#: Cells that the paper has, by the labels and reduction of its authors' code, and what it calls them.
_OF_PAPER = {
    ("task-arithmetic", "", ""): "task-arithmetic",
    ("identity", "", ""): "gradient-matching-identity",
    ("diagonal", "sampled", "mean"): "gradient-matching-mean",
    ("diagonal", "sampled", "N · mean"): "gradient-matching-sum",
}


def _grid(results: Mapping[str, Any]) -> str:
    """The table of Hessians in full, of models tuned in either way."""
    seeds, settings, known = results["seeds"], results["settings"], _published(results)
    text = (
        "## The table of Hessians in full\n\nGradient matching at weight 1. Sums are over the rows that curvature is "
        f"measured on; N · mean is N times the mean over {settings['sample_rows']:,} rows, as the authors' code has it "
        "(which takes all rows, and draws labels from the model). The penalty is P in the numerator, H_0 + H_t or H_t "
        "alone.\n"
    )
    titles = {"plain": "Models tuned by plain AdamW", "prior": "Models tuned under the penalty ½‖θ − θ_0‖² of H_0"}
    header = ["curvature", "labels", "reduction", "penalty", *_HEADER, "loss", "paper: avg.", "paper: true avg."]
    for tuning, title in titles.items():
        rows = []
        for cell in map(asdict, grid.cells()):
            if cell["tuning"] != tuning:
                continue
            scores = cell_scores(results, **cell)
            few = f" ({len(scores)} of {len(seeds)} seeds)" if len(scores) < len(seeds) else ""
            kind = (cell["curvature"], cell["labels"], cell["reduction"])
            row = known.get(_OF_PAPER.get(kind, "")) if tuning == "plain" and cell["penalty"] in ("", "H_0") else None
            rows.append(
                [
                    _CURVATURES.get(cell["curvature"], cell["curvature"]) + few,
                    _GRID_LABELS[cell["labels"]],
                    cell["reduction"],
                    cell["penalty"],
                    *_cells(scores),
                    *(("", "") if row is None else (f"{row[5]:.1f}", f"{row[6]:.1f}")),
                ]
            )
        text += f"\n### {title}\n\n{markdown(header, rows)}"
    models = [[TITLES[name], *_cells([seed["grid"]["models"][name] for seed in seeds])] for name in TASKS]
    return (
        f"{text}\nH_0 of that penalty is the summed curvature of the base by the data's labels, in every row; the loss "
        "of a task of N rows is their mean, and the penalty divided by N. The models themselves:\n\n"
        + markdown(["tuned under H_0 on", *_HEADER, "loss"], models)
    )


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """scaling.svg and mismatch.svg."""
    _draw_scaling(results, folder / "scaling.svg")
    if _has_mismatch(results):
        _draw_mismatch(results, folder / "mismatch.svg")


def _draw_scaling(results: Mapping[str, Any], path: Path) -> None:
    seeds, weights = results["seeds"], results["settings"]["weights"]
    with figure(path, width=8.5, height=3.4, panels=2) as (ours, theirs):
        for method in SWEPT:
            runs = [[average(at_weight(seed, weights, method, weight)) for weight in weights] for seed in seeds]
            band(ours, list(weights), runs, **LOOKS[method])
            band(theirs, list(paper.SCALING_WEIGHTS), [list(paper.SCALING[method])], **LOOKS[method])
        for target, style in ((ALL_DATA, ":"), (BASE, "--")):
            level = statistics.fmean(average(seed["scores"][target]) for seed in seeds)
            known = paper.ROBERTA[ALL_DATA][5] if target == ALL_DATA else paper.SCALING["task-arithmetic"][0]
            for axes, height in ((ours, level), (theirs, known)):
                axes.axhline(height, color="#767676", linestyle=style, linewidth=1.2)
                label = "all data at once" if target == ALL_DATA else "base"
                place = {"xycoords": ("axes fraction", "data"), "xytext": (0, 2), "textcoords": "offset points"}
                look = {"ha": "right", "va": "bottom", "color": "#555555", "fontsize": 8}
                axes.annotate(label, (1, height), **place, **look)
        ours.set(title="measured", xlabel="weight of every task", ylabel="accuracy, mean of 5 sets (%)")
        theirs.set(title="the paper's (RoBERTa)", xlabel="weight of every task")
        ours.legend(loc="best", fontsize=8)


def _draw_mismatch(results: Mapping[str, Any], path: Path) -> None:
    def measured(target: str) -> Callable[[str, str], tuple[float, float]]:
        def point(method: str, name: str) -> tuple[float, float]:
            distances, differences = _points(results, method, target, name)
            return statistics.fmean(distances), statistics.fmean(differences)

        return point

    panels = {
        "target: all data": measured(ALL_DATA),
        "target: joint": measured(JOINT),
        "the paper's (RoBERTa, all data)": lambda method, name: paper.MISMATCH[method][name],
    }
    with figure(path, width=11, height=3.6, panels=3) as every:
        for axes, (title, point) in zip(every, panels.items(), strict=True):
            for number, name in enumerate(SETS, 1):
                ends = [point(method, name) for method in SWEPT]
                axes.plot(*zip(*ends, strict=True), color="#bbbbbb", linestyle="--", linewidth=1, zorder=1)
                for method, (x, y) in zip(SWEPT, ends, strict=True):
                    look = {"color": LOOKS[method]["color"], "ha": "center", "va": "center_baseline", "fontsize": 8}
                    axes.text(x, y, str(number), zorder=4, **look)
            for method in SWEPT:
                x, y = zip(*(point(method, name) for name in SETS), strict=True)
                marks = {"linestyle": "", "markersize": 12, "markerfacecolor": "white", "markeredgewidth": 1.6}
                axes.plot(x, y, **marks, **LOOKS[method])
            axes.set(title=title, xlabel="gradient mismatch ‖∇ℓ(merged) − ∇ℓ(target)‖")
            axes.margins(x=0.12, y=0.12)
        key = ", ".join(f"{number} {TITLES[name]}" for number, name in enumerate(SETS, 1))
        every[0].set_ylabel("test error above the target's (points)")
        every[0].legend(loc="best", fontsize=8, markerscale=0.7, title=key, title_fontsize=7)
