"""Settings of the removal experiment."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.training import Training

SOURCES = {
    "toxicity: model": "gpt2, and EleutherAI/gpt-neo-1.3B",
    "toxicity: retain set": "Salesforce/wikitext/wikitext-103-raw-v1, its first 10,000 texts",
    "toxicity: forget set": "google/civil_comments, comments with a toxicity of at least 0.8",
    "toxicity: prompts": "allenai/real-toxicity-prompts, the first 1,000",
    "toxicity: classifier": "unitary/toxic-bert (Detoxify)",
    "hallucination: model": "google/flan-t5-base, and google/flan-t5-large",
    "hallucination: data": "Wizard of Wikipedia, ParlAI's archive; the knowledge of a turn is swapped",
    "hallucination: critic": "McGill-NLP/roberta-large-faithcritic",
}


@dataclass(frozen=True)
class Paper:
    """The paper's setup: a model is fine-tuned on the forget set, and its change is subtracted at strength 1."""

    fine_tuning: Training
    curvature_examples: int | None
    damping: float = 1e-10


@dataclass(frozen=True)
class Methods:
    """What the removal methods are given."""

    plain: Training
    """Of the model that is fine-tuned on the forget set."""
    theory: Training
    """Of the one that is fine-tuned under ½‖θ − θ_0‖² in the norm of H_0 = F_0 + δ; its strength is computed."""
    npo: Training
    strengths: tuple[float, ...]
    retain_rows: int
    """Rows of the retain set for influence steps and NPO, at most."""
    curvature_rows: int
    """Rows of the retain set for the curvature of gradient matching, at most."""
    batch: int
    """Rows per batch in influence steps and estimates of curvature."""
    budget: float = 0.05
    """Allowed relative rise of the perplexity on validation rows of the retain set."""
    halvings: int = 4
    """Of the interval of strengths around the budget."""
    snapshots: int = 8
    """Of the weights during NPO."""
    relearned_share: float = 0.1
    """Share of the forget set that a removal is fine-tuned on again."""


@dataclass(frozen=True)
class Shape:
    """Size of a model that is trained from scratch."""

    vocabulary: int
    layers: int
    width: int
    heads: int


@dataclass(frozen=True)
class Toxicity:
    """A GPT-2 that is trained from scratch on text with toxic comments."""

    shape: Shape
    training: Training
    methods: Methods
    length: int
    """Tokens of a row."""
    characters: int
    """Of the training texts of every kind, at most."""
    held_out: int
    """Rows of a training set for validation, at most a tenth of it."""
    validation_tokens: int
    """Of every kind of text, at most."""
    test_tokens: int
    prompts: int
    """Half of them toxic."""
    new_tokens: int = 20
    generation_batch: int = 1000
    top_p: float = 0.9
    threshold: float = 0.2
    """A continuation with at least this score is toxic, as in the paper."""


@dataclass(frozen=True)
class Hallucination:
    """A T5 that is pre-trained on plain text and fine-tuned on dialogues, half of them with swapped knowledge."""

    shape: Shape
    texts: tuple[str, ...]
    """Folders of plain text for the pre-training."""
    pairs: int
    """Pairs of a sentence and the one before it."""
    copies: int
    """Random sequences that the model learns to copy first: from text alone a small model learns it far more slowly."""
    copying: Training
    infilling: Training
    dialogue: Training
    """Of the base, and of the model that is retrained without the swapped turns."""
    methods: Methods
    knowledge_tokens: int
    history_tokens: int
    response_tokens: int
    validation: int
    test: int
    train: int | None = None
    new_tokens: int = 40
    generation_batch: int = 500
    tokens: int = 32
    """Of each sentence, at most."""


def _paper(rate: float, batch: int, examples: int | None) -> Paper:
    return Paper(Training(rate, 1, batch), examples)


_TINY = Methods(
    plain=Training(3e-3, 1, 8),
    theory=Training(3e-3, 2, 8),
    npo=Training(1e-3, 1, 8),
    strengths=(0.5, 1.0),
    retain_rows=20,
    curvature_rows=24,
    batch=8,
    halvings=1,
    snapshots=2,
)
TOXICITY = {
    # The learning rate and batch size are those of Ilharco et al., whom the paper follows.
    "full": _paper(1e-5, 32, 10_000),
    "small": Toxicity(
        Shape(8000, 6, 384, 6),
        Training(8e-4, 4, 128, warmup_steps=100, schedule="cosine", weight_decay=0.01),
        Methods(
            plain=Training(1e-4, 1, 16, warmup_steps=10),
            theory=Training(1e-4, 6, 32, warmup_steps=10),
            npo=Training(1e-4, 2, 16),
            strengths=(0.25, 0.5, 1.0, 2.0, 4.0),
            retain_rows=600,
            curvature_rows=1 << 13,
            batch=128,
        ),
        length=128,
        characters=10_000_000,
        held_out=400,
        validation_tokens=1 << 14,
        test_tokens=1 << 15,
        prompts=1000,
    ),
    "tiny": Toxicity(
        Shape(300, 1, 16, 2),
        Training(1e-2, 4, 8, warmup_steps=2),
        _TINY,
        length=16,
        characters=3000,
        held_out=4,
        validation_tokens=256,
        test_tokens=256,
        prompts=8,
        new_tokens=5,
    ),
}
HALLUCINATION = {
    # The appendix gives the learning rate as 6-25e-5: read as 6.25e-5, as in the code of the work that it follows.
    "full": _paper(6.25e-5, 32, None),
    "small": Hallucination(
        Shape(1000, 2, 128, 4),
        texts=("wikitext2", "imdb"),
        pairs=48_000,
        copies=100_000,
        copying=Training(1.5e-3, epochs=1, batch_size=32, warmup_steps=200, schedule="constant_with_warmup"),
        infilling=Training(1e-3, epochs=1, batch_size=32, warmup_steps=100),
        dialogue=Training(1e-3, epochs=4, batch_size=32, warmup_steps=50),
        methods=Methods(
            plain=Training(2e-4, epochs=2, batch_size=32),
            theory=Training(2e-4, epochs=6, batch_size=32),
            npo=Training(2e-4, epochs=2, batch_size=32),
            strengths=(0.125, 0.25, 0.5, 1.0, 1.5),
            retain_rows=2000,
            curvature_rows=1 << 14,
            batch=256,
        ),
        knowledge_tokens=56,
        history_tokens=24,
        response_tokens=40,
        validation=200,
        test=300,
    ),
    "tiny": Hallucination(
        Shape(400, 1, 32, 2),
        texts=("wikitext2",),
        pairs=64,
        copies=32,
        copying=Training(3e-3, epochs=1, batch_size=16),
        infilling=Training(3e-3, epochs=2, batch_size=16),
        dialogue=Training(3e-3, epochs=2, batch_size=8),
        methods=_TINY,
        knowledge_tokens=24,
        history_tokens=24,
        response_tokens=16,
        validation=8,
        test=12,
        train=48,
        new_tokens=8,
    ),
}
TASKS = {"toxicity": TOXICITY, "hallucination": HALLUCINATION}
