"""What a data set, a loss and a metric are: for classification, language models, text to text, images, embeddings."""

from .columns import parse_columns
from .evaluation import evaluate, measure
from .loading import LargeLoading, LoadedTask, Loading, complete, complete_large, load_task, with_data
from .metrics import MEANINGS
from .models import LoadingInfo, load_model
from .text_metrics import Generation

__all__ = [
    "MEANINGS",
    "Generation",
    "LargeLoading",
    "LoadedTask",
    "Loading",
    "LoadingInfo",
    "complete",
    "complete_large",
    "evaluate",
    "load_model",
    "load_task",
    "measure",
    "parse_columns",
    "with_data",
]
