"""Settings as candidates of the engine, and the plan that reads what they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.candidates import Candidate, KnownStatistics, plan_of
from ..engine.plan import Plan
from ..engine.planning import open_plan
from ..errors import InputError
from ..recipe import Recipe
from ..rules import RULES
from .grid import Setting


class Candidates:
    """The settings of a recipe that can be merged."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.recipe, self.plan = recipe, plan
        self.known: KnownStatistics = {}
        self.left_out: dict[str, str] = {}

    def candidate(self, setting: Setting, name: str = "") -> Candidate:
        same = setting.method == self.recipe.method
        weights = list(setting.weights) or [1.0] * len(self.recipe.models)
        options, own = (self.recipe.options, self.recipe.own_options) if same else ({}, [])
        return Candidate(name, setting.method, weights, options, own)

    def possible(self, settings: Sequence[Setting]) -> list[Setting]:
        """Without those that the method refuses, such as an average whose weights sum to 0."""
        found = []
        for setting in settings:
            try:
                plan_of(self.plan, self.candidate(setting))
                found.append(setting)
            except InputError as error:
                self.left_out.setdefault(setting.name, str(error))
        if settings and not found:
            raise InputError(f"no setting can be merged: {next(iter(self.left_out.values()))}")
        return found

    def notes(self) -> list[str]:
        return [f"{name} is left out: {why}" for name, why in list(self.left_out.items())[:5]]


def open_for(recipe: Recipe, methods: Sequence[str], **allowed: Any) -> Plan:
    """A plan that reads what some methods need, and no more."""
    needs = frozenset[str]().union(*(_needs(recipe, method) for method in methods))
    reads = needs & {"prior", "curvature", "penalty"} | {"base"}
    who = ", ".join(methods)
    return open_plan(recipe, reads=reads, wanted_by=who, **allowed)


def _needs(recipe: Recipe, method: str) -> frozenset[str]:
    return RULES[method].needs(recipe.resolved_options if method == recipe.method else {})


def check_prior(recipe: Recipe, methods: Sequence[str], plan: Plan) -> None:
    lacking = [method for method in methods if "prior" in _needs(recipe, method) and plan.inputs.prior is None]
    if lacking:
        raise InputError(
            f"{lacking[0]} needs the curvature of the base, the recipe names none (base.curvature), and the base's "
            "folder has no curvature/ folder"
        )
