"""A small network: training, curvature and evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import gradmerge as gm

from ..common.states import State, norm
from ..common.training import Training

if TYPE_CHECKING:
    from .data import Rows

Shape = Sequence[int] | None
"""Widths of the layers, with inputs and classes; None is a transformer."""


def make_network(shape: Shape, state: State | None = None) -> nn.Module:
    """Return linear layers with tanh between them, or a small vision transformer."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(shape or ()):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    model = Transformer() if shape is None else nn.Sequential(*layers[:-1])
    if state is not None:
        model.load_state_dict(dict(state))
    return model


class Transformer(nn.Module):
    """Two layers of width 32 over patches of 2 × 2 pixels."""

    def __init__(self) -> None:
        super().__init__()
        images = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
        width = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        # Only eager attention has forward-mode derivatives, which the products with the Gauss-Newton matrix need.
        self.vit = ViTForImageClassification(ViTConfig(**images, **width, attn_implementation="eager"))

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.vit(pixels.view(-1, 1, 8, 8)).logits
        return logits


def train(
    start: State | None,
    rows: Rows,
    training: Training,
    shape: Shape,
    *,
    seed: int,
    prior: Any = None,
    damping: float = 0.0,
) -> dict[str, Tensor]:
    """Train with Adam and a linear decay of the learning rate.

    With ``prior`` F_0 (a sum), the loss is the sum over rows plus ½ ‖θ − θ_0‖² in the norm of H_0 = F_0 + δ.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_network(shape, start)
        common: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": 0.0}
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True, **common)
        if prior is not None:
            penalty: dict[str, Any] = {"reduction": "sum", "damping": damping, "strength": 1 / len(rows.labels)}
            optimizer = gm.PriorAdamW(model, prior=prior, coupling="adam", **penalty, **common)
        total = int(training.epochs) * math.ceil(len(rows.labels) / training.batch_size)
        step = 0
        for _ in range(int(training.epochs)):
            for index in torch.randperm(len(rows.labels)).split(training.batch_size):
                optimizer.param_groups[0]["lr"] = training.learning_rate * (1 - step / total)
                loss = F.cross_entropy(model(rows.pixels[index]), rows.labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def estimate(state: State, rows: Rows, shape: Shape, kind: str, likelihood: str = "exact") -> Any:
    """Return the curvature as a sum over the rows."""
    return gm.estimate_curvature(
        make_network(shape, state), [tuple(rows)], likelihood, output="classes", kind=kind, progress=False
    )


@torch.no_grad()
def log_probabilities(state: State, rows: Rows, shape: Shape) -> Tensor:
    """Return ln p of every class."""
    logits: Tensor = make_network(shape, state)(rows.pixels)
    return logits.double().log_softmax(-1)


def evaluate(
    state: State, tests: Mapping[str, Rows], shape: Shape, target: State | None = None
) -> dict[str, dict[str, float]]:
    """Return test set → mean loss, accuracy, and with a target the mean KL(target ‖ model)."""
    scores: dict[str, dict[str, float]] = {}
    for name, rows in tests.items():
        predicted = log_probabilities(state, rows, shape)
        scores[name] = {
            "loss": float(F.nll_loss(predicted, rows.labels)),
            "accuracy": float((predicted.argmax(-1) == rows.labels).double().mean()),
        }
        if target is not None:
            expected = log_probabilities(target, rows, shape)
            scores[name]["kl"] = float(F.kl_div(predicted, expected, reduction="batchmean", log_target=True))
    return scores


def residual(state: State, base: State, rows: Rows, penalty: State, shape: Shape) -> float:
    """Return ‖∇ Σ ℓ + P (θ − θ_0)‖ / ‖P (θ − θ_0)‖, which is 0 when training under the penalty has converged."""
    model = make_network(shape, state)
    F.cross_entropy(model(rows.pixels), rows.labels, reduction="sum").backward()
    pulls = {name: penalty[name] * (state[name] - base[name]) for name in state}
    total = {name: p.grad + pulls[name] for name, p in model.named_parameters() if p.grad is not None}
    return norm(total) / norm(pulls)
