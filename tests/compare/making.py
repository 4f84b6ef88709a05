"""Plans over state dicts, for which everything is float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from gradmerge.checkpoints.checkpoint import Checkpoint
from gradmerge.engine.build_plan import make_plan
from gradmerge.engine.inputs import CurvatureInput, Inputs
from gradmerge.engine.plan import Plan
from gradmerge.engine.settings import LayerSettings, Stretch
from gradmerge.recipe import make_recipe

State = Mapping[str, Tensor]


def memory_plan(
    states: Sequence[State],
    curvature: Sequence[State],
    weights: Sequence[float],
    damping: float,
    penalty: Sequence[State | None] = (),
) -> Plan:
    """A plan that reads state dicts and their curvature, those of the base first; penalties as a recipe gives them."""
    base, *tuned = [Checkpoint(f"model {i}", memory=dict(state)) for i, state in enumerate(states)]
    inputs = Inputs(
        template=base,
        base=base,
        tuned=tuned,
        settings=LayerSettings.over(base.tensors, Stretch(weights, None, {})),
        prior=CurvatureInput("prior", memory=curvature[0]),
        curvature=[CurvatureInput(f"curvature {i}", memory=c) for i, c in enumerate(curvature[1:])],
        penalty=[None if p is None else CurvatureInput(f"penalty {i}", memory=p) for i, p in enumerate(penalty)],
        damping=damping,
    )
    recipe = make_recipe({"method": "gradient-matching", "base": "base", "models": ["model"] * len(tuned)})
    return make_plan(recipe, inputs)
