"""Merging, from Python: disk to disk, or in memory; and how good a model is."""

from ..engine.progress import Progress
from ..engine.record import digest_of
from ..engine.to_folder import MergeResult
from .evaluating import evaluate
from .merging import default_threads, merge, planned
from .state_dicts import merge_state_dicts

__all__ = [
    "MergeResult",
    "Progress",
    "default_threads",
    "digest_of",
    "evaluate",
    "merge",
    "merge_state_dicts",
    "planned",
]
