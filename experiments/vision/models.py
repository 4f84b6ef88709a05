"""The image encoder that is merged, and the heads that are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, ViTConfig, ViTModel
from transformers.image_processing_base import ImageProcessingMixin

from ..common.states import State, put


class Heads(nn.Module):
    """A linear classifier per task: logits of an example with the head of its own task.

    All heads have as many rows as the largest; rows without a class count as −∞.
    """

    def __init__(self, classes: Sequence[int], width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(len(classes), max(classes), width))
        self.bias = nn.Parameter(torch.zeros(len(classes), max(classes)))
        nn.init.trunc_normal_(self.weight, std=width**-0.5)
        self.register_buffer("absent", torch.arange(max(classes)) >= torch.tensor(classes)[:, None])

    def forward(self, features: Tensor, task: Tensor) -> Tensor:
        logits = torch.einsum("bcd,bd->bc", self.weight[task], features) + self.bias[task]
        return logits.masked_fill(self.absent[task], torch.finfo(logits.dtype).min)


class Classifier(nn.Module):
    """Encoder and heads: from images as bytes to logits, or to a loss if labels are given."""

    def __init__(self, encoder: PreTrainedModel, heads: Heads) -> None:
        super().__init__()
        self.encoder, self.heads = encoder, heads
        scaling = {"mean": [0.5] * 3, "std": [0.5] * 3} | getattr(encoder.config, "pixel_scaling", {})
        for name, value in scaling.items():
            self.register_buffer(name, torch.tensor(value).view(1, 3, 1, 1))

    def features(self, pixels: Tensor) -> Tensor:
        """Return the inputs of the heads."""
        pixels, side = pixels.float(), self.encoder.config.image_size
        if pixels.shape[-1] != side:
            pixels = F.interpolate(pixels, (side, side), mode="bicubic", antialias=True).clamp(0, 255)
        return self.encoder((pixels / 255 - self.mean) / self.std).last_hidden_state[:, 0]

    def forward(self, pixels: Tensor, task: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.heads(self.features(pixels), task)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}

    def state(self) -> dict[str, Tensor]:
        """Return the weights that are merged, on the CPU."""
        return {n: p.detach().cpu().clone() for n, p in self.named_parameters() if n.startswith("encoder.")}

    def save(self, folder: Path) -> None:
        """Write encoder and heads to ``folder``."""
        self.encoder.config.save_pretrained(folder)
        save_file(self.state(), folder / "encoder.safetensors")
        save_file({n: t.detach().cpu() for n, t in self.heads.state_dict().items()}, folder / "heads.safetensors")


def load_classifier(folder: Path, state: State, device: str) -> Classifier:
    """Return a classifier with fixed heads and the weights of an encoder."""
    stored = load_file(folder / "heads.safetensors")
    heads = Heads((~stored["absent"]).sum(1).tolist(), stored["weight"].shape[-1])
    heads.load_state_dict(stored)
    heads.requires_grad_(False)
    encoder = ViTModel(AutoConfig.from_pretrained(folder), add_pooling_layer=False)
    return put(Classifier(encoder, heads), state).to(device)  # type: ignore[no-any-return]


def new_classifier(config: Mapping[str, Any], classes: Sequence[int]) -> Classifier:
    """Return a vision transformer and heads with random weights."""
    made = ViTConfig(**config, hidden_dropout_prob=0.0)
    return Classifier(ViTModel(made, add_pooling_layer=False), Heads(classes, made.hidden_size))


def pretrained_classifier(model: str, classes: Sequence[int]) -> Classifier:
    """Return a pre-trained vision transformer, with heads that are still to be fitted."""
    encoder = ViTModel.from_pretrained(model, add_pooling_layer=False, dtype=torch.float32)
    known = ImageProcessingMixin.get_image_processor_dict(model)[0]
    encoder.config.pixel_scaling = {"mean": known["image_mean"], "std": known["image_std"]}
    return Classifier(encoder, Heads(classes, encoder.config.hidden_size))


def fit_head(features: Tensor, labels: Tensor, classes: int, decay: float) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the logistic regression from features to classes, with a penalty on the weight."""
    center, scale = features.mean(0), features.std(0) + 1e-6
    scaled = ((features - center) / scale).double()
    weight = torch.zeros(classes, len(center), dtype=torch.float64, device=features.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, device=features.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=300, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(scaled @ weight.T + bias, labels) + decay * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    fitted = weight.detach().float() / scale
    return fitted, bias.detach().float() - fitted @ center
