"""The output factors G = Σ g gᵀ of a model's linear layers, with labels sampled from the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.losses import LOSSES, MASKED, ExampleLoss, unwrapped
from ..tasks.models import representation_modules
from ..text import some
from .blocks import Batch, BlockModel, forward
from .layers import CONVOLUTIONS, ExpertLayer, Layer


def layers_with_factors(
    merged: BlockModel, keep: Callable[[Layer], bool], max_dim: int, tasks: int, memory: int | None
) -> tuple[list[str], list[str]]:
    """Choose the layers that have a G; also return notes on the others.

    Args:
        merged: The merge.
        keep: Says which layers are not solved.
        max_dim: Layers with more inputs or outputs have no G.
        tasks: Number of tasks.
        memory: Bytes for the merge, its gradients and all G; without them no layer has one. None: no limit.
    """
    head, _ = representation_modules(merged.module)
    every = [merged.layers[n] for groups in merged.structure.groups.values() for group in groups for n in group]
    solved = [layer for layer in every if not keep(layer) and layer.module is not head]
    sizes = {layer.name: layer.weights().shape for layer in solved if not isinstance(layer, ExpertLayer)}
    layers = [name for name, (_, outputs, inputs) in sizes.items() if max(outputs, inputs) <= max_dim]
    notes = []
    if wide := [name for name in sizes if name not in layers]:
        notes.append(f"layers wider than {max_dim} have no output factor: {some(wide)}")
    if len(sizes) < len(solved):
        notes.append("fused experts have no output factors")
    needed = 2 * tasks * sum(4 * sizes[name][1] ** 2 for name in layers)
    needed += 2 * sum(4 * p.numel() for p in merged.module.parameters())
    if not layers or (memory is not None and needed > memory):
        notes.append("the output factors do not fit into memory: curvature none is used")
        return [], notes
    return layers, notes


def output_factors(
    model: nn.Module, batches: Sequence[Batch], layers: Sequence[str], seed: int = 0, first_row: int = 0
) -> dict[str, Tensor]:
    """Layer → Σ g gᵀ over examples and positions, with g the gradient of the layer's output.

    The result does not depend on how rows are batched: every row has random numbers of its own.

    Args:
        model: The merge, with the head of the task.
        batches: Rows of the task.
        layers: The layers to compute G for.
        seed: Of the sampled labels.
        first_row: Number of the first row, which decides its random numbers.
    """
    factors: dict[str, Tensor] = {}
    row = first_row
    with contextlib.ExitStack() as stack, torch.enable_grad():
        for name in layers:
            hook = partial(_add_products, factors, name)
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        for batch in batches:
            loss, labels = sampled_loss(model, batch, seed, row)
            loss.backward()
            row += len(labels)
    return factors


def _add_products(sums: dict[str, Tensor], name: str, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A forward hook that adds g gᵀ of a layer's output to ``sums`` in the backward pass."""

    def add(gradient: Tensor) -> None:
        if isinstance(layer, CONVOLUTIONS):
            rows = gradient.movedim(1, -1).reshape(-1, layer.groups, gradient.shape[1] // layer.groups).movedim(1, 0)
        else:
            rows = gradient.reshape(1, -1, gradient.shape[-1])
        rows = rows.float() if gradient.dtype != torch.float64 else rows
        total = rows.mT @ rows
        sums[name] = sums[name] + total if name in sums else total

    if output.requires_grad:
        output.register_hook(add)
        return output
    leaf = output.detach().requires_grad_()
    leaf.register_hook(add)
    return leaf.clone()  # an operation in place may follow


def sampled_loss(model: nn.Module, batch: Batch, seed: int, first_row: int) -> tuple[Tensor, Tensor]:
    """The summed loss of a batch with labels drawn from the model; also the labels."""
    result = forward(model, batch)
    logits: Any = getattr(result, "logits", result[0] if isinstance(result, tuple) else result)
    loss, blank = loss_without_labels(model, batch, logits)

    def uniform(row: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed << 32) + first_row + row)
        return torch.rand(count, generator=generator, dtype=torch.float64)

    labels = loss.draw(logits.detach(), blank, uniform)
    return loss.losses(logits, labels).sum(), labels


def loss_without_labels(model: nn.Module, batch: Batch, logits: Tensor) -> tuple[ExampleLoss, Tensor]:
    """The loss of a model, and labels that only say which positions count."""
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    if logits.dim() > 2:
        encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        name = type(inner).__name__
        shifted = not encoder_decoder and name.endswith(("ForCausalLM", "LMHeadModel"))
        blank = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
        return LOSSES["next-token" if shifted else "tokens"], _mask_padding(batch, blank, encoder_decoder)
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return LOSSES["labels"], torch.zeros_like(logits)
    if problem == "regression" or logits.shape[-1] == 1:
        return LOSSES["squared"], torch.zeros_like(logits)
    return LOSSES["classes"], torch.zeros(len(logits), dtype=torch.long, device=logits.device)


def _mask_padding(batch: Batch, labels: Tensor, encoder_decoder: bool) -> Tensor:
    if not isinstance(batch, Mapping):
        return labels
    if isinstance(batch.get("labels"), Tensor) and batch["labels"].shape == labels.shape:
        return torch.where(batch["labels"] == MASKED, MASKED, labels)  # prompts and padding do not count
    mask = batch.get("decoder_attention_mask" if encoder_decoder else "attention_mask")
    if mask is None or mask.shape != labels.shape:
        return labels
    return torch.where(mask.bool(), labels, MASKED)
