"""The recipe: what to merge and how."""

from .fields import NONE, CurvatureSource, Identity, MeanTimes, reduction_factor
from .load import check_penalty, load_recipe, make_recipe
from .method import check_options
from .schedules import Case, Varying, in_words, leaves, mapped, plain, value_at
from .schema import ZERO, Base, Model, ModelToken, Output, Recipe, Slice, SliceModel, TokenizerChoice, TokenRule

__all__ = ["NONE", "ZERO", "Base", "Case", "CurvatureSource", "Identity", "MeanTimes", "Model", "ModelToken", "Output"]
__all__ += ["Recipe", "Slice", "SliceModel", "TokenRule", "TokenizerChoice", "Varying", "check_options"]
__all__ += ["check_penalty", "in_words", "leaves", "load_recipe", "make_recipe", "mapped", "plain"]
__all__ += ["reduction_factor", "value_at"]
