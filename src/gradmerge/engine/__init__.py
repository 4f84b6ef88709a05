"""A plan of what goes where, and running it."""

from .inputs import CurvatureInput, Inputs
from .local import Sink, run
from .plan import BLOCK, Plan, Unit, make_plan
from .statistics import Statistics, measure

__all__ = [
    "BLOCK",
    "CurvatureInput",
    "Inputs",
    "Plan",
    "Sink",
    "Statistics",
    "Unit",
    "make_plan",
    "measure",
    "run",
]
