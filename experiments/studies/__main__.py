"""`python -m experiments.studies`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import gradmerge as gm

from ..common.plan import Data, Plan, Step
from ..common.program import head, make_parser, run_program
from ..common.seeds import Run, run_seeds
from . import report
from .cases import case_of
from .run import Seed
from .settings import SCALES, Settings

DESCRIPTION = """\
When does curvature help? Small studies, each of which changes one thing and leaves all else as it is.

A network of three layers is trained on scikit-learn's digits and tuned on two tasks, and the two are merged: with tasks
that agree or do not, with sizes from 1 : 1 to 30 : 1, tuned plainly or under the penalty, from a base that knows its
data by heart or does not, in networks of other depths and in a transformer. A linear model shows what the theory
promises. Nothing is fetched.

small: as published, a quarter of an hour on one core. tiny: a few rows, to try it.
Seeds are 1,2,3,4,5 where none are given: settings were chosen on seed 0.
A run that was stopped goes on where it was."""

EXAMPLES = """\
examples:
  python -m experiments.studies
  python -m experiments.studies --render-only -o experiments/results/studies    tables and figures from results.json"""


def main(argv: Sequence[str] | None = None) -> int:
    none = "not used: data and models are made here"
    parser = make_parser("studies", DESCRIPTION, EXAMPLES, model=none, data=none)
    parser.set_defaults(scale="small", seeds=[1, 2, 3, 4, 5])
    return run_program(parser, argv, run, report, plan)


def settings_of(args: argparse.Namespace) -> Settings:
    if args.scale == "full":
        raise gm.InputError("--scale full: this experiment has the scales small and tiny")
    return SCALES[args.scale]


def plan(args: argparse.Namespace) -> Plan:
    settings = settings_of(args)
    steps = []
    for dial, values in settings.dials.items():
        for value in values:
            case, name = case_of(settings, args.seeds[0], dial, value), f"{dial} {value}"
            steps.append(Step(f"{name}, base", "random weights", len(case.base_rows.labels), case.base))
            how, again = (settings.held, settings.held_again) if case.strength else (case.tuning, case.tuning)
            sizes = [len(rows.labels) for rows in case.tasks]
            steps += [Step(f"{name}, task {n}", "the base", size, how) for n, size in enumerate(sizes, 1)]
            every = sum(sizes) + (0 if case.strength else len(case.base_rows.labels))
            steps += [Step(f"{name}, joint", "the base", every, how), Step(f"{name}, again", "the base", every, again)]
    data = Data("scikit-learn's digits", ("image", "label"), ("all 1,797",), local=True)
    return Plan([], [data], steps, ["merges of the two tasks by every method, and linear models of the same rows"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    settings = settings_of(args)
    # Networks of some thousand weights are quickest on a CPU.
    args.device = "cpu"
    seeds = run_seeds(Seed, Run(args.out, settings, args.device), args.seeds, args.jobs)
    return {**head("studies", args), "settings": asdict(settings), "seeds": _rounded(seeds)}


def _rounded(value: Any) -> Any:
    """Numbers with seven digits: there are many of them."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


if __name__ == "__main__":
    raise SystemExit(main())
