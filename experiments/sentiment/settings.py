"""Data sets and settings of the sentiment experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..common.training import Training

BASE = "imdb"
TASKS = ("yelp", "rotten_tomatoes", "sst2", "amazon")
SETS = (BASE, *TASKS)
ALL_DATA, JOINT = "all-data", "joint"
#: The models that merges are compared with: trained on everything, and on the tasks from the base.
TARGETS = (ALL_DATA, JOINT)

SOURCES = {
    "model": "FacebookAI/roberta-base",
    "imdb": "stanfordnlp/imdb",
    "yelp": "fancyzhx/yelp_polarity, the first 112,000 of 560,000 training rows",
    "rotten_tomatoes": "cornell-movie-review-data/rotten_tomatoes",
    "sst2": "stanfordnlp/sst2, tested on its validation split",
    "amazon": "fancyzhx/amazon_polarity, the first 360,000 of 3,600,000 training rows",
}


@dataclass(frozen=True)
class Settings:
    """Settings of training, curvature and merging; the defaults are the paper's."""

    tokens: int = 384
    """Texts are cut at so many."""
    batch_size: int = 16
    base_rate: float = 1e-5
    """Learning rate of the base and of the model of all data, which start from the pre-trained encoder."""
    task_rate: float = 5e-6
    """Learning rate of the tasks and of the joint model, which start from the base."""
    epochs: Mapping[str, int] = field(
        default_factory=lambda: {"imdb": 2, "yelp": 2, "rotten_tomatoes": 5, "sst2": 5, "amazon": 1}
    )
    """By data set; 2 for others."""
    warmup_steps: int = 100
    curvature_examples: int = 100_000
    """Curvature and gradients are measured on the first rows of a training set, at most so many."""
    grid: bool = False
    """Also merge with every kind of curvature."""
    sample_rows: int = 2000
    """Rows, spread over a training set, for the "N · mean" of the grid."""
    damping: float = 1e-10
    density: float = 0.2
    """The share of each difference that TIES keeps."""
    weights: tuple[float, ...] = tuple(n / 10 for n in range(11))
    dev_rows: int = 500
    """Held out of a training set without a development set."""
    train_rows: int | None = None
    test_rows: int | None = None
    evaluation_batch: int = 256

    def training(self, name: str) -> Training:
        """Return how the model of a data set, or a target, is trained."""
        rate = self.base_rate if name in (BASE, ALL_DATA) else self.task_rate
        return Training(rate, self.epochs.get(name, 2), self.batch_size, self.warmup_steps)


# The paper gives no rates for a small encoder: 5e-5 is usual for MiniLM, and tasks take half of it, as in the paper.
SMALL = Settings(
    tokens=128,
    batch_size=32,
    base_rate=5e-5,
    task_rate=2.5e-5,
    epochs={},
    warmup_steps=50,
    weights=(*Settings().weights, 1.2, 1.5),
)
TINY = replace(
    SMALL,
    tokens=32,
    batch_size=16,
    base_rate=4e-3,
    task_rate=5e-4,
    epochs={BASE: 10, **dict.fromkeys(TASKS, 4), ALL_DATA: 4, JOINT: 3},
    warmup_steps=5,
    weights=(0.0, 0.3, 0.6, 1.0),
    dev_rows=24,
    train_rows=160,
    test_rows=60,
    sample_rows=40,
)
SCALES = {"full": Settings(), "small": SMALL, "tiny": TINY}
