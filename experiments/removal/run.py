"""One seed of the removal experiment: the base, the retrained target, and the ways of removal between them.

Every way is a path of weights that starts at the base, with one strength: of a step, or how far a training went, with
interpolation between saved weights. Ways are compared where the perplexity of validation rows of the retain set has
risen by the same share, and at their default.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradmerge as gm

from ..common.data import evenly
from ..common.driver import Experiment, Run, Seed, stage_seconds
from ..common.states import State, distance, mean_entry, norm, put, read_state
from ..common.training import fine_tune
from . import hallucination, toxicity
from .npo import optimize
from .report import REPORT, WAYS
from .robustness import quantize, relearn
from .settings import SOURCES, TASKS, TOXICITY, Methods, Toxicity
from .workload import Rows, Workload, row_losses

DESCRIPTION = """\
Remove a data set from a language model (the paper's table of toxicity and hallucinations).

toxicity: a small GPT-2 is trained from scratch on WikiText-2, reviews and comments, toxic ones among them.
hallucination: a small T5 learns to answer from knowledge (Wizard of Wikipedia), on true turns and on turns with
swapped knowledge.

Both are also trained without the data to remove, on the same batches: the target. Negation, gradient matching,
influence steps and NPO are compared at the same cost on the retain set, and then quantized to 4 bits, or fine-tuned
again on a tenth of the forget set. DIR, or DIR/text, has wikitext2, imdb, yelp, amazon,
jigsaw_toxic, real_toxicity_prompts and wizard_of_wikipedia.

  python -m experiments.removal --data-dir DIR --seeds 0,1,2 -o runs/toxicity
  python -m experiments.removal --task hallucination --data-dir DIR --seeds 0,1,2 -o runs/hallucination
"""
#: The δ of the paper's code.
PAPER_DAMPING = 1e-10
#: A path is not followed beyond this rise of perplexity.
LOST = 1.0
#: With this limit, no layer has Kronecker factors.
DIAGONAL = 0


@dataclass
class Way:
    """A path of weights."""

    points: Sequence[State]
    """At the strengths 0, 1, …; 0 is the base."""
    strengths: Sequence[float]
    """Those that are tried."""
    default: float
    facts: dict[str, Any] = field(default_factory=dict)


class RemovalSeed(Seed):
    """The models and removals of one seed."""

    def __init__(self, run: Run, seed: int) -> None:
        super().__init__(run, seed)
        kinds = {True: toxicity.ToxicityWorkload, False: hallucination.HallucinationWorkload}
        self.task: Workload = kinds[isinstance(run.settings, Toxicity)](run, seed)
        self.methods: Methods = run.settings.methods
        self.load = cache(lambda name: self.task.load(self.folder / name))
        self.given = {"seed": seed, "data": run.shared, "settings": asdict(run.settings)}

    def results(self) -> dict[str, Any]:
        for name in ("base", "target"):
            self._stage(name, partial(self.task.train_base, with_forget=name == "base"), [])
        self._estimate("base", self.task.retain)
        training = {"plain": self._fine_tune("plain")}
        unit = self._estimate("plain", self.task.forget)["mean_entry"]
        training["theory"] = self._fine_tune("theory", unit)
        self._estimate("theory", self.task.forget)
        paths = {
            name: self._stage(f"path-{name}", make, ["base"])
            for name, make in {
                "influence-kronecker": self._influence,
                "influence-diagonal": partial(self._influence, max_kronecker_dim=DIAGONAL),
                "npo": self._npo,
            }.items()
        }
        limits = {
            name: self._stage(f"limit-{name}", lambda _, n=name: self._judge(self.load(n)), [name, "target"])
            for name in ("base", "target", "taught-plain")
        }
        ways, robust = {}, {}
        for name in WAYS:
            after = ["target", f"path-{name}" if name in paths else "fisher-theory"]
            way = cache(partial(self._way, name, unit, paths.get(name)))
            ways[name] = self._stage(f"way-{name}", partial(self._follow, way), after)
            chosen = ways[name]["chosen"]["dial"]
            make = lambda folder, w=way, d=chosen: self._robust(between(w().points, d), folder)  # noqa: E731
            robust[name] = self._stage(f"robust-{name}", make, [f"way-{name}"])
        for name in ("base", "target"):
            make = lambda folder, n=name: self._robust(read_state(self.folder / n / "model"), folder)  # noqa: E731
            robust[name] = self._stage(f"robust-{name}", make, [name, "target"])
        compared = {"training": training, "unit": unit, "limits": limits, "ways": ways, "robust": robust}
        return {"seed": self.seed, "comparison": compared, "seconds": stage_seconds(self.folder)}

    def _stage(self, name: str, make: Callable[[Path], Any], after: Sequence[str]) -> Any:
        return self.stage(name, make, self.given, after)

    def _batches(self, rows: Rows) -> Iterable[dict[str, Tensor]]:
        return self.task.collate.batches(rows, self.methods.batch)

    def _measure(self, model: Any, split: str) -> dict[str, float]:
        return self.task.measure(model, split, self.load("target") if split == "test" else None)

    def _judge(self, model: Any) -> dict[str, Any]:
        return {**self._measure(model, "test"), **self.task.judge(model)}

    def _estimate(self, name: str, rows: Rows) -> dict[str, Any]:
        """Estimate the sum of squared gradients at the data's labels; a part of many rows stands for all."""
        model = "base" if name == "base" else f"taught-{name}"

        def make(folder: Path) -> dict[str, Any]:
            some = evenly(rows, self.methods.curvature_rows)
            how = {"output": self.task.output, "progress": False}
            found = gm.estimate_curvature(self.load(model), self._batches(some), "empirical", **how)
            found = found.scale(len(rows) / len(some))
            found.save(folder / "curvature")
            return {"examples": len(some), "of": len(rows), "mean_entry": mean_entry(found)}

        found: dict[str, Any] = self._stage(f"fisher-{name}", make, [model])
        return found

    def _curvature(self, name: str) -> gm.Curvature:
        return gm.Curvature.load(self.folder / f"fisher-{name}" / "curvature")

    def _fine_tune(self, name: str, damping: float | None = None) -> dict[str, Any]:
        """Fine-tune the base on the forget set; with a damping under ½‖θ − θ_0‖² in the norm of F_0 + δ.

        Training minimizes the mean loss of a token, so the penalty is divided by their number.
        """

        def make(folder: Path) -> dict[str, Any]:
            torch.manual_seed(self.seed)
            model = self.task.load(self.folder / "base")
            start = {name: p.detach().clone() for name, p in model.named_parameters()}
            training, prior = getattr(self.methods, name), {}
            if damping is not None:
                shifted = 0 if model.config.is_encoder_decoder else 1
                tokens = sum(len(row["labels"]) - shifted for row in self.task.forget)
                training = replace(training, strength=1 / tokens, coupling="adam")
                prior = {name: value + damping for name, value in self._curvature("base").items()}
            how = {"seed": self.seed, "device": self.run.device, "prior": prior or "identity"}
            took = fine_tune(model.train(), self.task.forget, self.task.collate, folder, training, **how)
            model.eval().save_pretrained(folder / "model")
            return took if damping is None else took | {"residual": self._residual(model, start, prior)}

        after = ["base"] if damping is None else ["fisher-base", "fisher-plain"]
        found: dict[str, Any] = self._stage(f"taught-{name}", make, after)
        return found

    def _residual(self, model: Any, start: State, prior: State) -> float:
        """Return ‖g + H_0 (θ − θ_0)‖ / ‖g‖ with g the gradient on the forget set: 0 at the minimum of the theory."""
        model.zero_grad()
        for batch in self._batches(self.task.forget):
            row_losses(model, batch).sum().backward()
        now = {n: (p.detach(), p.grad) for n, p in model.named_parameters() if p.grad is not None}
        left = {n: g + prior[n].to(g) * (p - start[n]).to(g) for n, (p, g) in now.items()}
        model.zero_grad()
        return norm(left) / norm({n: g for n, (_, g) in now.items()})

    @cached_property
    def _retained(self) -> list[Any]:
        return evenly(self.task.retain, self.methods.retain_rows)

    def _influence(self, folder: Path, **options: Any) -> dict[str, Any]:
        """Take the step of gm.remove."""
        path = Snapshots(self.task.load(self.folder / "base"), folder)
        result = gm.remove(
            path.model,
            forget=list(self._batches(self.task.forget)),
            retain=list(self._batches(self._retained)),
            retain_size=len(self.task.retain),
            output=self.task.output,
            progress=False,
            **options,
        )
        path.save()
        facts = {"budget": result.budget, "used": result.used, "s": result.s, "notes": list(map(str, result.notes))}
        return {**facts, "points": path.taken, "default": 1, "seconds": result.seconds}

    def _npo(self, folder: Path) -> dict[str, Any]:
        path, begun = Snapshots(self.task.load(self.folder / "base"), folder), time.perf_counter()

        def after_step(step: int, steps: int) -> None:
            if step * self.methods.snapshots // steps > (step - 1) * self.methods.snapshots // steps:
                path.save()

        rows = self.task.forget, self._retained, self.task.collate, self.methods.npo
        optimize(path.model, *rows, seed=self.seed, after_step=after_step)
        return {"points": path.taken, "default": path.taken, "seconds": time.perf_counter() - begun}

    def _way(self, name: str, unit: float, path: Mapping[str, Any] | None) -> Way:
        base = read_state(self.folder / "base" / "model")
        if path is not None:
            folder = self.folder / f"path-{name}"
            files = [folder / f"{number}.safetensors" for number in range(1, path["points"] + 1)]
            strengths = range(1, len(files) + 1) if len(files) > 1 else self.methods.strengths
            return Way([base, *map(load_file, files)], strengths, path["default"], dict(path))
        tuning, negated = "theory" if name.endswith("theory") else "plain", name.startswith("negation")
        tuned = read_state(self.folder / f"taught-{tuning}" / "model")
        how: dict[str, Any] = {"threads": 2}
        if not negated:
            how |= {"prior": self._curvature("base"), "curvature": [self._curvature(tuning)]}
        if name in ("matching-paper", "matching-theory"):
            how |= {"damping": PAPER_DAMPING if name == "matching-paper" else unit, "options": {"cap": "none"}}
        rule, sign = ("task-arithmetic", -1.0) if negated else ("removal", 1.0)
        # What is subtracted is proportional to the strength, so that all strengths are on the line through this one.
        whole = gm.merge_state_dicts(base, [tuned], rule, weights=[sign], **how)
        moved = {"tuned": distance(tuned, base), "removed": distance(whole, base)}
        return Way([base, whole], self.methods.strengths, 1.0, {"moved": moved})

    def _follow(self, make: Callable[[], Way], _: Path) -> dict[str, Any]:
        way, model = make(), self.task.load(self.folder / "base")

        def at(strength: float) -> dict[str, Any]:
            put(model, between(way.points, strength))
            return {"dial": strength, **{split: self._measure(model, split) for split in ("validation", "test")}}

        curve, chosen = follow(at, way.strengths, self.methods.budget, self.methods.halvings)
        found: dict[str, Any] = {**way.facts, "curve": curve}
        for which, strength in (("chosen", chosen), ("default", way.default)):
            put(model, between(way.points, strength))
            validation = self._measure(model, "validation")
            found[which] = {"dial": strength, "rise": rise(validation, curve[0]["validation"]), **self._judge(model)}
        return found

    def _robust(self, state: State, folder: Path) -> dict[str, Any]:
        """Measure weights as they are, quantized to 4 bits, and after relearning a share of the forget set."""
        found = {}
        for name in ("as it is", "4 bits", "relearned"):
            model = put(self.task.load(self.folder / "base"), state)
            if name == "4 bits":
                quantize(model)
            elif name == "relearned":
                relearn(model, self.task, self.methods.plain, self.methods.relearned_share, folder)
            found[name] = self._measure(model, "test")
        return found


def follow(
    at: Callable[[float], dict[str, Any]], strengths: Iterable[float], budget: float, halvings: int
) -> tuple[list[dict[str, Any]], float]:
    """Return points of a path by strength, and the last strength before the rise first exceeds the budget.

    The interval in which that happens is halved several times.
    """
    found = {0.0: at(0.0)}

    def risen(strength: float) -> float:
        return rise(found[strength]["validation"], found[0.0]["validation"])

    def first_over() -> float:
        return next((strength for strength in sorted(found) if risen(strength) > budget), math.inf)

    for strength in map(float, strengths):
        found[strength] = at(strength)
        if risen(strength) > LOST:
            break
    for _ in range(halvings):
        over = first_over()
        if over == math.inf:
            break
        middle = (max(strength for strength in found if strength < over) + over) / 2
        found[middle] = at(middle)
    return [found[strength] for strength in sorted(found)], max(s for s in found if s < first_over())


def rise(now: Mapping[str, float], before: Mapping[str, float]) -> float:
    """Return the relative rise of the perplexity of the retain set; infinite if it is not a number."""
    more = now["kept"] - before["kept"]
    return math.expm1(min(more, 700.0)) if math.isfinite(more) else math.inf


def between(points: Sequence[State], strength: float) -> dict[str, Tensor]:
    """Return weights between two points; an integer is a point, and beyond the last the line goes on."""
    index = min(int(strength), len(points) - 2)
    here, there = points[index], points[index + 1]
    return {name: torch.lerp(value, there[name], strength - index) for name, value in here.items() if name in there}


class Snapshots:
    """Saves the weights of a model that changes."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model, self._folder, self.taken = model, folder, 0

    def save(self) -> None:
        self.taken += 1
        state = {name: p.detach().cpu().contiguous() for name, p in self.model.named_parameters()}
        save_file(state, self._folder / f"{self.taken}.safetensors")


def noise_floors(run: Run, seeds: Sequence[RemovalSeed]) -> dict[str, Any]:
    """Return how far each seed's target is from those of the other seeds, means over the others."""
    if len(seeds) < 2:
        return {"floors": None}
    floors = []
    for seed in seeds:
        found = [seed._measure(other.load("target"), "test") for other in seeds if other is not seed]
        floors.append({key: sum(one[key] for one in found) / len(found) for key in found[0]})
    return {"floors": floors}


def prepare(run: Run) -> Any:
    return (toxicity if isinstance(run.settings, Toxicity) else hallucination).prepare(run)


def settings_of(args: argparse.Namespace, settings: Mapping[str, Any]) -> Any:
    if settings[args.task] is None:
        raise gm.InputError(f"--scale {args.scale} has no --task {args.task}")
    return settings[args.task]


EXPERIMENT = Experiment(
    "removal",
    DESCRIPTION,
    {scale: {name: scales.get(scale) for name, scales in TASKS.items()} for scale in TOXICITY},
    RemovalSeed,
    REPORT,
    prepare,
    facts=noise_floors,  # type: ignore[arg-type]
    sources=SOURCES,
    options={"task": {"choices": list(TASKS), "default": "toxicity", "help": "default: %(default)s"}},
    adjust=settings_of,
    needs=dict.fromkeys(("small", "tiny"), ("data-dir",)),
)
