"""Ways to take data out of a model, held against the model that was trained without them.

Every way is a path through weights that begins at the model as it is, with one dial: a strength, or how many steps were
made (between two of them weights are interpolated). It is followed until too much of what stays is lost. Ways are
compared where the perplexity of held-out text that stays has risen by the same share, and at their default.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradmerge as gm
from gradmerge.curvature.estimate import estimate_gradient

from .data import evenly
from .npo import optimise
from .plan import Step
from .stages import run_stage
from .states import State, distance, mean_entry, read_state
from .training import Training, fine_tune

#: What a way is called in tables and figures.
WAYS = {
    "negation": "negation (task arithmetic)",
    "negation-theory": "negation, tuned under H_0",
    "matching": "gradient matching, bounded (the default)",
    "matching-paper": "gradient matching, the paper's formula",
    "matching-theory": "gradient matching, tuned under H_0",
    "influence-kronecker": "influence steps, Kronecker curvature",
    "influence-diagonal": "influence steps, diagonal curvature",
    "npo": "NPO, with loss on what stays",
}
#: The δ of the paper's code.
PAPER_DAMPING = 1e-10
#: A path is not followed beyond this rise of perplexity.
LOST = 1.0
#: Of the plan of a run.
FOLLOWED = (
    f"{len(WAYS)} ways of removal, each followed until what stays is lost; loss and KL to the target at each point"
)
#: Where the max_kronecker_dim layer that has Kronecker factors is this wide, none has.
NONE_WIDE = 0

Measured = dict[str, float]
"""Nats per token: the loss of text that stays (`kept`) and of text that goes (`forget`), and of both KL(target ‖ model)
(`kl_kept`, `kl_forget`)."""


@dataclass(frozen=True)
class Comparing:
    """What the ways are given."""

    plain: Training
    """Of the model that is tuned on what goes."""
    theory: Training
    """Of the one that is tuned under ½‖θ − θ_0‖² in the norm of H_0 = F_0 + δ; its strength is set here."""
    npo: Training
    strengths: tuple[float, ...]
    keep_rows: int
    """Rows of what stays that influence steps and NPO see, at most."""
    curvature_rows: int
    """Of what stays, at most, in the curvature of gradient matching."""
    batch: int
    """Rows at once in influence steps and estimates of curvature."""
    budget: float = 0.05
    """The share by which the perplexity of validation text that stays may rise."""
    halvings: int = 4
    """Of the part of a path in which the budget is passed."""
    snapshots: int = 8
    """Places of NPO's path that are kept."""


def steps(comparing: Comparing, what: str) -> list[Step]:
    """The trainings, for the plan of a run."""
    how = {"": comparing.plain, ", under H_0 = F_0 + δ": comparing.theory, ", by NPO": comparing.npo}
    return [Step(f"{what}{name}", "the base", None, training) for name, training in how.items()]


@dataclass
class Way:
    """A path of weights."""

    points: Sequence[State]
    """At the dials 0, 1, …; 0 is the model as it is."""
    dials: Sequence[float]
    """Those that are tried."""
    default: float
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bench:
    """One seed's models, data and measurements, and the stages in which ways are made and followed."""

    folder: Path
    """Of the seed's stages."""
    settings: Comparing
    seed: int
    device: str
    given: Any
    """What the stages depend on."""
    load: Callable[[str], Any]
    """From the name of a stage to its model; there are `base`, `target` and what is tuned here."""
    forget: Sequence[Any]
    keep: Sequence[Any]
    """All rows that stay."""
    collate: Callable[[Any], dict[str, Tensor]]
    output: str | None
    """What the model's output means, for gm.estimate_curvature."""
    measure: Callable[[Any, str], Measured]
    """From a model and `validation` or `test`; KL is asked for of `test` alone."""
    judge: Callable[[Any], dict[str, Any]]
    """What the model is on test data: all that is measured, and what it writes."""

    def results(self) -> dict[str, Any]:
        """Every way along its path, where it is chosen and at its default; and the models that it stands between."""
        self._curvature("base", self.keep)
        training = {"plain": self._tune("plain")}
        unit = self._curvature("plain", self.forget)["mean_entry"]
        training["theory"] = self._tune("theory", unit)
        self._curvature("theory", self.forget)
        paths = {
            name: self._path(name, make)
            for name, make in {
                "influence-kronecker": self._influence,
                "influence-diagonal": partial(self._influence, max_kronecker_dim=NONE_WIDE),
                "npo": self._npo,
            }.items()
        }
        limits = {
            name: self._stage(f"limit-{name}", lambda _, n=name: self.judge(self.load(n)), after=[name, "target"])
            for name in ("base", "target", "taught-plain")
        }
        ways = {}
        for name in WAYS:
            after = ["target", f"path-{name}" if name in paths else "fisher-theory"]
            ways[name] = self._stage(f"way-{name}", partial(self._followed, name, unit, paths.get(name)), after)
        return {"training": training, "unit": unit, "limits": limits, "ways": ways}

    def _stage(self, name: str, make: Callable[[Path], Any], after: Sequence[str]) -> Any:
        given = {"given": self.given, "settings": asdict(self.settings)}
        return run_stage(self.folder / name, make, given, after)

    def _batches(self, rows: Sequence[Any]) -> Iterator[dict[str, Tensor]]:
        """Rows of like length together."""
        ordered, size = sorted(rows, key=lambda row: len(row["input_ids"])), self.settings.batch
        return (self.collate(ordered[first : first + size]) for first in range(0, len(ordered), size))

    def _curvature(self, name: str, rows: Sequence[Any]) -> dict[str, Any]:
        """Σ of squared gradients over examples with the data's labels; of many, a part stands for all."""
        model = "base" if name == "base" else f"taught-{name}"

        def make(folder: Path) -> dict[str, Any]:
            some = evenly(rows, self.settings.curvature_rows)
            found = gm.estimate_curvature(self.load(model), self._batches(some), "empirical", output=self.output)
            found = found.scale(len(rows) / len(some))
            found.save(folder / "curvature")
            return {"examples": len(some), "of": len(rows), "mean_entry": mean_entry(found)}

        found: dict[str, Any] = self._stage(f"fisher-{name}", make, after=[model])
        return found

    def _read_curvature(self, name: str) -> gm.Curvature:
        return gm.Curvature.load(self.folder / f"fisher-{name}" / "curvature")

    def _tune(self, name: str, damping: float | None = None) -> dict[str, Any]:
        """The base tuned on what goes; with a damping under ½‖θ − θ_0‖² in the norm of F_0 + δ, for a sum of losses.

        Training minimises the mean loss of a token, so the penalty is divided by their number.
        """

        def make(folder: Path) -> dict[str, Any]:
            torch.manual_seed(self.seed)
            model = self.load("base")
            start = {name: p.detach().clone() for name, p in model.named_parameters()}
            training, prior = getattr(self.settings, name), {}
            if damping is not None:
                shifted = 0 if model.config.is_encoder_decoder else 1
                tokens = sum(len(row["labels"]) - shifted for row in self.forget)
                training = replace(training, strength=1 / tokens, coupling="adam")
                prior = {name: value + damping for name, value in self._read_curvature("base").items()}
            how = {"seed": self.seed, "device": self.device, "prior": prior or "identity"}
            took = fine_tune(model.train(), self.forget, self.collate, folder, training, **how)
            model.eval().save_pretrained(folder / "model")
            if damping is not None:
                took["residual"] = self._residual(model, start, prior)
            return took

        after = ["base"] if damping is None else ["fisher-base", "fisher-plain"]
        found: dict[str, Any] = self._stage(f"taught-{name}", make, after)
        return found

    def _residual(self, model: Any, start: State, prior: State) -> float:
        """‖g + H_0 (θ − θ_0)‖ / ‖g‖ with g the gradient on what goes: 0 at the minimum that the theory asks for."""
        gradient = estimate_gradient(model, self._batches(self.forget), output=self.output)
        now = dict(model.named_parameters())
        left = {n: g + prior[n].to(g) * (now[n].detach() - start[n]).to(g) for n, g in gradient.items()}
        return math.sqrt(_squares(left) / _squares(gradient))

    def _path(self, name: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = self._stage(f"path-{name}", make, after=["base"])
        return found

    @cached_property
    def _kept_rows(self) -> list[Any]:
        return evenly(self.keep, self.settings.keep_rows)

    def _influence(self, folder: Path, **options: Any) -> dict[str, Any]:
        """The end of the step that gm.remove takes."""
        path = Snapshots(self.load("base"), folder)
        result = gm.remove(
            path.model,
            forget=list(self._batches(self.forget)),
            retain=list(self._batches(self._kept_rows)),
            retain_size=len(self.keep),
            output=self.output,
            progress=False,
            **options,
        )
        path.save()
        facts = {"budget": result.budget, "used": result.used, "rows": result.rows, "notes": result.notes}
        lengths = {"s": result.s, "tried": len(result.steps[0].trials)}
        return {**facts, **lengths, "points": path.taken, "default": 1, "seconds": result.seconds}

    def _npo(self, folder: Path) -> dict[str, Any]:
        path, begun = Snapshots(self.load("base"), folder), time.perf_counter()

        def each_step(step: int, steps: int) -> None:
            if step * self.settings.snapshots // steps > (step - 1) * self.settings.snapshots // steps:
                path.save()

        rows = self.forget, self._kept_rows, self.collate, self.settings.npo
        optimise(path.model, *rows, seed=self.seed, each_step=each_step)
        return {"points": path.taken, "default": path.taken, "seconds": time.perf_counter() - begun}

    @cached_property
    def _base(self) -> dict[str, Tensor]:
        return read_state(self.folder / "base" / "model")

    def _way(self, name: str, unit: float, path: Mapping[str, Any] | None) -> Way:
        if path is not None:
            folder = self.folder / f"path-{name}"
            files = [folder / f"{number}.safetensors" for number in range(1, path["points"] + 1)]
            dials = range(1, len(files) + 1) if len(files) > 1 else self.settings.strengths
            return Way([self._base, *map(load_file, files)], dials, path["default"], dict(path))
        tuning, negated = "theory" if name.endswith("theory") else "plain", name.startswith("negation")
        tuned = read_state(self.folder / f"taught-{tuning}" / "model")
        how: dict[str, Any] = {"threads": 2}
        if not negated:
            how |= {"prior": self._read_curvature("base"), "curvature": [self._read_curvature(tuning)]}
        if name == "matching-paper":
            how |= {"damping": PAPER_DAMPING, "options": {"cap": "none"}}
        elif name == "matching-theory":
            how |= {"damping": unit, "options": {"cap": "none"}}
        rule, sign = ("task-arithmetic", -1.0) if negated else ("removal", 1.0)
        # What is subtracted is proportional to the strength, so that all strengths lie on the line through this one.
        whole = gm.merge_state_dicts(self._base, [tuned], rule, weights=[sign], **how)
        moved = {"tuned": distance(tuned, self._base), "removed": distance(whole, self._base)}
        return Way([self._base, whole], self.settings.strengths, 1.0, {"moved": moved})

    def _followed(self, name: str, unit: float, path: Mapping[str, Any] | None, _: Path) -> dict[str, Any]:
        way, model = self._way(name, unit, path), self.load("base")

        def at(dial: float) -> dict[str, Any]:
            put(model, between(way.points, dial))
            return {"dial": dial, "validation": self.measure(model, "validation"), "test": self.measure(model, "test")}

        curve, chosen = follow(at, way.dials, self.settings.budget, self.settings.halvings)
        told: dict[str, Any] = {**way.facts, "curve": curve}
        for which, dial in (("chosen", chosen), ("default", way.default)):
            put(model, between(way.points, dial))
            validation = self.measure(model, "validation")
            told[which] = {"dial": dial, "rise": rise(validation, curve[0]["validation"]), **self.judge(model)}
        return told


def follow(
    at: Callable[[float], dict[str, Any]], dials: Sequence[float], budget: float, halvings: int
) -> tuple[list[dict[str, Any]], float]:
    """Points of a path from 0 on, by their dials, and the last dial before the rise first passes the budget.

    Between the two dials around that place the path is halved.
    """
    found = {0.0: at(0.0)}

    def risen(dial: float) -> float:
        return rise(found[dial]["validation"], found[0.0]["validation"])

    for dial in dials:
        found[float(dial)] = at(float(dial))
        if risen(float(dial)) > LOST:
            break
    for _ in range(halvings):
        over = next((dial for dial in sorted(found) if risen(dial) > budget), None)
        if over is None:
            break
        middle = (max(dial for dial in found if dial < over) + over) / 2
        found[middle] = at(middle)
    order = sorted(found)
    over = next((dial for dial in order if risen(dial) > budget), math.inf)
    return [found[dial] for dial in order], max(dial for dial in order if dial < over)


def rise(now: Mapping[str, float], before: Mapping[str, float]) -> float:
    """The share by which the perplexity of what stays is above that before; infinite where it is no number."""
    more = now["kept"] - before["kept"]
    return math.expm1(min(more, 700.0)) if math.isfinite(more) else math.inf


def between(points: Sequence[State], dial: float) -> dict[str, Tensor]:
    """Weights on the way from point to point; a whole dial is a point itself; beyond the last, straight on."""
    place = min(int(dial), len(points) - 2)
    here, there = points[place], points[place + 1]
    return {name: torch.lerp(value, there[name], dial - place) for name, value in here.items() if name in there}


def put(model: Any, state: State) -> None:
    """Weights into a model that is there."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


class Snapshots:
    """Saves the weights of a model that changes."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model, self._folder, self.taken = model, folder, 0

    def save(self) -> None:
        self.taken += 1
        state = {name: p.detach().cpu().contiguous() for name, p in self.model.named_parameters()}
        save_file(state, self._folder / f"{self.taken}.safetensors")


def noise_floors(benches: Sequence[Bench]) -> list[Measured] | None:
    """How far each seed's target is from those of the other seeds: the same data, other random numbers.

    Means over the others, of their losses and of KL(target ‖ other); None where there is one seed alone.
    """
    if len(benches) < 2:
        return None
    targets = [bench.load("target") for bench in benches]
    floors = []
    for bench in benches:
        others = [model for other, model in zip(benches, targets, strict=True) if other is not bench]
        found = [bench.measure(model, "test") for model in others]
        floors.append({key: sum(one[key] for one in found) / len(found) for key in found[0]})
    return floors


def _squares(state: State) -> float:
    return sum(float(value.double().square().sum()) for value in state.values())
