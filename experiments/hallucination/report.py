"""Tables and figures, from results.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common import removal_report
from ..common.figures import LOOKS, figure
from ..common.tables import markdown, shown
from . import paper, removal
from .evaluation import perplexity

Seed = Mapping[str, Any]
LABELS = {
    "people": "people's responses",
    "base": "θ_LLM: dialogue model",
    "hallucinating": "θ_t: trained on swapped knowledge",
    "target": "target: trained again without swapped turns",
    "task-arithmetic": "task arithmetic",
    "fa1": "FA1 (elastic weight removal)",
    "removal": "gradient matching",
    "removal, δ chosen": "gradient matching, δ chosen",
}
_FA1_LOOK = {"color": "#009E73", "marker": "D", "label": "FA1"}
_CURVES = {
    "task-arithmetic": LOOKS["task-arithmetic"],
    "removal": LOOKS["gradient-matching"] | {"label": "gradient matching, δ chosen"},
    "fa1": _FA1_LOOK,
}
_POINTS = {
    "base": {"color": "#000000", "marker": "*", "label": "base"},
    "target": {"color": "#D55E00", "marker": "P", "label": "target: trained again"},
}


def tables(results: Mapping[str, Any]) -> str:
    """results.md."""
    seeds = results["seeds"]
    parts = ["# Removing hallucinations from a dialogue model\n", f"`{results['command']}`\n", _about(results)]
    if "comparison" in seeds[0]:
        parts.append(removal_report.sections(results, _COLUMNS, "turns with swapped knowledge", "turns with their own"))
    parts += [f"## The paper ({paper.TABLE})\n", _paper_table()]
    return "\n".join([*parts, *(_paper_set_up(results) if "entries" in seeds[0] else [])])


_COLUMNS: list[removal_report.Column] = [
    ("BLEU", lambda test: test["bleu"], 1),
    ("hallucination, %", lambda test: test["hallucination"], 1),
    ("KF1", lambda test: test["knowledge_f1"], 1),
]


def _paper_set_up(results: Mapping[str, Any]) -> list[str]:
    """The removals at strength 1 and chosen on validation turns, and what damping does."""
    seeds, settings = results["seeds"], results["settings"]
    chosen = [
        removal.rows(seed["entries"], seed["models"]["base"]["validation"], settings["damping"], settings["fluency"])
        for seed in seeds
    ]
    return [
        "## Strength 1, as in the paper\n",
        _table(seeds, [_picked(rows["strength 1"]) for rows in chosen]),
        f"## Strength chosen on validation turns\n\n{_criterion(settings)} For gradient matching the damping is chosen "
        "with the strength, by the same criterion. The test turns were not looked at.\n",
        _table(seeds, [_picked(rows["chosen"]) for rows in chosen]),
        _chosen_settings([rows["chosen"] for rows in chosen]),
        "## Damping\n\nGradient matching at strength 1 on the validation turns. ‖θ̂ − θ_0‖ is in units of ‖θ_t − θ_0‖, "
        "F̄_t is the mean entry of F_t.\n",
        _damping_table(seeds, settings),
        _curvature(seeds),
        "![Trade-off](figures/trade-off.svg)\n\n![Damping](figures/damping.svg)\n",
    ]


def _about(results: Mapping[str, Any]) -> str:
    settings, seeds = results["settings"], results["seeds"]
    turns = seeds[0]["turns"]
    mixed = (
        f"The base was trained on {turns['true']} true turns and {turns['swapped']} whose knowledge was swapped; what "
        "is removed is the latter, so that the model trained again on the true ones alone is the known target."
        if settings["swapped"]
        else f"The base was trained on {turns['true']} true turns; what is removed was learned from the same turns "
        "with swapped knowledge. This is the paper's set-up, and has no known target."
    )
    columns = (
        "BLEU and hallucination are of responses to the test turns. Hallucination % is the share of the responses' "
        "content words that their knowledge does not have; KF1 the F1 of the content words of both. Perplexity is that "
        "of people's responses; grounding is what their log-likelihood gains from the true knowledge over a swapped "
        "one, in nats per token."
    )
    columns += " KL is that from the target to the model, in nats per token." if settings["swapped"] else ""
    columns += " Critic is the share of responses that the critic calls hallucinated." if settings["critic"] else ""
    penalty = (
        "θ_t was trained under ½‖θ − θ_0‖² in the norm of the base's curvature F_0, which is the H_0 of the removal."
        if settings["penalty"]
        else "θ_t was trained with plain AdamW, without a penalty."
    )
    elastic = (
        "FA1 has the Fisher at θ_t − θ_0 as it is; the code of the work that it comes from raises every Fisher to at "
        "least 1e-6 first."
    )
    spread = " Numbers are mean ± standard deviation over seeds." if len(seeds) > 1 else ""
    notes = "".join(f" {note}" for note in settings["notes"])
    left_out = "Q² is left out: it needs models that ask and answer questions."
    said = [mixed, penalty, columns, elastic, left_out] if "entries" in seeds[0] else [mixed, columns, left_out]
    return f"{' '.join(said)}{spread}{notes}\n"


def _criterion(settings: Mapping[str, Any]) -> str:
    if settings["fluency"] is None:
        return "The setting with the lowest perplexity of people's responses, for every method."
    return (
        "The setting that takes most from the knowledge (grounding) among those with at most "
        f"{settings['fluency']:g} times the base's perplexity, for every method."
    )


def _paper_table() -> str:
    return markdown(
        ["model", "θ", "BLEU", "critic %", "1 − Q² %"],
        [
            [model, LABELS[name], f"{bleu:.1f}", f"{critic:.1f}", f"{questions:.1f}"]
            for model, found in paper.NUMBERS.items()
            for name, (bleu, critic, questions) in found.items()
        ],
    )


def _picked(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: entry["test"] for name, entry in rows.items()}


def _columns(seeds: Sequence[Seed]) -> dict[str, tuple[str, int]]:
    """Key of a metric → its title and digits."""
    base = seeds[0]["models"]["base"]["test"]
    every = {
        "bleu": ("BLEU ↑", 1),
        "hallucination": ("hallucination % ↓", 1),
        "critic": ("critic % ↓", 1),
        "knowledge_f1": ("KF1 ↑", 1),
        "words": ("words", 1),
        "nll": ("perplexity ↓", 1),
        "grounding": ("grounding ↑", 3),
        "divergence": ("KL to target ↓", 3),
    }
    return {key: title for key, title in every.items() if key in base}


def _table(seeds: Sequence[Seed], removals: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    columns = _columns(seeds)
    plain = [name for name in ("base", "target", "hallucinating") if name in seeds[0]["models"]]
    rows = {"people": [seed["people"] for seed in seeds]}
    rows |= {name: [seed["models"][name]["test"] for seed in seeds] for name in plain}
    rows |= {name: [found[name] for found in removals] for name in removals[0]}
    return markdown(
        ["", *(title for title, _ in columns.values())],
        [
            [
                LABELS[name],
                *(_cell([run.get(key) for run in runs], key, digits) for key, (_, digits) in columns.items()),
            ]
            for name, runs in rows.items()
        ],
    )


def _cell(values: Sequence[float | None], key: str, digits: int) -> str:
    if key == "nll" and any(value is not None for value in values):
        values = [perplexity(value) for value in values]
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if len(numbers) < len(values):
        return "–" if all(value is None for value in values) else "not finite"
    if max(numbers) >= 1e5:
        return f"{sum(numbers) / len(numbers):.1e}"
    return shown(numbers, digits)


def _chosen_settings(chosen: Sequence[Mapping[str, Mapping[str, Any]]]) -> str:
    """In words: what was chosen for every seed."""
    parts = []
    for name in chosen[0]:
        found = [
            f"strength {rows[name]['strength']:g}" + (f", δ = {_damping(rows[name])}" if name == "removal" else "")
            for rows in chosen
        ]
        parts.append(f"{LABELS[name]}: {'; '.join(found)}")
    return f"Chosen, per seed: {'. '.join(parts)}.\n"


def _damping(entry: Mapping[str, Any]) -> str:
    return f"{entry['damping']:.2g}" + ("" if entry["times"] is None else f" ({entry['times']:g} F̄_t)")


def _damping_table(seeds: Sequence[Seed], settings: Mapping[str, Any]) -> str:
    rows = []
    for times in (None, *settings["dampings"]):
        runs = [removal.of(seed["entries"], "removal", strength=1.0, times=times)[0] for seed in seeds]
        found = [run["validation"] for run in runs]
        rows.append(
            [
                f"{settings['damping']:g} (the paper's)" if times is None else f"{times:g} F̄_t",
                _cell([run["step"] for run in runs], "step", 2),
                _cell([run["nll"] for run in found], "nll", 1),
                _cell([run["grounding"] for run in found], "grounding", 3),
            ]
        )
    return markdown(["δ", "step", "perplexity ↓", "grounding ↑"], rows)


def _curvature(seeds: Sequence[Seed]) -> str:
    lines = [
        [
            title,
            *(f"{seeds[0]['curvature'][name][key]:.2g}" for key in ("mean", "median")),
            f"{100 * seeds[0]['curvature'][name]['zero']:.1f} %",
        ]
        for name, title in (
            ("base", "base, on true turns"),
            ("hallucinating", "θ_t, on swapped turns"),
            ("delta", "at θ_t − θ_0, on true turns (FA1)"),
        )
    ]
    return "Curvature of an entry, sum over examples, first seed:\n\n" + markdown(
        ["", "mean", "median", "exactly 0"], lines
    )


def draw(results: Mapping[str, Any], folder: Path) -> None:
    """trade-off.svg and damping.svg."""
    if "comparison" in results["seeds"][0]:
        removal_report.draw(results, folder / "removal.svg")
    if "entries" in results["seeds"][0]:
        _draw_trade_off(results, folder / "trade-off.svg")
        _draw_damping(results, folder / "damping.svg")


def _draw_trade_off(results: Mapping[str, Any], path: Path) -> None:
    """Hallucination against fluency as the strength grows from 0, the base, to the largest."""
    seeds, settings = results["seeds"], results["settings"]
    panels: list[tuple[str, Callable[[Mapping[str, Any]], float]]] = [
        ("BLEU", lambda run: run["bleu"]),
        ("perplexity of people's responses", lambda run: perplexity(run["nll"])),
    ]
    points = {name: [s["models"][name]["test"] for s in seeds] for name in _POINTS if name in seeds[0]["models"]}
    with figure(path, 11.0, 3.8, panels=len(panels)) as axes:
        for place, (title, fluency) in enumerate(panels):
            one = axes[place]
            highest = max(_mean([fluency(run) for run in runs]) for runs in points.values())
            for method, look in _CURVES.items():
                line = [([fluency(r) for r in runs], runs) for runs in _along(seeds, method, settings)]
                xs = [_mean(values) for values, _ in line]
                ys = [_mean([run["hallucination"] for run in runs]) for _, runs in line]
                # A model that is lost would stretch the axis until nothing else can be seen.
                kept = [i for i, value in enumerate(xs) if value <= 2 * highest and math.isfinite(value)]
                marks = {"linewidth": 2, "markersize": 5, "markerfacecolor": "white"}
                one.plot([xs[i] for i in kept], [ys[i] for i in kept], **marks, **look)
            for name, runs in points.items():
                x, y = _mean([fluency(r) for r in runs]), _mean([r["hallucination"] for r in runs])
                one.plot(x, y, linestyle="none", markersize=11, **_POINTS[name])
            one.set_xlabel(title)
            one.set_ylabel("hallucination %")
            own = _mean([seed["people"]["hallucination"] for seed in seeds])
            one.axhline(own, color="#767676", linewidth=1, linestyle=":", label="people's responses")
        axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1.0))


def _along(seeds: Sequence[Seed], method: str, settings: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """The base, then the method at every strength that was answered: the runs of all seeds at each."""
    found = [[seed["models"]["base"]["test"] for seed in seeds]]
    dampings = [
        removal.choose(removal.of(seed["entries"], method), seed["models"]["base"]["validation"], settings["fluency"])[
            "damping"
        ]
        for seed in seeds
    ]
    for strength in settings["answered"]:
        found.append(
            [
                removal.of(seed["entries"], method, strength=strength, damping=damping)[0]["test"]
                for seed, damping in zip(seeds, dampings, strict=True)
            ]
        )
    return found


def _draw_damping(results: Mapping[str, Any], path: Path) -> None:
    """Perplexity and grounding of the validation turns over the strength, with a line per damping."""
    seeds, settings = results["seeds"], results["settings"]
    dampings = (None, *settings["dampings"])
    strengths = [0.0, *settings["strengths"]]
    base = [seed["models"]["base"]["validation"] for seed in seeds]
    lines: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (
            f"δ = {settings['damping']:g}" if times is None else f"δ = {times:g} F̄_t",
            {"method": "removal", "times": times},
            {"color": f"C{place}", "marker": "o"},
        )
        for place, times in enumerate(dampings)
    ]
    lines.append(
        ("task arithmetic", {"method": "task-arithmetic"}, {"color": "#767676", "marker": "s", "linestyle": "--"})
    )
    with figure(path, 9.0, 3.8, panels=2) as axes:
        for label, which, look in lines:
            runs = [
                base,
                *(
                    [removal.of(seed["entries"], strength=strength, **which)[0]["validation"] for seed in seeds]
                    for strength in settings["strengths"]
                ),
            ]
            # Above e^12 the model is lost, and how far says nothing.
            nll = [_mean([min(12.0, r["nll"]) if r["nll"] is not None else 12.0 for r in found]) for found in runs]
            alive = [i for i, value in enumerate(nll) if value < 12.0]
            axes[0].plot(strengths, [math.exp(value) for value in nll], label=label, markersize=4, **look)
            grounding = [_mean([r["grounding"] for r in runs[i]]) for i in alive]
            axes[1].plot([strengths[i] for i in alive], grounding, label=label, markersize=4, **look)
        axes[0].set_yscale("log")
        axes[0].set_ylabel("perplexity, validation")
        axes[1].set_ylabel("grounding, nats per token")
        for one in axes:
            one.set_xlabel("strength")
        axes[0].legend(fontsize=8)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
