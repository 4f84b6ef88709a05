"""A small network: trained, measured, merged and scored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

import gradmerge as gm

from ..common.states import State, norm
from ..common.training import Training
from .data import Rows

Shape = Sequence[int] | None
"""Widths of layers, pixels and classes included; None is a transformer."""


def network(shape: Shape, state: State | None = None) -> nn.Module:
    """Linear layers with tanh between them, or a small vision transformer."""
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
        # Other kinds of attention have no derivative in forward mode, which products with the whole matrix take.
        self.vit = ViTForImageClassification(ViTConfig(**images, **width, attn_implementation="eager"))

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.vit(pixels.view(-1, 1, 8, 8)).logits
        return logits


def trained(
    start: State | None,
    rows: Rows,
    how: Training,
    shape: Shape,
    *,
    seed: int,
    prior: Any = None,
    damping: float = 0.0,
) -> dict[str, Tensor]:
    """Adam with a learning rate that falls to 0 in a straight line.

    With ``prior``, F_0 as a sum, under ½ ‖θ − θ_0‖² in the norm of H_0 = F_0 + δ beside the sum of the losses.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = network(shape, start)
        common: dict[str, Any] = {"lr": how.learning_rate, "weight_decay": 0.0}
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True, **common)
        if prior is not None:
            held: dict[str, Any] = {"reduction": "sum", "damping": damping, "strength": 1 / len(rows.labels)}
            optimizer = gm.PriorAdamW(model, prior=prior, coupling="adam", **held, **common)
        total = int(how.epochs) * math.ceil(len(rows.labels) / how.batch_size)
        step = 0
        for _ in range(int(how.epochs)):
            for places in torch.randperm(len(rows.labels)).split(how.batch_size):
                optimizer.param_groups[0]["lr"] = how.learning_rate * (1 - step / total)
                loss = F.cross_entropy(model(rows.pixels[places]), rows.labels[places])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def estimated(state: State, rows: Rows, shape: Shape, kind: str, likelihood: str = "exact") -> Any:
    """Curvature as a sum over the rows."""
    return gm.estimate_curvature(
        network(shape, state), [tuple(rows)], likelihood, output="classes", kind=kind, progress=False
    )


@torch.no_grad()
def predicted(state: State, rows: Rows, shape: Shape) -> Tensor:
    """ln p of every class."""
    found: Tensor = network(shape, state)(rows.pixels).double().log_softmax(-1)
    return found


def scored(
    state: State, tests: Mapping[str, Rows], shape: Shape, target: State | None = None
) -> dict[str, dict[str, float]]:
    """Test set → mean loss, accuracy, and with a target mean KL(target ‖ model)."""
    found: dict[str, dict[str, float]] = {}
    for name, rows in tests.items():
        ours = predicted(state, rows, shape)
        found[name] = {
            "loss": float(F.nll_loss(ours, rows.labels)),
            "accuracy": float((ours.argmax(-1) == rows.labels).double().mean()),
        }
        if target is not None:
            wanted = predicted(target, rows, shape)
            found[name]["kl"] = float(F.kl_div(ours, wanted, reduction="batchmean", log_target=True))
    return found


def residual(state: State, base: State, rows: Rows, penalty: State, shape: Shape) -> float:
    """‖∇ Σ ℓ + P (θ − θ_0)‖ / ‖P (θ − θ_0)‖: 0 where tuning under the penalty has come to its end."""
    model = network(shape, state)
    F.cross_entropy(model(rows.pixels), rows.labels, reduction="sum").backward()
    pulls = {name: penalty[name] * (state[name] - base[name]) for name in state}
    rest = {name: value.grad + pulls[name] for name, value in model.named_parameters() if value.grad is not None}
    return norm(rest) / norm(pulls)
