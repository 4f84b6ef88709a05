"""Gram matrices of linear layers, for RegMean: G = Σ_t x_t x_tᵀ over all inputs x_t of a layer, padding left out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..storage.staging import Staging
from .batches import examples_in, moved
from .curvature import write_tensors
from .files import metadata
from .formulas import is_conv1d
from .losses import MASKED, logits_of
from .stored_names import stored_sources


class Gram(Mapping[str, Tensor]):
    """XᵀX of the inputs of every linear layer of one model on one data set, by the name of the layer's weight."""

    def __init__(
        self, matrices: Mapping[str, Tensor], examples: int, transposed: Iterable[str] = (), model: str = ""
    ) -> None:
        self._matrices = dict(matrices)
        self.examples = examples
        self.transposed = frozenset(transposed)
        """Weights whose first axis is the input's, as of GPT-2's Conv1D."""
        self.model = model

    def __getitem__(self, name: str) -> Tensor:
        return self._matrices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._matrices)

    def __len__(self) -> int:
        return len(self._matrices)

    def __repr__(self) -> str:
        return f"Gram({len(self)} matrices, {self.examples} examples)"

    def save(self, path: str | Path, *, shard_size: int = 5_000_000_000, force: bool = False) -> None:
        """Write a curvature folder of kind ``gram``, in float32, whole or not at all."""
        with Staging(Path(path), "curvature", force=force) as staging:
            self.write(staging.folder, shard_size)

    def write(self, folder: Path, shard_size: int = 5_000_000_000) -> None:
        """Write the files into a folder that is there."""
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        parts: dict[str, Callable[[], Tensor]] = {}
        for name, value in self.items():
            if not bool(torch.isfinite(value).all()):
                raise InputError(f"the Gram matrix of {name} has values that are not finite; it is not saved")
            tensors[name] = ("F32", tuple(value.shape))
            parts[name] = lambda v=value: v.detach().cpu().float()  # type: ignore[misc]
        more = {"kind": "gram", "fan_in_fan_out": json.dumps(sorted(self.transposed))}
        write_tensors(folder, tensors, parts, metadata(self.examples, "", self.model, **more), shard_size)


def estimate_gram(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    device: str | torch.device | None = None,
    each_batch: Callable[[int], None] | None = None,
) -> Gram:
    """XᵀX of the inputs of every linear layer, over the tokens of all examples that are not padding.

    A head tied to an embedding is left out: RegMean averages embeddings. Names are those of the model's files.
    ``each_batch`` is called with the number of examples of each batch.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    layers = {
        f"{name}.weight".lstrip("."): module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and id(module.weight) not in tables
    }
    if not layers:
        raise InputError("the model has no linear layer: there is no Gram matrix to measure")
    matrices: dict[str, Tensor] = {}
    masks: dict[str, Tensor | None] = {}
    place = torch.device(device) if device is not None else next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    examples = 0
    with contextlib.ExitStack() as stack, torch.no_grad():
        for module, mode in modes:
            stack.callback(setattr, module, "training", mode)
        model.eval()
        for name, layer in layers.items():
            hook = _adder(name, matrices, masks)
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for batch in batches:
            batch = moved(batch, place)
            if isinstance(batch, Mapping):
                masks["encoder"] = batch.get("attention_mask")
                masks["decoder"] = _decoder_mask(model, batch)
            logits_of(model, batch)
            examples += examples_in(batch)
            if each_batch is not None:
                each_batch(examples_in(batch))
    if not examples:
        raise InputError("there are no examples to measure Gram matrices on")
    names: dict[str, list[str]] = {source: [] for source in layers}
    for stored, source in stored_sources(model).items():
        if source in names:
            names[source].append(stored)
    found = {stored: matrices[source] for source, every in names.items() for stored in every if source in matrices}
    turned = [stored for source, every in names.items() for stored in every if is_conv1d(layers[source])]
    config = getattr(model, "config", None)
    return Gram(found, examples, turned, str(getattr(config, "_name_or_path", "")))


def _adder(name: str, matrices: dict[str, Tensor], masks: Mapping[str, Tensor | None]) -> Callable[..., None]:
    side = "decoder" if _sees_decoder(name) else "encoder"

    def add(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        x = next(iter((*inputs, *named.values()))).detach()
        mask = masks.get(side)
        folded = x.dim() == 2 and mask is not None and mask.numel() == len(x)
        if mask is not None and (mask.shape == x.shape[:-1] or folded):
            x = x[mask.bool().reshape(x.shape[:-1])]
        x = x.reshape(-1, x.shape[-1])
        x = x if x.dtype == torch.float64 else x.float()
        if name not in matrices:
            matrices[name] = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
        matrices[name].addmm_(x.T, x)

    return add


def _sees_decoder(name: str) -> bool:
    """Whether a layer of an encoder-decoder model takes the decoder's tokens: all of it but keys and values of cross-attention."""
    crossing = any(word in name for word in ("EncDecAttention", "encoder_attn", "crossattention"))
    keys = name.removesuffix(".weight").rpartition(".")[2] in ("k", "v", "k_proj", "v_proj", "key", "value")
    return ("decoder." in name or name.startswith("lm_head")) and not (crossing and keys)


def _decoder_mask(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | None:
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return batch.get("attention_mask")
    if "decoder_attention_mask" in batch:
        return batch["decoder_attention_mask"]
    labels = batch.get("labels")
    return labels != MASKED if isinstance(labels, Tensor) and labels.dim() == 2 else None
