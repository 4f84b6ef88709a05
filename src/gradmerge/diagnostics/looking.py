"""What looking at settings needs, through curvature or on data: the plan that is read, and its candidates."""

from __future__ import annotations

from collections.abc import Sequence

from ..engine.candidates import Candidate, Measured, plan_of
from ..engine.opening import open_plan
from ..engine.plan import Plan
from ..errors import InputError
from ..recipe import Recipe
from ..rules import RULES
from .grid import Setting


class Candidates:
    """Settings as candidates of the engine."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.recipe, self.plan = recipe, plan
        self.known: Measured = {}
        self.left_out: dict[str, str] = {}

    def candidate(self, setting: Setting, name: str = "") -> Candidate:
        own = self.recipe.options if setting.method == self.recipe.method else {}
        weights = list(setting.weights) or [1.0] * len(self.recipe.models)
        return Candidate(name, setting.method, weights, own)

    def possible(self, settings: Sequence[Setting]) -> list[Setting]:
        """Without those that the rule refuses, such as an average whose weights sum to 0."""
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


def _open_for(recipe: Recipe, methods: Sequence[str], allow_pickle: bool, allow_config: Sequence[str]) -> Plan:
    """A plan that reads what some rules need, and no more."""
    needs: frozenset[str] = frozenset()
    for method in methods:
        options = recipe.resolved_options if method == recipe.method else {}
        needs |= RULES[method].needs(options)
    if "penalty" in needs and recipe.base is not None and recipe.base.penalty is not None:
        reading = "removal"
    elif "prior" in needs:
        reading = "gradient-matching"
    elif "curvature" in needs:
        reading = "fisher-averaging"
    else:
        reading = "task-arithmetic" if recipe.base is not None else "weighted-average"
    same = recipe.model_copy(update={"method": reading, "options": {}})
    try:
        plan = open_plan(same, allow_pickle=allow_pickle, allow_config=allow_config)
    except InputError as error:
        raise InputError(str(error).replace(f"{reading} needs", f"{', '.join(methods)} needs")) from error
    plan.needs |= {"base"}
    plan.notes = [note for note in plan.notes if "does not use" not in note]
    return plan


def _check_prior(recipe: Recipe, methods: Sequence[str], plan: Plan) -> None:
    for method in methods:
        options = recipe.resolved_options if method == recipe.method else {}
        if "prior" in RULES[method].needs(options) and plan.inputs.prior is None:
            raise InputError(
                f"{method} needs the curvature of the base, the recipe names none (base.curvature), and the base's folder has no "
                "curvature/ folder"
            )
