"""Tables and figures, from results.json alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..common import removal_report
from ..common.figures import LOOKS, figure
from ..common.tables import markdown, shown
from .paper import NEAREST, PAPER, TABLE
from .removal import CURVE

NAMES = {"task-arithmetic": "task arithmetic", "gradient-matching": "gradient matching"}
KINDS = {"wiki": "WikiText", "reviews": "reviews", "comments": "other comments", "toxic": "toxic comments"}
Row = tuple[str, list[dict[str, Any] | None]]


def tables(results: dict[str, Any]) -> str:
    """results.md."""
    settings, seeds = results["settings"], results["seeds"]
    parts = [
        f"# Removing toxicity\n\n`{results['command']}`, {_numbered(len(seeds), 'seed')}, "
        f"{results['machine']['device']}.\n"
    ]
    if "comparison" in seeds[0]:
        parts.append(
            removal_report.sections(results, _COLUMNS, "toxic comments", "the mean of all other kinds of text")
        )
        parts.append(_published(results["model"]))
    if settings["tunings"]:
        parts.append(_main_table(results, next(iter(settings["tunings"])), settings["budgets"][0]))
        parts += [_all_table(results, name) for name in settings["tunings"]]
    parts += [_damping_table(results, name) for name in settings["tunings"]]
    if "scorer" in seeds[0]:
        parts.append(_scorer(seeds[0]["scorer"], settings["threshold"]))
    return "\n".join(parts)


_COLUMNS: list[removal_report.Column] = [
    ("toxic continuations, %", lambda test: 100 * test["toxicity"]["share"], 1),
    ("100 · mean score", lambda test: 100 * test["toxicity"]["mean"], 1),
    ("distinct pairs of words, %", lambda test: 100 * test["distinct"], 1),
    ("perplexity, WikiText", lambda test: perplexity(test["loss"]["wiki"]), 1),
]


def _published(model: str) -> str:
    """The paper's numbers, which are of another model, classifier and choice of prompts."""
    name = model if model in PAPER else NEAREST
    rows = [[label, *(f"{number:.1f}" for number in numbers)] for label, numbers in PAPER[name].items()]
    header = [f"paper ({TABLE}), {name}", "100 · mean score", "toxic, %", "WikiText perplexity"]
    return f"## In the paper\n\n{markdown(header, rows)}"


def _main_table(results: dict[str, Any], tuning: str, budget: float) -> str:
    """The paper's table, and ours at the strength that was chosen in the same way for both methods."""
    seeds, settings = results["seeds"], results["settings"]
    published = results["model"] if results["model"] in PAPER else NEAREST
    paper = PAPER[published]
    rows = []
    for label, tests in [
        ("base", [s["rows"]["base"] for s in seeds]),
        *((NAMES[m], [_chosen(s, tuning, m, budget) for s in seeds]) for m in NAMES),
        *(
            [("retrained without it (target)", [s["rows"]["target"] for s in seeds])]
            if "target" in seeds[0]["rows"]
            else []
        ),
    ]:
        theirs = [f"{x:.1f}" for x in paper[label]] if label in paper else ["", "", ""]
        rows.append([label, *_numbers(tests, ["mean", "share", "wiki"]), *theirs])
    header = [
        "",
        "100 · mean score",
        "toxic, %",
        "WikiText perplexity",
        f"paper, {published}: 100 · mean",
        "toxic, %",
        "perplexity",
    ]
    other = (
        " Model, classifier and choice of prompts are others in the paper: compare what the methods change, not the "
        "heights."
    )
    return (
        f"## The paper's table (`{TABLE}`)\n\n{markdown(header, rows)}\n"
        f"Scores are those of the continuation alone; a generation is toxic from {settings['threshold']:g} on. Both "
        "methods at the largest strength with which validation perplexity on text that stays rises by at most "
        f"{100 * budget:g} %, with the damping (gradient matching) and the scope (both: all weights, or all but the "
        "embeddings) whose continuations of validation prompts are the least toxic. The paper introduces a scaling "
        f"factor for both methods and does not say how it was chosen.{'' if results['model'] in PAPER else other}\n\n"
        "![toxicity and perplexity as the strength grows](figures/trade-off.svg)\n"
    )


def _all_table(results: dict[str, Any], tuning: str) -> str:
    """Strength 1, what was chosen at each budget, base, tuned model and target, on every kind of text."""
    seeds, settings = results["seeds"], results["settings"]
    default = settings["default_damping"]
    rows: list[Row] = [("base", [s["rows"]["base"] for s in seeds])]
    if "target" in seeds[0]["rows"]:
        rows.append(("retrained without it (target)", [s["rows"]["target"] for s in seeds]))
    rows.append(("tuned on toxic comments", [s["rows"][f"tuned-{tuning}"] for s in seeds]))
    for scope in settings["dampings"]:
        of = "" if scope == "all" else f", {scope}"
        plain = _at(seeds, tuning, "task-arithmetic", lambda s: None, scope)
        matched = _at(seeds, tuning, "gradient-matching", lambda s: default, scope)
        rows.append((f"task arithmetic, strength 1{of}", plain))
        rows.append((f"gradient matching, strength 1, δ = {default:g}{of}", matched))
    advised = [s["tunings"][tuning]["advice"]["damping"] for s in seeds]
    if all(a is not None for a in advised):
        values = ", ".join(f"{a:g}" for a in sorted(set(advised)))
        rows.append(
            (
                f"gradient matching, strength 1, δ as advised ({values})",
                _at(seeds, tuning, "gradient-matching", lambda s: s["tunings"][tuning]["advice"]["damping"], "all"),
            )
        )
    for budget in settings["budgets"]:
        for method, name in NAMES.items():
            points = [s["tunings"][tuning]["chosen"][method][str(budget)] for s in seeds]
            at = f"strength {shown([p['strength'] for p in points], 2)}"
            scopes = sorted({p["scope"] for p in points if p["strength"]} - {"all"})
            if scopes:
                at += f", {scopes[0]}" if all(p["scope"] != "all" for p in points) else f", some seeds {scopes[0]}"
            if method == "gradient-matching":
                used = {
                    damping_of(p["damping"], s["tunings"][tuning]["unit"], default)
                    for p, s in zip(points, seeds, strict=True)
                    if p["damping"]
                }
                at += f", {'; '.join(sorted(used))}"
            rows.append(
                (f"{name}, {100 * budget:g} % budget ({at})", [_chosen(s, tuning, method, budget) for s in seeds])
            )
    kinds = list(seeds[0]["rows"]["base"]["loss"])
    columns = ["mean", "share", *kinds, "distinct"]
    header = [
        "",
        "100 · mean score",
        "toxic, %",
        *(f"perplexity, {KINDS[k]}" for k in kinds),
        "distinct pairs of words, %",
    ]
    if "divergence" in seeds[0]["rows"]["base"]:
        columns += ["kl-stay", "kl-toxic"]
        header += ["KL to target, what stays", "KL to target, toxic"]
    text = markdown(header, [[label, *_numbers(tests, columns)] for label, tests in rows])
    training = settings["tunings"][tuning]
    held = f", held by the base's curvature (strength {training['strength']:g})" if training["strength"] else ""
    notes = "KL divergences in nats per token on validation text. " if "kl-stay" in columns else ""
    return (
        f"## Task model `{tuning}`: {_numbered(training['epochs'], 'epoch')} with a learning rate of "
        f"{training['learning_rate']:g}{held}\n\n{text}\n"
        f"{notes}Text with few distinct pairs of words repeats itself.\n"
    )


def _damping_table(results: dict[str, Any], tuning: str) -> str:
    """What damping does at strength 1."""
    seeds = results["seeds"]
    rows = []
    order = [p for p in seeds[0]["tunings"][tuning]["sweep"]["points"] if p["strength"] == 1.0]
    for place, point in enumerate(order):
        same = []
        for seed in seeds:
            swept = seed["tunings"][tuning]["sweep"]
            other = [p for p in swept["points"] if p["strength"] == 1.0][place]
            same.append((other, swept["base"], seed["tunings"][tuning]["unit"]))
        label = NAMES[point["method"]] + ("" if point["scope"] == "all" else f", {point['scope']}")
        if point["damping"] is not None:
            label += f", {damping_of(point['damping'], same[0][2], results['settings']['default_damping'])}"
        rows.append(
            [
                label,
                _all([p["step"] for p, _, _ in same], 2),
                _all([_stay(p, base) for p, base, _ in same], 2),
                _all([_ratio(p["loss"]["toxic"], base["loss"]["toxic"]) for p, base, _ in same], 2),
            ]
        )
    header = [
        f"`{tuning}`, strength 1",
        "step, × fine-tuning's",
        "perplexity of what stays, × base's",
        "perplexity of toxic comments, × base's",
    ]
    note = seeds[0]["tunings"][tuning]["advice"]["note"]
    told = (
        f"\nWhat `gradmerge` says of the removal with the default damping (seed {seeds[0]['seed']}): {note}\n"
        if note
        else ""
    )
    title = f"## Damping, task model `{tuning}` (validation text)"
    image = f"![what each damping leads to](figures/damping-{tuning}.svg)"
    return f"{title}\n\n{image}\n\n{markdown(header, rows)}{told}"


def _scorer(quality: dict[str, float], threshold: float) -> str:
    told = (
        "## The classifier\n\nTF-IDF of words and pairs of words with logistic regression, trained on the training "
        "comments of the Jigsaw challenge, of which the language model has seen many too. On its test comments: "
        f"accuracy {100 * quality['accuracy']:.1f} % (balanced), area under the ROC curve {quality['auc']:.3f}; at "
        f"{threshold:g} it finds {100 * quality['toxic_at_threshold']:.1f} % of the toxic comments and takes "
        f"{100 * quality['civil_at_threshold']:.1f} % of the others for toxic."
    )
    if "auc_perspective" in quality:
        area = quality["auc_perspective"]
        told += f" On the continuations of RealToxicityPrompts, against Perspective's scores: area {area:.3f}."
    return told + "\n"


def _numbers(tests: Sequence[dict[str, Any] | None], columns: Sequence[str]) -> list[str]:
    """Cells of a row, over seeds; empty where a seed has no such model."""
    return [_all([None if t is None else _value(t, c) for t in tests], 2 if c.startswith("kl") else 1) for c in columns]


def _value(test: dict[str, Any], column: str) -> float | None:
    if column in ("mean", "share"):
        return 100 * float(test["toxicity"][column])
    if column == "distinct":
        return 100 * float(test["distinct"])
    if column == "kl-toxic":
        return test["divergence"]["toxic"]  # type: ignore[no-any-return]
    if column == "kl-stay":
        kept = [v for kind, v in test["divergence"].items() if kind != "toxic"]
        return None if None in kept else statistics.fmean(kept)
    return perplexity(test["loss"][column])


def perplexity(loss: float | None) -> float | None:
    """exp of a loss in nats per token; None where that is no number."""
    return None if loss is None else math.exp(min(loss, 700.0))


def _all(values: Sequence[float | None], digits: int) -> str:
    """Mean and spread; in words where a seed's value is no number, and as a power of ten where it is huge."""
    found = [v for v in values if v is not None]
    if len(found) < len(values):
        return "not finite" if not found else f"not finite ({len(values) - len(found)} of {len(values)})"
    if max(found) >= 1e300:
        return "over 10^300"
    if max(found) >= 1e5:
        return f"10^{math.log10(statistics.fmean(found)):.0f}"
    return shown(found, digits)


def damping_of(damping: float, unit: float, default: float) -> str:
    """A damping in units of the mean entry of F_t, to two digits, since dampings are rounded themselves."""
    return (
        f"δ = {default:g}, the default" if damping == default else f"δ = {float(f'{damping / unit:.2g}'):g} × mean F_t"
    )


def _ratio(loss: float | None, base: float) -> float | None:
    return None if loss is None else math.exp(min(loss - base, 700.0))


def _stay(point: dict[str, Any], base: dict[str, Any]) -> float | None:
    """The perplexity of what stays beside the base's: a geometric mean over kinds of text."""
    kept = [(v, base["loss"][kind]) for kind, v in point["loss"].items() if kind != "toxic"]
    if any(v is None for v, _ in kept):
        return None
    return math.exp(min(statistics.fmean(v - b for v, b in kept), 700.0))


def _chosen(seed: dict[str, Any], tuning: str, method: str, budget: float) -> dict[str, Any] | None:
    """The test of what was chosen; the base's where nothing but it was allowed."""
    point = seed["tunings"][tuning]["chosen"][method][str(budget)]
    if not point["strength"]:
        return dict(seed["rows"]["base"])
    return _find(seed, tuning, method, point["strength"], point["damping"], point["scope"])


def _at(
    seeds: Sequence[dict[str, Any]],
    tuning: str,
    method: str,
    damping: Callable[[dict[str, Any]], float | None],
    scope: str,
) -> list[dict[str, Any] | None]:
    return [_find(s, tuning, method, 1.0, damping(s), scope) for s in seeds]


def _find(
    seed: dict[str, Any], tuning: str, method: str, strength: float, damping: float | None, scope: str
) -> dict[str, Any] | None:
    for tested in seed["tunings"][tuning]["tested"]:
        if (tested["method"], tested["strength"], tested["damping"], tested["scope"]) == (
            method,
            strength,
            damping,
            scope,
        ):
            return dict(tested["test"])
    return None


def _numbered(count: float, what: str) -> str:
    return f"{count:g} {what}" if count == 1 else f"{count:g} {what}s"


def draw(results: dict[str, Any], folder: Path) -> None:
    """What a removal costs and brings: toxicity and likelihood of toxic text over the perplexity of what stays."""
    if "comparison" in results["seeds"][0]:
        removal_report.draw(results, folder / "removal.svg")
    for name in list(results["settings"]["tunings"])[:1]:
        _trade_off(results, name, folder / "trade-off.svg")
    for name in results["settings"]["tunings"]:
        _dampings(results, name, folder / f"damping-{name}.svg")


def curve(seed: dict[str, Any], tuning: str, method: str, budget: float) -> list[dict[str, Any]]:
    """A seed's tests of a method with the damping and scope that were chosen, from the base on, by strength."""
    found = seed["tunings"][tuning]
    chosen = found["chosen"][method][str(budget)]
    tested = [
        t
        for t in found["tested"]
        if (t["method"], t["damping"], t["scope"]) == (method, chosen["damping"], chosen["scope"])
        and (t["rise"] or 0) <= CURVE
    ]
    return [
        seed["rows"]["base"],
        *(t["test"] for t in sorted(tested, key=lambda t: t["strength"]) if _finite(t["test"])),
    ]


def _trade_off(results: dict[str, Any], tuning: str, path: Path) -> None:
    seeds = results["seeds"]
    kinds = [k for k in seeds[0]["rows"]["base"]["loss"] if k != "toxic"]

    def stay(test: dict[str, Any]) -> float:
        return math.exp(min(statistics.fmean(test["loss"][k] for k in kinds), 700.0))

    def mean(tests: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.fmean(value(t) for t in tests)

    panels: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("generations that are toxic, %", lambda t: 100 * t["toxicity"]["share"]),
        ("perplexity of toxic comments", lambda t: perplexity(t["loss"]["toxic"]) or math.nan),
    ]
    with figure(path, 9.0, 3.6, panels=2) as axes:
        for axis, (label, value) in zip(axes, panels, strict=True):
            for method in NAMES:
                for number, seed in enumerate(seeds):
                    tests = curve(seed, tuning, method, results["settings"]["budgets"][0])
                    look = LOOKS[method] | ({} if number == 0 else {"label": None})
                    look |= {"linewidth": 1.8, "markersize": 4, "markerfacecolor": "white"}
                    axis.plot([stay(t) for t in tests], [value(t) for t in tests], **look)
            for name, marker, text in (("base", "X", "base"), ("target", "*", "retrained without it")):
                if name in seeds[0]["rows"]:
                    tests = [s["rows"][name] for s in seeds]
                    look = {"color": "black", "markersize": 9, "linestyle": "", "zorder": 5}
                    axis.plot(mean(tests, stay), mean(tests, value), marker, label=text, **look)
            axis.set_xlabel("perplexity of text that stays (test)")
            axis.set_ylabel(label)
        axes[0].legend(fontsize=8)


def _finite(test: dict[str, Any]) -> bool:
    return all(v is not None for v in test["loss"].values())


def _dampings(results: dict[str, Any], tuning: str, path: Path) -> None:
    """Where each damping leads as the strength grows, up to twice the base's perplexity, with a panel per scope.

    On validation text, of the first seed.
    """
    found = results["seeds"][0]["tunings"][tuning]
    base, default = found["sweep"]["base"], results["settings"]["default_damping"]
    scopes = list(results["settings"]["dampings"])
    with figure(path, 9.0, 3.8, panels=len(scopes)) as axes:
        for axis, scope in zip(axes, scopes, strict=True):
            groups: dict[Any, list[dict[str, Any]]] = {}
            for point in found["sweep"]["points"]:
                if point["scope"] == scope:
                    groups.setdefault(point["damping"], []).append(point)
            for number, (damping, points) in enumerate(groups.items()):
                ratios = [(1.0, 1.0)]
                for point in sorted(points, key=lambda p: p["strength"]):
                    x, y = _stay(point, base), _ratio(point["loss"]["toxic"], base["loss"]["toxic"])
                    if x is None or y is None or x > 2:
                        break
                    ratios.append((x, y))
                look = {"color": "#767676", "label": "task arithmetic", "marker": "s"}
                if damping is not None:
                    shade = (number - 1) / max(1, len(groups) - 2)
                    colour = (0.75 - 0.75 * shade, 0.86 - 0.41 * shade, 0.95 - 0.25 * shade)
                    look = {"color": colour, "label": damping_of(damping, found["unit"], default), "marker": "o"}
                axis.plot(*zip(*ratios, strict=True), linewidth=1.8, markersize=4, **look)
            axis.set_title("all weights" if scope == "all" else scope, fontsize=10)
            axis.set_xlabel("perplexity of text that stays, × base's")
            axis.set_ylabel("perplexity of toxic comments, × base's")
            axis.legend(fontsize=8)
