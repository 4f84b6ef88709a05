"""Merging and what goes with it, from Python: the functions that gradmerge exports, and what the commands call."""

from ..engine.record import digest_of
from ..engine.to_folder import MergeResult
from .diagnosing import diagnose
from .evaluating import evaluate
from .merging import default_threads, merge, planned
from .state_dicts import merge_state_dicts

__all__ = [
    "MergeResult",
    "default_threads",
    "diagnose",
    "digest_of",
    "evaluate",
    "merge",
    "merge_state_dicts",
    "planned",
]
