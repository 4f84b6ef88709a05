"""A plan of what goes where, and running it: to a folder, or wherever a caller puts the blocks."""

from .inputs import CurvatureInput, Inputs
from .local import MergedBlock, run
from .plan import BLOCK, Plan
from .planning import make_plan, open_plan
from .statistics import Statistics, find_statistics
from .to_folder import MergeResult, merge_to_folder

__all__ = [
    "BLOCK",
    "CurvatureInput",
    "Inputs",
    "MergeResult",
    "MergedBlock",
    "Plan",
    "Statistics",
    "find_statistics",
    "make_plan",
    "merge_to_folder",
    "open_plan",
    "run",
]
