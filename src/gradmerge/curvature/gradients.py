"""Gradients: what one data set says about one model, Σ_i ∇ℓ_i, in memory and as a file."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..display import View
from ..errors import InputError
from ..processes import ALONE, Processes
from ..storage.bytesof import bytes_of
from ..storage.tensorfile import TensorFile, close_files, local_path, open_files
from ..text import listed, natural
from .batches import examples_in, moved, with_places
from .curvature import SHARD_SIZE, NamedSums, write_sums
from .estimate import Objective, prepared
from .files import examples_of
from .losses import ExampleLoss, labels_of, logits_of, loss_named
from .reaching import reaching
from .stored_names import for_files
from .summary import group_of
from .sums import handing_over
from .totals import Keeping

FORMAT = "gradmerge-gradient/1"
STEM = "gradient"
#: How far parameters without a gradient are moved to see whether the output feels them, as a share of their size.
NUDGE = 2**-6


class Gradient(NamedSums):
    """The gradient of one model on one data set: a mapping from parameter names to sums over examples.

    Args:
        sums: Name of a parameter in memory → Σ_i ∇ℓ_i, the **sum** over examples.
        examples: How many examples.
        loss: Σ_i ℓ_i over the same examples, in nats (squared error for a regression).
        model: Of which model.
        digest: What tells that model's weights from others, as `gradmerge inspect --digest` prints it.
        stored: Turns the names into those of the model's files, where the two differ, when the gradient is saved.
        notes: What a user should know of it.

    Example:
        >>> gradient = gm.estimate_gradient(model, batches)
        >>> gradient.loss / gradient.examples  # the mean loss of an example
    """

    what = "gradient"

    def __init__(
        self,
        sums: Mapping[str, Tensor],
        examples: int,
        loss: float,
        model: str = "",
        digest: str = "",
        stored: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        super().__init__(sums, examples, model)
        self.loss = float(loss)
        self.digest = digest
        self.notes = list(notes)
        self._stored = stored

    @property
    def norm(self) -> float:
        """‖Σ_i ∇ℓ_i‖ over all parameters."""
        return math.sqrt(sum(float(value.double().square().sum()) for value in self.values()))

    def _line(self) -> list[str]:
        return [f"{len(self)} tensors", f"{self.examples} examples", f"loss {self.loss:.6g}", f"norm {self.norm:.4g}"]

    def _view(self) -> View:
        groups: dict[str, list[float]] = {}
        for name, value in self.items():
            group = groups.setdefault(group_of(name), [0, 0.0])
            group[0] += value.numel()
            group[1] += float(value.double().square().sum())
        rows = [[name, int(groups[name][0]), math.sqrt(groups[name][1])] for name in sorted(groups, key=natural)]
        return ["layers", "entries", "norm (sum over examples)"], rows, self.notes

    def for_files(self) -> Gradient:
        """The same under the names, and in the shapes, of the model's files."""
        sums = self._stored(self._sums) if self._stored is not None else self._sums
        return Gradient(sums, self.examples, self.loss, self.model, self.digest, notes=self.notes)

    def write(self, folder: Path, precision: str = "float32", shard_size: int = SHARD_SIZE) -> None:
        """Write the files into a folder that is there; ``precision`` is ``float32``, the only one of gradients."""
        if precision != "float32":
            raise InputError(f"precision {precision!r}: gradients are stored as float32 only")
        named = self.for_files()
        _check_finite(named, "it is not saved")
        header = {"format": FORMAT, "examples": str(self.examples), "loss": repr(self.loss)}
        write_sums(folder, named, header | {"model": self.model, "digest": self.digest}, shard_size, STEM)

    @classmethod
    @checked()
    def load(cls, path: str | Path) -> Gradient:
        """Read a gradient folder or file whole.

        Args:
            path: The folder or file.

        Returns:
            The gradient, as sums over examples, by the names of the model's files.

        >>> Gradient.load("./yelp-gradient").examples  # doctest: +SKIP
        2048
        """
        place = local_path(str(path), None)
        if not place.is_file() and not place.is_dir():
            raise InputError(f"{path}: no such gradient folder or file ({place.absolute()})")
        files = [TensorFile(place)] if place.is_file() else open_files(place, STEM)
        if files is None:
            raise InputError(f"{path}: no {STEM}.safetensors, and no {STEM}.safetensors.index.json, in this folder")
        try:
            return cls._read(str(path), files)
        finally:
            close_files(files)

    @classmethod
    def _read(cls, label: str, files: Sequence[TensorFile]) -> Gradient:
        header = {key: text for file in files for key, text in file.metadata.items()}
        if header.get("format") != FORMAT:
            says = f"its header says format {str(header.get('format'))[:40]!r}, not {FORMAT!r}"
            raise InputError(f"{label}: not a gradient file: {says}")
        examples = examples_of(label, header)
        try:
            loss = float(header.get("loss", ""))
        except ValueError:
            loss = math.nan
        if not math.isfinite(loss):
            raise InputError(f"{label}: the header's loss is {header.get('loss', '')[:40]!r}, not a finite number")
        sums: dict[str, Tensor] = {}
        for file in files:
            for name, entry in file.entries.items():
                if entry.dtype != "F32":
                    raise InputError(f"{label}: {name} is {entry.dtype}; gradients are stored as F32")
                sums[name] = torch.empty(entry.shape)
                if entry.nbytes:
                    file.read_into(bytes_of(sums[name]), entry.start)
        found = cls(sums, examples, loss, header.get("model", ""), header.get("digest", ""))
        _check_finite(found, f"estimate it again ({label})")
        return found


@reaching
def estimate_gradient(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    output: str | ExampleLoss | None = None,
    device: str | torch.device | None = None,
    each_batch: Callable[[int], None] | None = None,
    processes: Processes = ALONE,
    keeping: Keeping | None = None,
) -> Gradient:
    """Σ_i ∇ℓ_i(θ) over the examples of ``batches``; :func:`gradmerge.estimate_gradient` explains the arguments.

    The model is in eval mode meanwhile. Sums are float32 (float64 where the model is), whatever the model computes in.
    ``each_batch`` is called after every batch with its number of examples. Of several ``processes`` each has batches of
    its own, and all get the sums of all. ``keeping`` says where the sums are kept.
    """
    keeping = keeping or Keeping()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not parameters:
        raise InputError("the model has no parameter with requires_grad=True: there is no gradient to estimate")
    place = torch.device(device) if device is not None else next(iter(parameters.values())).device
    objective = Objective(model, "empirical", loss_named(output), 0)
    totals = {
        name: keeping.total(p.shape, torch.promote_types(p.dtype, torch.float32), p.device)
        for name, p in parameters.items()
    }

    def add(name: str, gradient: Tensor) -> None:
        totals[name].add(lambda total: total.add_(gradient))
        unreached.discard(name)

    handlers = {p: functools.partial(add, name) for name, p in parameters.items()}
    unreached, first, examples, loss = set(parameters), None, 0, 0.0
    with prepared(model), handing_over(handlers, keeping):
        for row, batch in with_places(batches, 0):
            batch = moved(batch, place)
            if not len(labels_of(batch)):
                continue
            first = batch if first is None else first
            total = objective.passes(batch, row)[0]()
            if total.requires_grad:
                total.backward()
            objective.check_losses()
            loss += float(total.detach())
            examples += examples_in(batch)
            if each_batch is not None:
                each_batch(examples_in(batch))
        told = processes.gather([examples, loss, sorted(unreached)])
        examples, loss = sum(one for one, *_ in told), sum(one for _, one, _ in told)
        if not examples:
            raise InputError("there are no examples to estimate a gradient on")
        sums = {name: total.whole() for name, total in totals.items()}
        processes.add(sums.values())
        nowhere = {name: parameters[name] for name in parameters if all(name in names for *_, names in told)}
        of_all = processes.gather([] if first is None else _unused(model, nowhere, first))
        notes: list[str] = next((notes for notes in of_all if notes), [])
    label = str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)
    gradient = Gradient(sums, examples, loss, label, "", for_files(model), notes)
    _check_finite(gradient, "look at the model's weights, and whether --dtype is too narrow for the model")
    if not any(bool(value.any()) for value in sums.values()):
        raise InputError(
            "the gradient of every parameter is 0: the loss does not depend on the model's weights, or its examples "
            "have no labels that count"
        )
    return gradient


def _unused(model: nn.Module, unreached: Mapping[str, nn.Parameter], batch: Any) -> list[str]:
    """A note on parameters that no gradient came to, of which the output does not depend: their gradient is 0.

    Such are the parts of a model that a task has no use for, as the norm after CLIP's last layer when images are
    classified. But where the output does depend on one, as across a ``detach``, 0 would be wrong: an error that names
    it.
    """
    if not unreached:
        return []
    if any(0 in p.stride() for p in unreached.values() if p.numel() > 1):  # weights that are elsewhere cannot be moved
        return [f"no gradient has come to these, and theirs is 0:\n{listed(unreached)}"]
    with torch.no_grad():
        before = logits_of(model, batch)
        slack = 1e-3 * NUDGE * float(before.abs().max())

        def felt(names: Iterable[str]) -> bool:
            kept = {name: unreached[name].detach().clone() for name in names}
            try:
                for name, value in kept.items():
                    unreached[name].add_(NUDGE * (value.abs() + value.abs().mean().nan_to_num() + NUDGE))
                change = (logits_of(model, batch) - before).abs().max()
                return not bool(change <= slack)
            finally:
                for name, value in kept.items():
                    unreached[name].copy_(value)

        if felt(unreached):
            cut = [name for name in unreached if felt([name])]
            raise InputError(
                "no gradient comes to these parameters, although the model's output depends on them:\n"
                f"{listed(cut or unreached)}\nSomething between them and the loss cuts it off (detach, no_grad, "
                "rounding). Mend that, or set requires_grad=False for them to leave them out."
            )
    return [f"the loss does not depend on these, and their gradient is 0:\n{listed(unreached)}"]


def _check_finite(sums: Mapping[str, Tensor], advice: str) -> None:
    for name, value in sums.items():
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"the gradient of {name} has values that are not finite; {advice}")
