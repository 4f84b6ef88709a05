"""Tasks: data, loss and metrics of classification, language models, text to text, images and embeddings."""

from ..load_options import LoadOptions
from .data.columns import parse_columns
from .evaluate import evaluate, measure
from .generation import Generation
from .loading import LoadedTask, complete, load_task, tokenizer_of, with_data
from .metrics import MEANINGS
from .model_args import parse_model_args
from .models import LoadingInfo, load_model

__all__ = [
    "MEANINGS",
    "Generation",
    "LoadOptions",
    "LoadedTask",
    "LoadingInfo",
    "complete",
    "evaluate",
    "load_model",
    "load_task",
    "measure",
    "parse_columns",
    "parse_model_args",
    "tokenizer_of",
    "with_data",
]
