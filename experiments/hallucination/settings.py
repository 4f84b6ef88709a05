"""What each scale is: one dataclass of numbers, which the results carry with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..common.pretraining import Shape
from ..common.removal import Comparing
from ..common.training import Training
from .paper import DAMPING


@dataclass(frozen=True)
class Pretraining:
    """Text infilling over plain text, so that a small model can copy before it sees a dialogue."""

    shape: Shape
    texts: tuple[str, ...]
    """Folders of --data-dir: wikitext2 (train.txt.gz) or sets of reviews (train.jsonl.gz with `text`)."""
    pairs: int
    """Pairs of a sentence and the one before it, at most; as many of every text that has so many."""
    training: Training
    copying: Training | None = None
    """Before that: to repeat random tokens, with nothing but the copy to go by.

    Text alone teaches a small model to copy far more slowly.
    """
    copies: int = 0
    """Random sequences, of 4 to 12 tokens each."""
    tokens: int = 62
    """Of each sentence, at most."""
    masked: float = 0.2
    """Share of a sentence's tokens that are taken out, in spans."""
    span: float = 3.0
    """Mean length of a span, in tokens."""


@dataclass(frozen=True)
class Settings:
    """One run."""

    dialogue: Training
    """Of the dialogue model, and of the one trained again without the swapped turns."""
    hallucinating: Training
    """Of the model that learns to answer from swapped knowledge; its strength is set by ``penalty``."""
    model: str | None = None
    pretraining: Pretraining | None = None
    swapped: float = 0.0
    """Swapped turns in the base's own training data, as a share of the true ones; 0, none, is the paper's set-up."""
    penalty: bool = True
    """Fine-tune under ½‖θ − θ_0‖² in the norm of the base's curvature, as the removal takes it to have been."""
    knowledge_tokens: int = 128
    history_tokens: int = 384
    response_tokens: int = 128
    validation: int = 1000
    """Turns that settings are chosen on.

    Where the data has no split for it, they are the last of the training turns, at most a tenth of them.
    """
    test: int | None = None
    """Turns that are answered; None is all."""
    train: int | None = None
    new_tokens: int = 60
    beams: int = 10
    no_repeat: int = 3
    """No n-gram of so many tokens twice in a response; 0 allows all."""
    generate_batch: int = 64
    evaluate_batch: int = 64
    curvature_batch: int = 16
    damping: float = DAMPING
    dampings: tuple[float, ...] = (1e-4, 1e-2, 1.0, 100.0)
    """More dampings to choose from, in units of the mean entry of F_t."""
    strengths: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5)
    answered: tuple[float, ...] = (1.0,)
    """Strengths at which test turns are answered, besides the chosen ones; those of the trade-off figure."""
    fluency: float | None = 1.05
    """Where the base saw no swapped turns, the most that a chosen setting may have of the base's validation perplexity.

    1.05 is five per cent more. None: no such limit.
    """
    critic: str | None = None
    critic_batch: int = 64
    paper: bool = True
    """The paper's removals at all strengths and dampings."""
    comparing: Comparing | None = None
    """Ways of removal that are held against the target, where there is one."""
    notes: tuple[str, ...] = field(default=())


_ADAM = {"learning_rate": 6.25e-5, "epochs": 1, "batch_size": 32}

SCALES = {
    "full": Settings(
        model="google/flan-t5-base",
        dialogue=Training(**_ADAM),
        hallucinating=Training(**_ADAM),
        critic="McGill-NLP/roberta-large-faithcritic",
        notes=(
            "The appendix gives the learning rate as 6-25e-5: read as 6.25e-5, as in the code of the work whose set-up "
            "it is.",
            "Lengths, beams and the tags of inputs are those of that code; the paper does not give them.",
        ),
    ),
    "small": Settings(
        pretraining=Pretraining(
            Shape(layers=2, width=128, feed_forward=256, heads=4, vocabulary=1000),
            texts=("wikitext2", "imdb"),
            pairs=48_000,
            copying=Training(1.5e-3, epochs=1, batch_size=32, warmup_steps=200, schedule="constant_with_warmup"),
            copies=100_000,
            training=Training(learning_rate=1e-3, epochs=1, batch_size=32, warmup_steps=100),
            tokens=32,
        ),
        dialogue=Training(learning_rate=1e-3, epochs=4, batch_size=32, warmup_steps=50),
        hallucinating=Training(learning_rate=2e-4, epochs=2, batch_size=32),
        swapped=1.0,
        knowledge_tokens=56,
        history_tokens=24,
        response_tokens=40,
        validation=200,
        test=300,
        new_tokens=40,
        beams=1,
        no_repeat=0,
        generate_batch=500,
        evaluate_batch=200,
        curvature_batch=64,
        answered=(0.125, 0.25, 0.5, 0.75, 1.0, 1.5),
        paper=False,
        comparing=Comparing(
            plain=Training(learning_rate=2e-4, epochs=2, batch_size=32),
            theory=Training(learning_rate=2e-4, epochs=6, batch_size=32),
            npo=Training(learning_rate=2e-4, epochs=2, batch_size=32),
            strengths=(0.125, 0.25, 0.5, 1.0, 1.5),
            keep_rows=2000,
            curvature_rows=1 << 14,
            batch=256,
        ),
    ),
    "tiny": Settings(
        pretraining=Pretraining(
            Shape(layers=1, width=32, feed_forward=64, heads=2, vocabulary=400),
            texts=("wikitext2",),
            pairs=64,
            copying=Training(learning_rate=3e-3, epochs=1, batch_size=16),
            copies=32,
            training=Training(learning_rate=3e-3, epochs=2, batch_size=16),
        ),
        dialogue=Training(learning_rate=3e-3, epochs=2, batch_size=8),
        hallucinating=Training(learning_rate=1e-3, epochs=1, batch_size=8),
        swapped=1.0,
        knowledge_tokens=24,
        history_tokens=24,
        response_tokens=16,
        validation=8,
        test=12,
        train=48,
        new_tokens=8,
        beams=1,
        no_repeat=0,
        generate_batch=12,
        evaluate_batch=12,
        curvature_batch=8,
        dampings=(1.0,),
        strengths=(0.5, 1.0),
        answered=(0.5, 1.0),
        comparing=Comparing(
            plain=Training(learning_rate=1e-3, epochs=1, batch_size=8),
            theory=Training(learning_rate=1e-3, epochs=2, batch_size=8),
            npo=Training(learning_rate=1e-3, epochs=1, batch_size=8),
            strengths=(0.5, 1.0),
            keep_rows=20,
            curvature_rows=24,
            batch=8,
            halvings=1,
            snapshots=2,
        ),
    ),
}
