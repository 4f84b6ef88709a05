"""One seed: every study at every place of its dial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any

import torch

import gradmerge as gm

from ..common.driver import Experiment, Seed
from ..common.states import State, distance, mean_entry, norm
from . import linear
from .cases import Case, case_of
from .data import Rows, joined
from .models import estimated, residual, scored, trained
from .report import REPORT
from .settings import SCALES
from .whole import match_whole

STRUCTURES = ("diagonal", "kronecker")
#: What gradient matching is told that the models were tuned under.
PENALTIES = {"P = 0": "none", "P = H_0": None}


DESCRIPTION = """\
When does curvature help? Each study changes one thing and leaves everything else as it is.

A network of three layers is trained on scikit-learn's digits and fine-tuned on two tasks, and the two are merged: with
tasks that agree or do not, of sizes from 1 : 1 to 30 : 1, fine-tuned with and without the penalty, from a base that has
memorized its data or not, in networks of other depths and in a transformer. Linear models show what the theory
promises. The small scale takes a quarter of an hour on one core.
"""


class StudiesSeed(Seed):
    """All studies of one seed."""

    def results(self) -> dict[str, Any]:
        """Return every study, and the linear models, with numbers of seven digits: there are many."""
        torch.set_num_threads(1)  # layers this small gain nothing from more
        given = asdict(self.settings)
        studies = {
            name: self.stage(name, lambda folder, n=name: self._study(n), settings=given)
            for name in self.settings.dials
        }
        linear_models = self.stage("linear", lambda folder: self._linear(), settings=given)
        return _rounded({"seed": self.seed, "studies": studies, "linear": linear_models})  # type: ignore[no-any-return]

    def _study(self, dial: str) -> list[dict[str, Any]]:
        return [
            {"value": value, **self.measured(case_of(self.settings, self.seed, dial, value), dial)}
            for value in self.settings.dials[dial]
        ]

    def measured(self, case: Case, dial: str) -> dict[str, Any]:
        """Model → test set → scores; and what is worth knowing about the tuned models."""
        shape = case.shape
        base = trained(None, case.base_rows, case.base, shape, seed=self.seed)
        priors = {kind: estimated(base, case.base_rows, shape, kind) for kind in STRUCTURES}
        every, held = joined(case.base_rows, *case.tasks), {}
        how, again, damping = case.tuning, case.tuning, "auto"
        if case.strength:
            # The penalty stands for the base's rows, and is a diagonal whatever the tasks' curvature is.
            every, damping = joined(*case.tasks), case.strength * self.settings.damping
            how, again = self.settings.held, self.settings.held_again
            priors = dict.fromkeys(STRUCTURES, priors["diagonal"].scale(case.strength))
            held = {"prior": priors["diagonal"], "damping": damping}
        tune = partial(trained, base, shape=shape, **held)
        tuned = [tune(rows, how, seed=self.seed + 1000 * place) for place, rows in enumerate(case.tasks, 1)]
        own = {
            kind: [estimated(one, rows, shape, kind) for one, rows in zip(tuned, case.tasks, strict=True)]
            for kind in STRUCTURES
        }
        merge = partial(gm.merge_state_dicts, base, tuned, threads=1)

        def matched(priors: Mapping[str, Any], more: str = "", reduction: str = "sum") -> dict[str, State]:
            return {
                f"{kind}, {said}{more}": merge(
                    prior=prior, curvature=own[kind], penalty=penalty, damping=damping, reduction=reduction
                )
                for kind, prior in priors.items()
                for said, penalty in PENALTIES.items()
            }

        def arithmetic(weight: float) -> State:
            return merge("task-arithmetic", weights=[weight] * len(tuned))

        def loss_of(weight: float) -> float:
            found = scored(arithmetic(weight), case.valid, shape)
            return fmean(one["loss"] for one in found.values())

        best = min(self.settings.weights, key=loss_of)
        joint = tune(every, how, seed=self.seed + 3000)
        models = {
            "base": base,
            "average": merge("average"),
            "task-arithmetic": arithmetic(1.0),
            "task-arithmetic, tuned": arithmetic(best),
            "fisher-averaging": merge("fisher-averaging", curvature=own["diagonal"]),
            **matched(priors),
            "joint": joint,
            "joint again": tune(every, again, seed=self.seed + 4000),
        }
        if dial == "sizes":
            models["fisher-averaging, mean"] = merge("fisher-averaging", curvature=own["diagonal"], reduction="mean")
            models |= matched(priors, ", mean", "mean")
        if dial == "base":
            held_out = {kind: estimated(base, case.held_out, shape, kind) for kind in STRUCTURES}
            models |= matched(held_out, ", held out")
        if dial == "network":
            # Sums over two tasks, as a Kronecker merge is damped by what its layers have on average.
            damping = sum(mean_entry(one) for one in own["diagonal"])
            models["whole, P = 0"] = match_whole(shape, base, tuned, case.base_rows, case.tasks, damping)
        facts = {
            "weight": best,
            "moved": fmean(distance(one, base) / norm(base) for one in tuned),
            "F_0": mean_entry(priors["diagonal"]),
            "F_t": fmean(mean_entry(one) for one in own["diagonal"]),
        }
        if dial == "base":
            facts["F_0, held out"] = mean_entry(held_out["diagonal"])
        if case.strength:
            penalty = {name: value + damping for name, value in priors["diagonal"].items()}
            facts["residual"] = fmean(
                residual(one, base, rows, penalty, shape) for one, rows in zip(tuned, case.tasks, strict=True)
            )
        scores = {name: scored(state, case.tests, shape, joint) for name, state in models.items()}
        return {"trained_on": case.trained_on, "facts": facts, "scores": scores}

    def _linear(self) -> dict[str, Any]:
        """Rows of the study of kinds, in float64."""
        case = case_of(self.settings, self.seed, "kinds", 100)
        base, *tasks = (Rows(rows.pixels.double(), rows.labels) for rows in (case.base_rows, *case.tasks))
        tests = [Rows(rows.pixels.double(), rows.labels) for rows in case.tests.values()]
        return {name: linear.compare(name, self.settings.ridge, base, tasks, tests) for name in linear.LOSSES}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


#: Settings were chosen on seed 0. Networks of some thousand weights are fastest on a CPU.
EXPERIMENT = Experiment(
    "studies", DESCRIPTION, SCALES, StudiesSeed, REPORT, defaults={"seeds": [1, 2, 3, 4, 5], "device": "cpu"}
)
