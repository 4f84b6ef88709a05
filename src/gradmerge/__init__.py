"""gradmerge: merge fine-tuned models, and remove what a model has learned, by matching gradients with curvature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api.calibrate import CalibrationResult as CalibrationResult, calibrate as calibrate
    from .api.diagnose import diagnose as diagnose
    from .api.distill import DistillationResult as DistillationResult, distill as distill
    from .api.estimate import Estimate as Estimate, estimate_curvature as estimate_curvature
    from .api.evaluate import evaluate as evaluate
    from .api.extract_lora import extract_lora as extract_lora
    from .api.hub import push as push
    from .api.merge import merge as merge
    from .api.posterior import sample_posterior as sample_posterior
    from .api.preview import preview as preview
    from .api.remove import remove as remove
    from .api.state_dicts import merge_state_dicts as merge_state_dicts
    from .api.verify import Verification as Verification, verify as verify
    from .checkpoints import Checkpoint as Checkpoint, open_checkpoint as open_checkpoint
    from .compare.diagnose import Diagnosis as Diagnosis
    from .compare.ranking import Outcome as Outcome, Preview as Preview
    from .compare.settings import Setting as Setting
    from .curvature import Curvature as Curvature
    from .curvature.from_optimizer import import_curvature as import_curvature
    from .engine.run import MergeResult as MergeResult
    from .errors import GradmergeError as GradmergeError, InputError as InputError, MachineError as MachineError
    from .load_options import LoadOptions as LoadOptions
    from .notes import Note as Note
    from .progress import Progress as Progress
    from .recipe import Recipe as Recipe, load_recipe as load_recipe
    from .refinement.influence import RemovalResult as RemovalResult
    from .rules import METHODS as METHODS
    from .tasks.data import Rows as Rows, read_rows as read_rows
    from .training.curvature_callback import CurvatureCallback as CurvatureCallback
    from .training.prior_adamw import PriorAdamW as PriorAdamW
    from .training.prior_trainer import PriorTrainer as PriorTrainer

# Module → public names. Modules are imported on first use, because importing torch takes a second.
_NAMES = {
    "api.calibrate": "CalibrationResult calibrate",
    "api.diagnose": "diagnose",
    "api.estimate": "Estimate estimate_curvature",
    "api.distill": "DistillationResult distill",
    "api.evaluate": "evaluate",
    "api.extract_lora": "extract_lora",
    "api.merge": "merge",
    "api.preview": "preview",
    "api.hub": "push",
    "api.remove": "remove",
    "api.posterior": "sample_posterior",
    "api.state_dicts": "merge_state_dicts",
    "api.verify": "Verification verify",
    "checkpoints": "Checkpoint open_checkpoint",
    "curvature": "Curvature",
    "curvature.from_optimizer": "import_curvature",
    "compare.diagnose": "Diagnosis",
    "compare.ranking": "Outcome Preview",
    "compare.settings": "Setting",
    "engine.run": "MergeResult",
    "errors": "GradmergeError InputError MachineError",
    "load_options": "LoadOptions",
    "notes": "Note",
    "progress": "Progress",
    "recipe": "Recipe load_recipe",
    "refinement.influence": "RemovalResult",
    "rules": "METHODS",
    "tasks.data": "Rows read_rows",
    "training.curvature_callback": "CurvatureCallback",
    "training.prior_adamw": "PriorAdamW",
    "training.prior_trainer": "PriorTrainer",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_WHERE, "__version__"])


def __getattr__(name: str) -> Any:
    import importlib

    if name in _WHERE:
        return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
