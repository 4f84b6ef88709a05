"""Merging, from Python: disk to disk, or in memory; and how good a model is."""

from ..engine.progress import Progress
from .disk import MergeResult, default_threads, merge, planned
from .evaluation import evaluate
from .memory import merge_state_dicts
from .record import digest_of

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
