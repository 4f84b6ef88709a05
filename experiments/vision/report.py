"""Tables and figures, from results.json alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import colormaps

from ..common.figures import LOOKS, band, figure
from ..common.tables import markdown, shown
from . import paper
from .settings import SCALED

Point = Mapping[str, float]

#: The curves of the figure, in order.
MAIN = ("task-arithmetic", "gradient-matching")


def over_tasks(point: Point) -> float:
    """Mean over the tasks' accuracies, as in the paper's figure."""
    return fmean(point.values())


def mean_curve(curve: Mapping[str, list[float]]) -> list[float]:
    """Mean over tasks, at each weight."""
    return [fmean(column) for column in zip(*curve.values(), strict=True)]


def best(curve: Mapping[str, list[float]]) -> int:
    """The place of the weight with the highest mean accuracy; the smallest weight where several are as good."""
    means = mean_curve(curve)
    return max(range(len(means)), key=lambda place: (means[place], -place))


def at(curve: Mapping[str, list[float]], place: int) -> dict[str, float]:
    """The accuracy of every task at one weight."""
    return {task: values[place] for task, values in curve.items()}


def tables(results: Mapping[str, Any]) -> str:
    """results.md."""
    seeds = list(results["seeds"].values())
    parts = [
        "# Eight image tasks added to a vision transformer\n",
        _setting(results, seeds),
        "## Over the weight\n",
        "Accuracy in percent, mean over the eight test sets"
        + (", mean ± standard deviation over seeds" if len(seeds) > 1 else "")
        + ". The paper's are those of the left panel of its figure over scaling factors."
        + _comparable(results)
        + "\n\n![accuracy over the weight](figures/scaling.svg)\n",
        _curves(results, seeds),
        "## By task\n",
        '"Tuned" weights are the best on validation rows that no model was trained on. "Best on test" reads the best '
        "weight off the test curve, as "
        "the paper's figure does.\n",
        _by_task(results, seeds),
        "## H_0\n",
        _priors(results, seeds),
    ]
    return "\n".join(parts)


def _comparable(results: Mapping[str, Any]) -> str:
    if results["scale"] == "full":
        return ""
    return " Data, model and size are others here: compare the shapes of the curves, not their heights."


def _setting(results: Mapping[str, Any], seeds: list[Any]) -> str:
    settings, data = results["settings"], results["data"]
    tuning = settings["fine_tuning"]
    rows = settings.get("curvature_rows")
    measured = "all training rows" if rows is None else f"the first {rows:,} training rows"
    penalty = "no penalty"
    if tuning["strength"]:
        penalty = f"a quadratic penalty of strength {tuning['strength']:g} towards the base"
    lines = [
        f"`{results['command']}`, on {results['machine']['device']}, {len(seeds)} seed{'s' * (len(seeds) > 1)}.",
        "",
        markdown(
            ["task", "classes", "training rows", "validation rows", "test rows"],
            [[t, *(str(f[k]) for k in ("classes", "train", "validation", "test"))] for t, f in data.items()],
        ),
        f"Encoder of {seeds[0]['base']['parameters']:,} parameters. Fine-tuned with batches of {tuning['batch_size']}, "
        f"learning rate {tuning['learning_rate']:g}, {tuning['epochs']:g} epochs, {penalty}; heads are fixed.",
    ]
    if settings["pretraining"] is None and settings["encoder"]:
        shrunk = f", shrunk by a penalty of {settings['head_decay']:g} · ‖weights‖²" if "head_decay" in settings else ""
        lines.append(
            f"The base is {results['model']}, trained by others on ImageNet; images are enlarged to the size that it "
            f"takes. Heads are logistic regressions from its features, fitted on the training rows{shrunk}. "
            f"The Fisher of the base is measured on the first {settings['base_rows']} training rows of each task."
        )
    elif settings["pretraining"] is not None:
        lines.append(
            f"The base and the heads were trained from random weights on the first {settings['base_rows']} training "
            "rows of each task (fewer where a task has fewer). These rows are among those of fine-tuning."
        )
    else:
        lines.append(
            f"The base is {results['model']}; heads are its text embeddings of the class names. The Fisher of the base "
            f"is measured on the first {settings['base_rows']} training rows of each task, as its own data is not "
            "public."
        )
    lines += [
        f"Curvature: squared gradients of single examples over {measured} of a task, divided by their number "
        "(mean), or not (sum). They are taken at the data's labels; the authors' code draws labels from the model"
        + (", as is done here where it says so." if any("sampled" in n for n in seeds[0]["curves"]) else "."),
        "H_0 of gradient matching is c · I where nothing else is said, c being the mean entry of the eight tasks' "
        "curvature: "
        + ", ".join(f"{shown_numbers([s['scalar'][r] for s in seeds])} ({r})" for r in ("mean", "sum"))
        + ". It is not tuned.",
        "",
    ]
    return "\n".join(lines)


def shown_numbers(values: list[float]) -> str:
    return f"{fmean(values):.3g}"


def _curves(results: Mapping[str, Any], seeds: list[Any]) -> str:
    rows = []
    for place, weight in enumerate(results["settings"]["weights"]):
        row = [f"{weight:g}"]
        for name in MAIN:
            known = dict(zip(paper.WEIGHTS, paper.FIGURE[name], strict=True))
            row.append(shown([mean_curve(s["curves"][name]["test"])[place] for s in seeds]))
            row.append(f"{known[weight]}" if weight in known else "")
        rows.append(row)
    header = ["weight", "task arithmetic", "paper", "gradient matching", "paper"]
    return markdown(header, rows) + f"\nThe paper's dashed line, the base alone: {paper.ZERO_SHOT}.\n"


def _by_task(results: Mapping[str, Any], seeds: list[Any]) -> str:
    tasks = results["settings"]["tasks"]

    with_loss = "loss" in seeds[0]["references"]["base"]

    def row(label: str, found: list[Mapping[str, Point]], weights: list[float] | None = None) -> list[str]:
        chosen = "" if weights is None else shown(weights, 2)
        return [
            label,
            chosen,
            *(shown([one["test"][task] for one in found]) for task in tasks),
            shown([over_tasks(one["test"]) for one in found]),
            *([shown([over_tasks(one["loss"]) for one in found], 3)] if with_loss else []),
        ]

    rows = [
        row("base", [s["references"]["base"] for s in seeds]),
        row("each task's own model", [s["references"]["individual"] for s in seeds]),
        row("trained on all tasks", [s["references"]["joint"] for s in seeds]),
    ]
    rows += [row(_label(name), [s["fixed"][name] for s in seeds]) for name in seeds[0]["fixed"]]
    weights = results["settings"]["weights"]
    choices: list[tuple[str, Callable[[Any], int]]] = [
        ("at 1", lambda curve: weights.index(1.0)),
        ("tuned", lambda curve: best(curve["validation"])),
        ("best on test", lambda curve: best(curve["test"])),
    ]
    for name in [n for n in (*MAIN, *SCALED) if n in seeds[0]["curves"]]:
        for label, choose in choices:
            places = [choose(s["curves"][name]) for s in seeds]
            found = [
                {part: at(curve, place) for part, curve in s["curves"][name].items()}
                for s, place in zip(seeds, places, strict=True)
            ]
            rows.append(row(f"{_label(name)}, {label}", found, [weights[place] for place in places]))
    return markdown(["", "weight", *tasks, "mean", *(["mean loss"] if with_loss else [])], rows)


def _label(name: str) -> str:
    kind, _, rest = name.partition(", ")
    return LOOKS[kind]["label"] + (f", {rest}" if rest else "")


def _priors(results: Mapping[str, Any], seeds: list[Any]) -> str:
    weights = results["settings"]["weights"]
    names = [n for n in seeds[0]["curves"] if n.startswith("gradient-matching")]
    with_loss = "loss" in seeds[0]["references"]["base"]
    rows = []
    for name in [*names, "task-arithmetic"]:
        curves = [s["curves"][name] for s in seeds]
        tuned = [best(curve["validation"]) for curve in curves]
        rows.append(
            [
                _prior(name),
                shown([mean_curve(c["test"])[weights.index(1.0)] for c in curves]),
                shown([mean_curve(c["test"])[place] for c, place in zip(curves, tuned, strict=True)]),
                shown([weights[place] for place in tuned], 2),
                shown([max(mean_curve(c["test"])) for c in curves]),
                *([shown([min(mean_curve(c["loss"])) for c in curves], 3)] if with_loss else []),
            ]
        )
    text = "Gradient matching with other H_0, mean accuracy over the test sets. "
    text += "c is the mean entry of the tasks' curvature; the Fisher of the base has a mean entry of "
    text += f"{shown_numbers([s['scalar_of_base']['mean'] for s in seeds])} (mean).\n\n"
    text += "![accuracy over the weight with each H_0](figures/prior.svg)\n\n"
    header = ["H_0", "at weight 1", "at tuned weight", "tuned weight", "best on test"]
    return text + markdown([*header, *(["smallest test loss"] if with_loss else [])], rows)


def _prior(name: str) -> str:
    if name == "task-arithmetic":
        return "∞ · I: task arithmetic"
    _, *rest = name.split(", ")
    words = ["sum" if "sum" in rest else "mean", *(word for word in rest if word in ("no penalty", "sampled labels"))]
    what = next((word for word in rest if word not in ("sum", *words)), "")
    what = {"": "c · I", "Fisher of the base": what}.get(what, f"{what} · I")
    return f"{what} ({', '.join(words)})"


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """scaling.svg: the paper's panel and ours; prior.svg: what becomes of it with another H_0."""
    seeds = list(results["seeds"].values())
    weights = results["settings"]["weights"]
    with figure(folder / "scaling.svg", 8.4, 3.4, panels=2) as (left, right):
        for name in MAIN:
            band(left, list(paper.WEIGHTS), [list(paper.FIGURE[name])], **LOOKS[name])
            band(right, weights, [mean_curve(s["curves"][name]["test"]) for s in seeds], **LOOKS[name])
        left.set_title("in the paper: CLIP ViT-B/32", loc="left", fontsize=10)
        base = fmean(over_tasks(s["references"]["base"]["test"]) for s in seeds)
        here = results.get("model") or f"--scale {results['scale']}"
        right.set_title(f"here: {here}", loc="left", fontsize=10)
        # In the legend and not beside the line, which a curve may follow closely.
        for axes, height in ((left, paper.ZERO_SHOT), (right, base)):
            axes.axhline(height, color="#767676", linestyle="--", linewidth=1, label="base alone", zorder=1)
            axes.set_xlabel("weight of every task")
        left.set_ylabel("accuracy in %, mean of 8 test sets")
        right.legend(loc="best")
    with figure(folder / "prior.svg", 6.4, 3.8) as axes:
        names = [n for n in seeds[0]["curves"] if n.startswith("gradient-matching") and "sum" not in n]
        names = [n for n in names if "sampled" not in n]
        scalars = sorted((n for n in names if "Fisher" not in n), key=_factor)
        for place, name in enumerate(scalars):
            runs = [mean_curve(s["curves"][name]["test"]) for s in seeds]
            look = {"color": colormaps["plasma"](0.9 * place / max(1, len(scalars) - 1))}
            if name == "gradient-matching":
                look = {"color": LOOKS[name]["color"], "linewidth": 3}
            _line(axes, weights, runs, label=f"H₀ = {_prior(name).removesuffix(' (mean)')}", **look)
        for name in (n for n in names if "Fisher" in n):
            runs = [mean_curve(s["curves"][name]["test"]) for s in seeds]
            bare = "no penalty" in name
            label = "H₀ = Fisher of the base" + ", no penalty" * bare
            _line(axes, weights, runs, color="#009E73", label=label, linestyle="--" if bare else "-.")
        runs = [mean_curve(s["curves"]["task-arithmetic"]["test"]) for s in seeds]
        _line(axes, weights, runs, color="#767676", label="task arithmetic", linestyle=":")
        axes.set_xlabel("weight of every task")
        axes.set_ylabel("accuracy in %, mean of 8 test sets")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)


def _factor(name: str) -> float:
    rest = name.removeprefix("gradient-matching").removeprefix(", ")
    return float(rest.removesuffix(" · c")) if rest else 1.0


def _line(axes: Any, weights: list[float], runs: list[list[float]], **look: Any) -> None:
    axes.plot(weights, [fmean(column) for column in zip(*runs, strict=True)], **{"linewidth": 1.6, **look})
