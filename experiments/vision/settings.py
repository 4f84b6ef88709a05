"""Settings of the vision experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..common.training import Training

SOURCES = {
    "model": "openai/clip-vit-base-patch32; a head is the text embeddings of the class names",
    "cars": "tanganke/stanford_cars",
    "dtd": "tanganke/dtd",
    "eurosat": "tanganke/eurosat",
    "gtsrb": "tanganke/gtsrb",
    "mnist": "ylecun/mnist",
    "resisc45": "tanganke/resisc45",
    "sun397": "tanganke/sun397",
    "svhn": "ufldl-stanford/svhn/cropped_digits",
}
LOCAL = ("mnist", "fashion_mnist", "kmnist", "notmnist", "usps", "gtsrb", "cifar10", "intel_scenes")


@dataclass(frozen=True)
class Settings:
    """One scale. Numbers of rows are those of each data set."""

    fine_tuning: Training
    """Of the encoder, on each task and on all together; the heads are fixed."""
    tasks: tuple[str, ...] = LOCAL
    pretraining: Training | None = None
    """Of encoder and heads on a part of every task; None if the base is a pre-trained model."""
    encoder: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``ViTConfig`` for the encoder that is pre-trained here."""
    image_size: int = 32
    """Images are stored in this size; an encoder may enlarge them."""
    base_rows: int = 1000
    """Rows that the base is pre-trained on and its Fisher is measured on; they are also rows of fine-tuning."""
    validation_share: float = 0.1
    train_most: int | None = None
    test_most: int | None = None
    weights: tuple[float, ...] = tuple(n / 10 for n in range(11))
    prior_factors: tuple[float, ...] = ()
    """H_0 = factor · c · I is tried beside c · I; c is the mean entry of the tasks' curvature."""
    head_decay: float = 1e-2
    """λ of heads that are fitted to a pre-trained base: mean loss + λ · ‖weights‖²."""
    curvature_rows: int | None = None
    """Rows of a task, the first ones, that curvature and Gram matrices are measured on; None is all."""
    curvature_batch: int = 256
    evaluation_batch: int = 1000


def _encoder(*, width: int, layers: int, heads: int, patch: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": 32,
    }


# The paper's learning rate, 1e-3, belongs to Adam with a decoupled quadratic penalty whose strength it does not give.
# With 100 entries move by 1e-4 to 1e-3, as far as CLIP moves under plain AdamW with its usual 1e-5.
FULL = Settings(Training(1e-3, 5, 128, schedule="cosine", strength=100), tasks=tuple(SOURCES)[1:], image_size=224)
#: A small vision transformer that is pre-trained here.
FROM_SCRATCH = Settings(
    Training(1e-4, 5, 128, schedule="cosine"),
    # As many epochs as bring the training loss of these few rows near its floor; the base's Fisher on them is small.
    pretraining=Training(1e-3, 60, 128, warmup_steps=100, schedule="cosine", weight_decay=0.05),
    encoder=_encoder(width=192, layers=6, heads=3, patch=4),
    prior_factors=(0.01, 0.1, 10.0, 100.0),
)
#: A pre-trained vision transformer as the base. Heads with a decay of 1e-4 have the same accuracy and a higher loss.
PRETRAINED = replace(
    FROM_SCRATCH,
    fine_tuning=Training(1e-4, 4, 128, warmup_steps=20, schedule="cosine"),
    pretraining=None,
    encoder={},
    weights=(0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0),
    prior_factors=(),
    curvature_rows=2000,
    curvature_batch=64,
)
TINY = Settings(
    Training(1e-3, 1, 16, schedule="cosine"),
    tasks=("mnist", "usps", "gtsrb", "intel_scenes"),
    pretraining=Training(3e-3, 4, 32, schedule="cosine"),
    encoder=_encoder(width=16, layers=2, heads=2, patch=8),
    base_rows=24,
    train_most=60,
    test_most=40,
    weights=(0.0, 0.5, 1.0),
    prior_factors=(0.1,),
)
SCALES = {"full": FULL, "small": FROM_SCRATCH, "tiny": TINY}
