"""One seed: every study at every value of its factor."""

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
from .data import Case, Rows, concatenate, make_case
from .gauss_newton import match_gauss_newton
from .models import estimate, evaluate, residual, train
from .report import REPORT
from .settings import SCALES

KINDS = ("diagonal", "kronecker")
#: The penalty that gradient matching assumes → its value for `merge_state_dicts`.
PENALTIES = {"P = 0": "none", "P = H_0": None}


DESCRIPTION = """\
When does curvature help? Each study varies one factor.

A network of three layers is trained on scikit-learn's digits and fine-tuned on two tasks, and the two are merged. The
factors are: how much the tasks agree, the ratio of their sizes, fine-tuning with and without the penalty, how long the
base was trained, and the network. Linear models show what the theory promises. The small scale takes a quarter of an
hour on one core.
"""


class StudiesSeed(Seed):
    """All studies of one seed."""

    def results(self) -> dict[str, Any]:
        """Return all studies and the linear models, with seven digits per number to keep the file small."""
        torch.set_num_threads(1)  # more threads do not help with layers this small
        settings = asdict(self.settings)
        studies = {
            name: self.stage(name, lambda folder, n=name: self._study(n), settings=settings)
            for name in self.settings.factors
        }
        linear_models = self.stage("linear", lambda folder: self._linear(), settings=settings)
        return _rounded({"seed": self.seed, "studies": studies, "linear": linear_models})  # type: ignore[no-any-return]

    def _study(self, factor: str) -> list[dict[str, Any]]:
        return [
            {"value": value, **self._run_case(make_case(self.settings, self.seed, factor, value), factor)}
            for value in self.settings.factors[factor]
        ]

    def _run_case(self, case: Case, factor: str) -> dict[str, Any]:
        """Return model → test set → scores, and facts of the fine-tuned models."""
        shape = case.shape
        base = train(None, case.base_rows, case.base_training, shape, seed=self.seed)
        priors = {kind: estimate(base, case.base_rows, shape, kind) for kind in KINDS}
        joint_rows, penalty_options = concatenate(case.base_rows, *case.tasks), {}
        training, repeated_training, damping = case.fine_tuning, case.fine_tuning, "auto"
        if case.penalty_strength:
            # The penalty replaces the base's rows. It is diagonal, whatever the kind of the tasks' curvature is.
            joint_rows, damping = concatenate(*case.tasks), case.penalty_strength * self.settings.damping
            training, repeated_training = self.settings.penalized, self.settings.penalized_in_batches
            priors = dict.fromkeys(KINDS, priors["diagonal"].scale(case.penalty_strength))
            penalty_options = {"prior": priors["diagonal"], "damping": damping}
        fine_tune = partial(train, base, shape=shape, **penalty_options)
        tuned = [fine_tune(rows, training, seed=self.seed + 1000 * n) for n, rows in enumerate(case.tasks, 1)]
        curvature = {
            kind: [estimate(state, rows, shape, kind) for state, rows in zip(tuned, case.tasks, strict=True)]
            for kind in KINDS
        }
        merge = partial(gm.merge_state_dicts, base, tuned, threads=1)

        def match(priors: Mapping[str, Any], suffix: str = "", reduction: str = "sum") -> dict[str, State]:
            return {
                f"{kind}, {title}{suffix}": merge(
                    prior=prior, curvature=curvature[kind], penalty=penalty, damping=damping, reduction=reduction
                )
                for kind, prior in priors.items()
                for title, penalty in PENALTIES.items()
            }

        def task_arithmetic(weight: float) -> State:
            return merge("task-arithmetic", weights=[weight] * len(tuned))

        def validation_loss(weight: float) -> float:
            scores = evaluate(task_arithmetic(weight), case.validation, shape)
            return fmean(score["loss"] for score in scores.values())

        best = min(self.settings.weights, key=validation_loss)
        joint = fine_tune(joint_rows, training, seed=self.seed + 3000)
        models = {
            "base": base,
            "average": merge("average"),
            "task-arithmetic": task_arithmetic(1.0),
            "task-arithmetic, tuned": task_arithmetic(best),
            "fisher-averaging": merge("fisher-averaging", curvature=curvature["diagonal"]),
            **match(priors),
            "joint": joint,
            "joint again": fine_tune(joint_rows, repeated_training, seed=self.seed + 4000),
        }
        if factor == "sizes":
            means = merge("fisher-averaging", curvature=curvature["diagonal"], reduction="mean")
            models |= {"fisher-averaging, mean": means, **match(priors, ", mean", "mean")}
        if factor == "base":
            held_out = {kind: estimate(base, case.held_out, shape, kind) for kind in KINDS}
            models |= match(held_out, ", held out")
        if factor == "network":
            # Sums over two tasks, as the damping of a Kronecker merge is the mean over a layer.
            damping = sum(mean_entry(sums) for sums in curvature["diagonal"])
            models["whole, P = 0"] = match_gauss_newton(shape, base, tuned, case.base_rows, case.tasks, damping)
        facts = {
            "weight": best,
            "moved": fmean(distance(state, base) / norm(base) for state in tuned),
            "F_0": mean_entry(priors["diagonal"]),
            "F_t": fmean(mean_entry(sums) for sums in curvature["diagonal"]),
        }
        if factor == "base":
            facts["F_0, held out"] = mean_entry(held_out["diagonal"])
        if case.penalty_strength:
            penalty = {name: value + damping for name, value in priors["diagonal"].items()}
            facts["residual"] = fmean(
                residual(state, base, rows, penalty, shape) for state, rows in zip(tuned, case.tasks, strict=True)
            )
        scores = {name: evaluate(state, case.tests, shape, joint) for name, state in models.items()}
        return {"trained_on": case.trained_on, "facts": facts, "scores": scores}

    def _linear(self) -> dict[str, Any]:
        """Compare merges of linear models, in float64."""
        case = make_case(self.settings, self.seed, "kinds", 100)
        base, *tasks = (Rows(rows.pixels.double(), rows.labels) for rows in (case.base_rows, *case.tasks))
        tests = [Rows(rows.pixels.double(), rows.labels) for rows in case.tests.values()]
        return {name: linear.compare(name, self.settings.ridge, base, tasks, tests) for name in linear.LOSSES}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


#: Settings were chosen on seed 0. Networks of some thousand weights are fastest on a CPU.
EXPERIMENT = Experiment(
    "studies", DESCRIPTION, SCALES, StudiesSeed, REPORT, defaults={"seeds": [1, 2, 3, 4, 5], "device": "cpu"}
)
