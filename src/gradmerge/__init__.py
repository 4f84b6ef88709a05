"""gradmerge: merge fine-tuned models, and remove what a model has learned, by matching gradients with curvature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .api import MergeResult, evaluate, merge, merge_state_dicts
    from .api.diagnosing import write_diagnosis
    from .api.estimating import Estimate, estimate_curvature
    from .api.previewing import preview, suggest_weights
    from .api.sampling import sample_posterior
    from .checkpoints import open_checkpoint
    from .curvature import Curvature
    from .curvature.gram import Gram, estimate_gram
    from .curvature.optimizers import import_curvature
    from .errors import GradmergeError, InputError, MachineError
    from .recipe import Recipe, load_recipe
    from .rules import RULES, gradient_matching_full, removal_full
    from .tasks.data_sources import read_rows
    from .tasks.loading import Loading
    from .training.callback import CurvatureCallback
    from .training.prior_adamw import PriorAdamW
    from .training.prior_trainer import PriorTrainer

# Where each name comes from. Loaded on first use: importing torch takes a second that `gradmerge --help` need not wait.
_WHERE = {
    "merge": "api",
    "merge_state_dicts": "api",
    "MergeResult": "api",
    "evaluate": "api",
    "open_checkpoint": "checkpoints",
    "Curvature": "curvature",
    "Estimate": "api.estimating",
    "estimate_curvature": "api.estimating",
    "Gram": "curvature.gram",
    "estimate_gram": "curvature.gram",
    "import_curvature": "curvature.optimizers",
    "preview": "api.previewing",
    "suggest_weights": "api.previewing",
    "sample_posterior": "api.sampling",
    "write_diagnosis": "api.diagnosing",
    "GradmergeError": "errors",
    "InputError": "errors",
    "MachineError": "errors",
    "Recipe": "recipe",
    "load_recipe": "recipe",
    "RULES": "rules",
    "gradient_matching_full": "rules",
    "removal_full": "rules",
    "Loading": "tasks.loading",
    "read_rows": "tasks.data_sources",
    "CurvatureCallback": "training.callback",
    "PriorAdamW": "training.prior_adamw",
    "PriorTrainer": "training.prior_trainer",
}

__all__ = [
    "RULES",
    "Curvature",
    "CurvatureCallback",
    "Estimate",
    "GradmergeError",
    "Gram",
    "InputError",
    "Loading",
    "MachineError",
    "MergeResult",
    "PriorAdamW",
    "PriorTrainer",
    "Recipe",
    "__version__",
    "estimate_curvature",
    "estimate_gram",
    "evaluate",
    "gradient_matching_full",
    "import_curvature",
    "load_recipe",
    "merge",
    "merge_state_dicts",
    "open_checkpoint",
    "preview",
    "read_rows",
    "removal_full",
    "sample_posterior",
    "suggest_weights",
    "write_diagnosis",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
