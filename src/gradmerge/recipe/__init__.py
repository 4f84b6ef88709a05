"""The recipe: what to merge and how."""

from ..safe_yaml import parse_yaml
from .documents import check_penalty, load_recipe, make_recipe
from .rule_options import check_options
from .schema import Base, Model, Output, Recipe, Slice, SliceModel, TokenizerChoice
from .values import NONE, CurvatureSource, Identity, MeanTimes, reduction_factor
from .varying import Case, Varying, in_words, leaves, mapped, plain, spread_over_layers, value_at

__all__ = ["NONE", "Base", "Case", "CurvatureSource", "Identity", "MeanTimes", "Model", "Output", "Recipe", "Slice"]
__all__ += ["SliceModel", "TokenizerChoice", "Varying", "check_options", "check_penalty", "in_words", "leaves"]
__all__ += [
    "load_recipe",
    "make_recipe",
    "mapped",
    "parse_yaml",
    "plain",
    "reduction_factor",
    "spread_over_layers",
    "value_at",
]
