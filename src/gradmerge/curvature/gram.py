"""Gram matrices of linear layers, for RegMean: G = Σ_t x_t x_tᵀ over all inputs x_t of a layer, padding left out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..display import View
from ..distributed import SINGLE, Processes
from ..errors import InputError
from ..progress import Progress, shown
from .batches import examples_in, moved, with_progress
from .checkpoint_names import stored_sources
from .curvature import SHARD_SIZE, NamedSums, require_finite, write_sums
from .format import metadata
from .losses import logits_of
from .offload import input_device
from .padding import masks_of, sees_decoder
from .per_example_gradients import is_conv1d
from .sum_storage import StoredSum, SumStorage


class Gram(NamedSums):
    """XᵀX of the inputs of every linear layer of one model on one data set, by the name of the layer's weight.

    Args:
        sums: The matrices, **sums** over all inputs of all examples.
        examples, model: How many examples, of which model.
        transposed: Weights whose first axis is the input's, as of GPT-2's Conv1D.
    """

    def __init__(
        self, sums: Mapping[str, Tensor], examples: int, transposed: Iterable[str] = (), model: str = ""
    ) -> None:
        super().__init__(sums, examples, model)
        self.transposed = frozenset(transposed)

    def _line(self) -> list[str]:
        return [f"{len(self)} matrices", f"{self.examples} examples"]

    def _view(self) -> View:
        rows = [[name, len(value), float(value.diagonal().mean())] for name, value in self.items()]
        return ["weight", "inputs", "mean of the diagonal (sum over examples)"], rows, ()

    def write(self, folder: Path, precision: str = "float32", shard_size: int = SHARD_SIZE) -> None:
        """Write the files into a folder that is there; ``precision`` is ``float32``, the only one of Gram matrices."""
        if precision != "float32":
            raise InputError(f"precision {precision!r}: Gram matrices are stored as float32 only")
        require_finite(self, "Gram matrix")
        more = {"kind": "gram", "fan_in_fan_out": json.dumps(sorted(self.transposed))}
        write_sums(folder, self, metadata(self.examples, "", self.model, **more), shard_size)


@checked()
def estimate_gram(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    device: str | torch.device | None = None,
    each_batch: Callable[[int], None] | None = None,
    progress: bool | Progress = True,
) -> Gram:
    """XᵀX of the inputs of every linear layer, over the tokens of all examples that are not padding.

    A head tied to an embedding is left out: RegMean averages embeddings. Names are those of the model's files.

    Args:
        model: A model of transformers, or any module with linear layers.
        batches: As of :func:`gradmerge.estimate_curvature`; labels are not used.
        device: Where batches are moved to; by default where the model is.
        each_batch: Called after every batch with its number of examples.
        progress: A bar on long work; False for none; or what is told how far it is, in batches.

    Returns:
        The matrices, as **sums** over all inputs.

    Example:
        >>> gm.estimate_gram(model, [(inputs, labels)]).save("tuned/gram")
    """
    with shown(progress, "batches") as told:
        place = torch.device(device) if device is not None else input_device(model)
        return gram_of(model, with_progress(batches, told, "estimating"), place, each_batch)


def gram_of(
    model: nn.Module,
    batches: Iterable[Any],
    place: torch.device,
    each_batch: Callable[[int], None] | None = None,
    processes: Processes = SINGLE,
    storage: SumStorage | None = None,
) -> Gram:
    """The same; ``batches`` are those of this process, and the sums those of all ``processes``."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    layers = {
        f"{name}.weight".lstrip("."): module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and id(module.weight) not in tables
    }
    if not layers:
        raise InputError("the model has no linear layer: there is no Gram matrix to estimate")
    storage = storage or SumStorage()
    totals: dict[str, StoredSum] = {}
    masks: dict[bool, Tensor | None] = {}
    examples = 0
    with contextlib.ExitStack() as stack, torch.no_grad():
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        for name, layer in layers.items():
            hook = _adder(name, totals, masks, storage)
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for batch in batches:
            batch = moved(batch, place)
            masks |= masks_of(model, batch)
            logits_of(model, batch)
            examples += examples_in(batch)
            if each_batch is not None:
                each_batch(examples_in(batch))
    matrices = {name: total.value for name, total in totals.items()}
    examples = _added(matrices, examples, place, processes)
    if not examples:
        raise InputError("there are no examples to estimate Gram matrices on")
    order = {source: number for number, source in enumerate(layers)}
    named = [(stored, source) for stored, source in stored_sources(model).items() if source in layers]
    named.sort(key=lambda pair: order[pair[1]])
    found = {stored: matrices[source] for stored, source in named if source in matrices}
    turned = [stored for stored, source in named if is_conv1d(layers[source])]
    return Gram(found, examples, turned, str(getattr(getattr(model, "config", None), "_name_or_path", "")))


def _added(matrices: dict[str, Tensor], examples: int, place: torch.device, processes: Processes) -> int:
    """Sum the matrices over the processes, of which some may not have seen all layers; and the examples."""
    own = {name: [len(value), str(value.dtype).removeprefix("torch.")] for name, value in matrices.items()}
    told = processes.all_gather([own, examples])
    for name, (width, dtype) in {name: facts for seen, _ in told for name, facts in seen.items()}.items():
        if name not in matrices:
            matrices[name] = torch.zeros(width, width, dtype=getattr(torch, dtype), device=place)
    processes.all_reduce(matrices[name] for name in sorted(matrices))
    return sum(count for _, count in told)


def _adder(
    name: str, totals: dict[str, StoredSum], masks: Mapping[bool, Tensor | None], storage: SumStorage
) -> Callable[..., None]:
    side = sees_decoder(name)

    def add(module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        x = next(iter((*inputs, *named.values()))).detach()
        mask = masks.get(side)
        folded = x.dim() == 2 and mask is not None and mask.numel() == len(x)
        if mask is not None and (mask.shape == x.shape[:-1] or folded):
            x = x[mask.to(x.device).bool().reshape(x.shape[:-1])]
        x = x.reshape(-1, x.shape[-1])
        x = x if x.dtype == torch.float64 else x.float()
        if name not in totals:
            totals[name] = storage.new_sum((x.shape[1], x.shape[1]), x.dtype, x.device)
        totals[name].add(lambda total: total.addmm_(x.T, x))

    return add
