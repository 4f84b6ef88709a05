"""Tasks: data, loss and metrics of classification, language models, text to text, images and embeddings."""

from ..load_options import LoadOptions
from .evaluate import evaluate, measure
from .loading import LoadedTask, complete, load_task, tokenizer_of, with_data
from .metrics import MEANINGS, TASK_MEANINGS
from .model_files import LoadingInfo
from .models import load_model

__all__ = [
    "MEANINGS",
    "TASK_MEANINGS",
    "LoadOptions",
    "LoadedTask",
    "LoadingInfo",
    "complete",
    "evaluate",
    "load_model",
    "load_task",
    "measure",
    "tokenizer_of",
    "with_data",
]
