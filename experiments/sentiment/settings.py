"""What each scale does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..common.pretraining import Shape
from ..common.training import Training
from .data import BASE, TASKS

ALL_DATA, JOINT = "all-data", "joint"
TENTHS = tuple(n / 10 for n in range(11))

_PAPER_EPOCHS = {"imdb": 2, "yelp": 2, "rotten_tomatoes": 5, "sst2": 5, "amazon": 1, ALL_DATA: 2, JOINT: 2}


@dataclass(frozen=True)
class Pretraining:
    """Of a small T5: spans of plain text are taken out, and it writes them down."""

    shape: Shape
    texts: tuple[str, ...]
    """Data sets whose training rows lend their texts, without labels, or other folders of --data-dir."""
    training: Training
    tokens: int = 128
    """Of a piece of text."""
    masked: float = 0.25
    """Share of the tokens that are taken out. T5 has 0.15; with more, a step has more to learn from."""
    span: float = 3.0
    """Mean length of what is taken out in one place, in tokens, as for T5."""
    dropout: float = 0.1
    """Of fine-tuning; there is none while pre-training."""

    @property
    def holes(self) -> tuple[int, int]:
        """Tokens taken out of a piece, and in how many spans."""
        noise = max(1, round(self.masked * self.tokens))
        return noise, max(1, round(noise / self.span))


@dataclass(frozen=True)
class Settings:
    """Of training, curvature and merging."""

    tokens: int = 384
    """Texts are cut at so many."""
    batch_size: int = 16
    base_rate: float = 1e-5
    """Learning rate of what starts at the pre-trained encoder: the base and the all-data model."""
    task_rate: float = 5e-6
    """Learning rate of what starts at the base: the tasks and the joint model."""
    epochs: Mapping[str, int] = field(default_factory=lambda: dict(_PAPER_EPOCHS))
    warmup_steps: int = 100
    optimizer: str = "AdamW"
    curvature_examples: int | None = 100_000
    """The first so many of a training set are what curvature and gradients are measured on; None is all."""
    grid: bool = False
    """Gradient matching by every curvature, reduction and penalty, with models tuned under the prior too."""
    sample_rows: int = 2000
    """Of each training set, spread over it: what the grid's N · mean is the mean of."""
    damping: float = 1e-10
    density: float = 0.2
    """The share of each difference that TIES keeps."""
    weights: tuple[float, ...] = TENTHS
    dev_rows: int = 500
    """Held out of a training set that comes without a development set, to tune weights on."""
    train_rows: int | None = None
    test_rows: int | None = None
    batch_tokens: int = 32_768
    """Tokens of a batch, padding counted, when a model is scored or measured."""
    pretraining: Pretraining | None = None
    """Of the model that everything starts at; None where that is given, or has random weights."""

    def training(self, name: str) -> Training:
        """How a model is trained: that of a data set, or one of the two targets."""
        return Training(
            learning_rate=self.base_rate if name in (BASE, ALL_DATA) else self.task_rate,
            epochs=self.epochs[name],
            batch_size=self.batch_size,
            warmup_steps=self.warmup_steps,
            optimizer=self.optimizer,
        )


def settings_for(scale: str, *, seq2seq: bool, pretrained: bool) -> Settings:
    """The settings of a scale for a kind of model; the model that the tiny scale makes up is not ``pretrained``."""
    everywhere = dict.fromkeys((BASE, *TASKS, ALL_DATA, JOINT), 2)
    # The paper gives no rates for a small encoder: 5e-5 is usual for MiniLM, and tasks take half of it, as in the
    # paper.
    small = Settings(
        tokens=128,
        batch_size=32,
        base_rate=5e-5,
        task_rate=2.5e-5,
        epochs=everywhere,
        warmup_steps=50,
        weights=(*TENTHS, 1.2, 1.5),
    )
    tiny = replace(
        small,
        tokens=32,
        batch_size=16,
        warmup_steps=5,
        weights=(0.0, 0.3, 0.6, 1.0),
        dev_rows=24,
        train_rows=160,
        test_rows=60,
        sample_rows=40,
        batch_tokens=4096,
    )
    chosen = {"full": Settings(), "small": small, "tiny": tiny}[scale]
    if not pretrained:
        epochs = {**dict.fromkeys(TASKS, 4), BASE: 10, ALL_DATA: 4, JOINT: 3}
        return replace(chosen, base_rate=4e-3, task_rate=5e-4, epochs=epochs)
    return replace(chosen, base_rate=1e-4, task_rate=5e-5) if seq2seq else chosen


def pretrained_here(scale: str) -> Settings:
    """The settings of the scales small and tiny for a T5 that is pre-trained first."""
    if scale == "small":
        # By short runs on a CPU with a smaller one, on IMDB from random weights: after two epochs Adafactor had 78 %,
        # AdamW with 1e-3 72, and with ten times that for the embeddings 76. Tasks take half, as in the paper.
        return replace(
            settings_for(scale, seq2seq=True, pretrained=True),
            batch_size=64,
            base_rate=1e-2,
            task_rate=5e-3,
            optimizer="Adafactor",
            warmup_steps=20,
            batch_tokens=131_072,
            pretraining=Pretraining(
                Shape(layers=2, width=320, feed_forward=1024, heads=5, vocabulary=4096),
                texts=("wikitext2", "imdb", "yelp", "amazon"),
                training=Training(1e-2, epochs=24, batch_size=256, warmup_steps=300, optimizer="Adafactor"),
            ),
        )
    return replace(
        settings_for(scale, seq2seq=True, pretrained=False),
        base_rate=1e-2,
        pretraining=Pretraining(
            Shape(layers=1, width=32, feed_forward=64, heads=2, vocabulary=400),
            texts=("imdb", "yelp"),
            training=Training(3e-3, epochs=8, batch_size=16),
            tokens=32,
        ),
    )
