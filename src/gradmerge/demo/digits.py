"""The data and models of the demonstration: scikit-learn's digits, changed in three ways, and small transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..errors import InputError
from ..quiet import quiet_transformers
from ..tasks import load_model

#: The data of the base: unchanged digits.
BASE = "upright"
#: Fine-tuning tasks, each a change of the same digits.
TASKS = ("tilted", "thick", "blurred")
#: The task that is removed from the jointly trained model.
REMOVED = "tilted"

Array = np.ndarray[Any, np.dtype[Any]]

#: Maps bytes to numbers from −1 to 1.
PROCESSOR = {"image_processor_type": "ViTImageProcessor", "do_resize": False, "image_mean": [0.5], "image_std": [0.5]}
#: Steps of a linear warmup; then the learning rate decreases linearly to 0.
WARMUP = 10


@dataclass(frozen=True)
class Settings:
    """Sizes, seed and hyperparameters."""

    seed: int = 0
    """Seed of the split, the initial weights and the order of the batches."""
    train: int = 997
    """Images for training and curvature."""
    valid: int = 300
    """Images for choosing weights."""
    test: int = 500
    """Images for the accuracies in the tables."""
    base_epochs: int = 30
    base_rate: float = 1e-3
    noise: float = 0.5
    """Standard deviation of the augmentation noise for the base; pixels are from −1 to 1."""
    epochs: int = 8
    """Epochs of every fine-tuning run."""
    rate: float = 3e-4
    batch_size: int = 64
    hidden: int = 64
    layers: int = 2
    unlabeled: int = 200
    """Unlabeled images per task for calibration and distillation."""
    distillation_steps: int = 800
    """More than by default, since a step of this model takes a hundredth of a second."""
    weights: str = "0:1.2:0.1"
    """Weights of the preview."""


def load_digits() -> tuple[Array, Array]:
    """Return images as bytes, 1797 × 8 × 8, and their labels."""
    try:
        from sklearn import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise InputError("the demonstration needs scikit-learn: pip install 'gradmerge[demo]'") from error
    digits = datasets.load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64)


def tilted(images: Array) -> Array:
    """Rotate clockwise by 20 degrees."""
    return np.stack([np.asarray(Image.fromarray(i).rotate(-20, Image.Resampling.BILINEAR)) for i in images])


def thick(images: Array) -> Array:
    """Widen strokes by a pixel to the right and downwards: the maximum of four neighbors."""
    padded = np.pad(images, ((0, 0), (1, 0), (1, 0)))
    widest: Array = np.maximum.reduce([padded[:, y : y + 8, x : x + 8] for y in (0, 1) for x in (0, 1)])
    return widest


def blurred(images: Array) -> Array:
    """Average over 3 × 3 pixels, with the edge repeated."""
    padded = np.pad(images.astype(float), ((0, 0), (1, 1), (1, 1)), mode="edge")
    around = np.stack([padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)])
    mean: Array = np.rint(around.mean(0)).astype(np.uint8)
    return mean


CHANGES: Mapping[str, Callable[[Array], Array]]
CHANGES = {"upright": lambda images: images, "tilted": tilted, "thick": thick, "blurred": blurred}


def write_data(folder: Path, images: Array, labels: Array, settings: Settings) -> None:
    """Write an .npz file per task with arrays x_train, y_train, x_valid, …; a digit has the same split in every task.

    `rest.npz` holds the data of all tasks but the removed one, and `all.npz` those of every task.
    """
    folder.mkdir(exist_ok=True)
    order = np.random.default_rng(settings.seed).permutation(len(images))
    ends = np.cumsum([settings.train, settings.valid, settings.test])
    parts = dict(zip(("train", "valid", "test"), np.split(order, ends)[:3], strict=True))
    kinds: dict[str, dict[str, Any]] = {}
    for name, change in CHANGES.items():
        changed = change(images)
        kinds[name] = {f"x_{split}": changed[rows] for split, rows in parts.items()}
        kinds[name] |= {f"y_{split}": labels[rows] for split, rows in parts.items()}
    for name, members in (("rest", [task for task in CHANGES if task != REMOVED]), ("all", [*CHANGES])):
        kinds[name] = {key: np.concatenate([kinds[member][key] for member in members]) for key in kinds[BASE]}
    for name, arrays in kinds.items():
        np.savez_compressed(folder / f"{name}.npz", **arrays)


def read_split(data: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return the images of a split as the models read them, and their labels."""
    with np.load(data) as arrays:
        images = torch.from_numpy(arrays[f"x_{split}"])[:, None].float().div_(255).sub_(0.5).div_(0.5)
        return images, torch.from_numpy(arrays[f"y_{split}"])


def new_model(settings: Settings) -> nn.Module:
    """Return a vision transformer with random weights: patches of 2 × 2 pixels, one channel, ten classes."""
    from transformers import ViTConfig, ViTForImageClassification

    images = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    width = {"hidden_size": settings.hidden, "intermediate_size": 2 * settings.hidden, "num_attention_heads": 4}
    shape: dict[str, Any] = {**images, **width, "num_hidden_layers": settings.layers}
    torch.manual_seed(settings.seed)
    return ViTForImageClassification(ViTConfig(**shape))  # its config has no dropout


def train(start: str | None, data: Path, out: Path, settings: Settings, *, stream: int) -> None:
    """Train a new model, or fine-tune the one in ``start``, with AdamW on the training images.

    ``stream`` distinguishes the random numbers from those of other runs.
    """
    epochs, rate = (settings.epochs, settings.rate) if start else (settings.base_epochs, settings.base_rate)
    images, labels = read_split(data, "train")
    with torch.random.fork_rng(devices=[]):
        model: Any = load_model(start, "image", device="cpu")[0] if start else new_model(settings)
        torch.manual_seed(1000 * settings.seed + stream)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        total = epochs * math.ceil(len(images) / settings.batch_size)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1, (step + 1) / WARMUP) * max(0.0, 1 - step / total)
        )
        for _ in range(epochs):
            for rows in torch.randperm(len(images)).split(settings.batch_size):
                batch = images[rows]
                if start is None:
                    batch = batch + settings.noise * torch.randn_like(batch)
                nn.functional.cross_entropy(model(batch).logits, labels[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    with quiet_transformers():
        model.save_pretrained(out)
    (out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n", "utf-8")


@torch.no_grad()
def predictions(models: Sequence[str], tasks: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Return model folder → task → ln p of every class for each image of `data/TASK.npz:test`."""
    images = {task: read_split(Path("data", f"{task}.npz"), "test")[0] for task in tasks}
    found: dict[str, dict[str, Tensor]] = {}
    for folder in models:
        model: Any = load_model(folder, "image", device="cpu")[0]
        found[folder] = {task: model(images[task]).logits.double().log_softmax(-1) for task in tasks}
    return found
