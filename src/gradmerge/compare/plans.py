"""Settings as candidates of the engine, and the plan that reads what they need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..engine.build_plan import open_plan
from ..engine.plan import Plan
from ..errors import InputError
from ..recipe import Recipe
from ..rules import METHODS
from .candidates import Candidate, KnownStatistics, plan_of
from .grid import Setting, recipe_with
from .sweeps import changes_files

#: Plans of settings that change what is read, open at a time.
OPEN = 8


class Candidates:
    """The settings of a recipe that can be merged, each on a plan that reads what it merges.

    Weights, options and damping need no other plan than the recipe's. A setting that changes what is read or merged,
    such as ``reduction`` or ``exclude``, has one of its own, which ``opened`` makes of the setting's recipe.
    """

    def __init__(self, recipe: Recipe, plan: Plan, opened: Callable[[Recipe], Plan]) -> None:
        self.recipe, self.plan, self._opened = recipe, plan, opened
        self._plans: dict[tuple[Any, ...], tuple[Plan, KnownStatistics]] = {(): (plan, {})}
        self.left_out: dict[str, str] = {}

    def candidate(self, setting: Setting, name: str = "") -> Candidate:
        own = recipe_with(self.recipe, setting)
        damping = own.damping if "damping" in dict(setting.changes) else None
        return Candidate(name, setting.method, own.weights, own.options, own.own_options, damping)

    def plan_for(self, setting: Setting) -> tuple[Plan, KnownStatistics]:
        """What a setting is merged from, and the statistics of that which are known."""
        key = self._files(setting)
        if key not in self._plans:
            others = [other for other in self._plans if other]
            if len(others) >= OPEN:
                self._plans.pop(others[0])[0].inputs.close()
            self._plans[key] = self._opened(recipe_with(self.recipe, replace(setting, changes=key[1:]))), {}
        return self._plans[key]

    @staticmethod
    def _files(setting: Setting) -> tuple[Any, ...]:
        """What tells the plan of one setting from that of another: nothing for one on the recipe's."""
        changed = sorted((pair for pair in setting.changes if changes_files(pair[0])), key=repr)
        return (setting.method, *changed) if changed else ()

    def possible(self, settings: Sequence[Setting]) -> list[Setting]:
        """Without those that the method refuses, such as an average whose weights sum to 0."""
        found = []
        for setting in settings:
            try:
                plan_of(self.plan_for(setting)[0], self.candidate(setting))
                found.append(setting)
            except InputError as error:
                self.left_out.setdefault(setting.name, str(error))
        if settings and not found:
            raise InputError(f"no setting can be merged: {next(iter(self.left_out.values()))}")
        return found

    def together(self, settings: Sequence[Setting], most: int) -> Iterator[tuple[Plan, KnownStatistics, list[Setting]]]:
        """Settings that are merged from the same files, up to ``most`` at once, in their order."""
        for _, some in itertools.groupby(settings, key=self._files):
            every = list(some)
            for first in range(0, len(every), most):
                part = every[first : first + most]
                yield *self.plan_for(part[0]), part

    def notes(self) -> list[str]:
        return [f"{name} is left out: {why}" for name, why in list(self.left_out.items())[:5]]

    def close(self) -> None:
        """Close all plans."""
        for plan, _ in self._plans.values():
            plan.inputs.close()


def open_for(recipe: Recipe, methods: Sequence[str], **allowed: Any) -> Plan:
    """A plan that reads what some methods need, and no more."""
    needs = frozenset[str]().union(*(_needs(recipe, method) for method in methods))
    reads = needs & {"prior", "curvature", "penalty"} | {"base"}
    who = ", ".join(methods)
    return open_plan(recipe, reads=reads, wanted_by=who, **allowed)


def _needs(recipe: Recipe, method: str) -> frozenset[str]:
    return METHODS[method].needs(recipe.resolved_options if method == recipe.method else {})


def check_prior(recipe: Recipe, methods: Sequence[str], plan: Plan) -> None:
    lacking = [method for method in methods if "prior" in _needs(recipe, method) and plan.inputs.prior is None]
    if lacking:
        raise InputError(
            f"{lacking[0]} needs the curvature of the base, the recipe names none (base.curvature), and the base's "
            "folder has no curvature/ folder"
        )
