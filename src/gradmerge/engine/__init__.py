"""A plan of what goes where, and running it."""

from .inputs import CurvatureInput, Inputs
from .local import Sink, Watch, run
from .plan import BLOCK, Plan, Unit, make_plan
from .statistics import Statistics, begin_search, measure

__all__ = [
    "BLOCK",
    "CurvatureInput",
    "Inputs",
    "Plan",
    "Sink",
    "Statistics",
    "Unit",
    "Watch",
    "begin_search",
    "make_plan",
    "measure",
    "run",
]
