"""Train and evaluate a small vision transformer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..quiet import quiet_transformers
from ..tasks import load_model, load_task, measure
from .demo_settings import Settings
from .digits import read_array
from .tables import Measurements

PREPROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": False,
    "size": {"height": 8, "width": 8},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5],
    "image_std": [0.5],
}
"""Maps bytes to numbers from −1 to 1."""
WARMUP = 10
"""Steps of a linear warmup; then the learning rate decreases linearly to 0."""


def new_model(settings: Settings) -> nn.Module:
    """Return a vision transformer with random weights: patches of 2 × 2 pixels, one channel, ten classes."""
    from transformers import ViTConfig, ViTForImageClassification

    images = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    width = {"hidden_size": settings.hidden, "intermediate_size": 2 * settings.hidden, "num_attention_heads": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape: dict[str, Any] = {**images, **width, **dropout, "num_hidden_layers": settings.layers}
    torch.manual_seed(settings.seed)
    return ViTForImageClassification(ViTConfig(**shape))


def train(start: str | None, data: Path, out: Path, settings: Settings, *, stream: int) -> None:
    """Train a new model, or fine-tune the one in ``start``, with AdamW on the training images.

    ``stream`` distinguishes the random numbers from those of other runs.
    """
    epochs, rate = (settings.epochs, settings.rate) if start else (settings.base_epochs, settings.base_rate)
    # From −1 to 1, as the image processor makes them.
    images = torch.from_numpy(read_array(data, "x_train"))[:, None].float().div_(255).sub_(0.5).div_(0.5)
    labels = torch.from_numpy(read_array(data, "y_train"))
    with torch.random.fork_rng(devices=[]):
        model: Any = load_model(start, "image", device="cpu")[0] if start else new_model(settings)
        torch.manual_seed(1000 * settings.seed + stream)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=settings.weight_decay)
        total = epochs * math.ceil(len(images) / settings.batch_size)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1, (step + 1) / WARMUP) * max(0.0, 1 - step / total)
        )
        for _ in range(epochs):
            for rows in torch.randperm(len(images)).split(settings.batch_size):
                batch = images[rows]
                if start is None:
                    batch = batch + settings.noise * torch.randn_like(batch)
                loss = nn.functional.cross_entropy(model(batch).logits, labels[rows])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
    with quiet_transformers():
        model.save_pretrained(out)
    # `gradmerge evaluate` needs this to preprocess images.
    (out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n", "utf-8")


def measured_rows(models: Sequence[str], tasks: Sequence[str]) -> Measurements:
    """Return accuracy and loss of every image of `data/TASK.npz:test`, as `gradmerge evaluate` computes them."""
    loaded = {task: load_task(models[0], f"data/{task}.npz:test", task="image", device="cpu") for task in tasks}
    batches = {task: list(one.batches(256)) for task, one in loaded.items()}
    found: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for folder in models:
        model, _ = load_model(folder, "image", device="cpu")
        found[folder] = {task: measure(model, batches[task], loaded[task].loss).rows() for task in tasks}
    return found


def distances(models: Sequence[str], target: str, task: str) -> dict[str, float]:
    """Return for each model folder the mean KL(target ‖ model) of the predictions on `data/TASK.npz:test`, in nats."""
    loaded = load_task(target, f"data/{task}.npz:test", task="image", device="cpu")
    batches = [{"pixel_values": batch["pixel_values"]} for batch in loaded.batches(256)]

    @torch.no_grad()
    def predicted(folder: str) -> torch.Tensor:
        model: Any = load_model(folder, "image", device="cpu")[0]
        return torch.cat([model(**batch).logits for batch in batches]).double().log_softmax(-1)

    wanted = predicted(target)
    return {
        folder: float(nn.functional.kl_div(predicted(folder), wanted, reduction="batchmean", log_target=True))
        for folder in models
    }
