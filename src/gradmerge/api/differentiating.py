"""The gradient of a model on data: in memory, or disk to disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Unpack, cast

from torch import nn

from ..arguments import checked
from ..checkpoints.adapter_config import is_adapter
from ..checkpoints.opening import open_checkpoint
from ..curvature.batches import watched
from ..curvature.curvature import SHARD_SIZE
from ..curvature.gradients import Gradient, estimate_gradient as estimate_in_memory
from ..curvature.losses import ExampleLoss, loss_named
from ..engine.reads import State, changed, model_paths, state_of
from ..engine.record import digest_of
from ..errors import InputError, MachineError
from ..processes import ALONE, Processes, current
from ..progress import Progress, shown
from ..storage.staging import Staging
from ..tasks import LargeLoading, complete_large, load_task
from ..tasks.data_sources import data_paths
from .dividing import share_of, what_all_see
from .large_models import keeping_for

#: Types whose sums of gradients would be mostly rounding.
NARROW = {"BF16", "F16"}


@checked()
def estimate_gradient(
    model: nn.Module | str | Path,
    batches: Iterable[Any] | str | Path,
    *,
    out: str | Path | None = None,
    output: str | ExampleLoss | None = None,
    shard_size: int = SHARD_SIZE,
    force: bool = False,
    durable: bool = False,
    progress: bool | Progress = True,
    processes: bool = False,
    **loading: Unpack[LargeLoading],
) -> Gradient:
    """The gradient of a model on some data: Σ_i ∇ℓ_i(θ), summed over examples, and Σ_i ℓ_i(θ) with it.

    ℓ_i is the negative log-likelihood of example i with the data's label: of a sequence it is the sum over its tokens.
    Beyond rounding, neither batch size nor padding changes the result. A parameter that the loss does not depend on has
    a gradient of 0 and is named in ``notes``; one that no gradient comes to although the output depends on it is an
    error.

    Args:
        model: A module, which is left as it was found (parameters with ``requires_grad=False`` are left out). Or the
            folder or Hub id of a model; of a PEFT adapter folder the gradient is that of the adapter's own tensors.
        batches: For a module: mappings of keyword arguments with ``labels``, or tuples that end with the labels. For a
            model on disk: its data, as `gradmerge gradient --data` takes it.
        out: A new folder to write; without it none is written.
        output: For a module: what its output means, as of :func:`gradmerge.estimate_curvature`.
        shard_size: Largest size of one file, in bytes.
        force: Replace ``out`` if gradmerge wrote it, or it is empty.
        durable: Have the folder on the disk before it gets its name.
        progress: A bar on long work; False for none; or what is told how far it is, in batches or, on disk, examples.
        processes: On disk: divide the rows over the processes that torchrun or `accelerate launch` has started, as of
            :func:`gradmerge.estimate_curvature`.
        loading: On disk: how the model and its data are loaded, as :class:`gradmerge.Loading` says, but that a model
            stored in 16 bits computes in float32 if no ``dtype`` is given. For a module only ``device``: where batches
            are moved to, by default where the model is. On disk also ``device_map``, ``quantize`` and
            ``gradient_checkpointing``, for models larger than a device.

    Returns:
        The gradient: for a module by the names of its parameters, for a model on disk by those of its files.

    >>> estimate_gradient(module, batches).norm  # doctest: +SKIP
    >>> estimate_gradient("./yelp", "reviews.jsonl", out="./yelp-gradient", limit=2048)  # doctest: +SKIP
    """
    on_disk = not isinstance(model, nn.Module)
    if on_disk is not isinstance(batches, str | os.PathLike):
        expected = "the path or name of its data, for a model on disk" if on_disk else "batches in memory, for a module"
        raise InputError(f"batches is {type(batches).__name__}, but must be {expected}")
    output = loss_named(output)
    options = complete_large(loading, estimate_gradient)
    models = model_paths(str(model)) if on_disk else []
    reads = [*models, *model_paths(options["tokenizer"])], data_paths(str(batches)) if on_disk else []
    if processes and not on_disk:
        raise InputError("processes is an option for a model on disk, not for a module")
    group = current() if processes else ALONE
    with contextlib.ExitStack() as stack:
        stack.enter_context(group.answering())
        staging = None
        if out is not None and group.first:
            paths = [path for some in reads for path in some]
            staging = Staging(Path(out), "gradient", force=force, reads=paths, inside=models, durable=durable)
            stack.enter_context(staging)
        told = group.shared(stack.enter_context(shown(progress, "examples" if on_disk else "batches")))
        if isinstance(model, nn.Module):
            if others := loading.keys() - {"device"}:
                raise InputError(f"{min(others)} is an option for a model on disk, not for a module")
            seen = watched(cast(Iterable[Any], batches), told, "estimating")
            found = estimate_in_memory(model, seen, output=output, device=loading.get("device"))
        else:
            if output is not None:
                raise InputError("output is an option for a module, not for a model on disk")

            def state() -> State:
                return state_of(reads[0]) + state_of(reads[1], deep=True)

            found = _from_disk(Path(out or "."), str(model), str(batches), options, state, told, group)
        if staging is not None:
            found.write(staging.folder, shard_size=shard_size)
    return found


def _from_disk(
    folder: Path,
    model: str,
    source: str,
    options: LargeLoading,
    state: Callable[[], State],
    progress: Progress,
    group: Processes,
) -> Gradient:
    files = state()
    notes = []
    # An adapter's base may be stored quantised; what is read of it here is only what tells it from others.
    with open_checkpoint(model, dequantize=is_adapter(Path(model))) as checkpoint:
        types = {info.dtype for info in checkpoint.tensors.values()}
        if options["dtype"] == "auto":
            # Near the end of training the gradients of examples all but cancel, and narrow types would round that away.
            options = {**options, "dtype": "float64" if "F64" in types else "float32"}
            if types & NARROW:
                notes.append(f"the model is stored as {', '.join(sorted(types & NARROW))} and computes in float32 here")
        loaded = load_task(model, source, adapter_apart=True, gradients=True, beside=4, **options)
        digest = str(digest_of(checkpoint)) if group.first else ""
    group.agree(what_all_see(loaded))
    progress.begin("estimating", loaded.examples)
    found = estimate_in_memory(
        loaded.model,
        share_of(loaded, group),
        output=loaded.output,
        device=loaded.device,
        each_batch=progress.advance,
        processes=group,
        keeping=keeping_for(loaded.model, None, folder, None, ALONE, False),
    ).for_files()
    if path := changed(files, state()):
        raise MachineError(f"{path}: changed while it was being used, so that nothing was written. Estimate again.")
    group.wait()
    # The name of a folder without the path to it, as files are published.
    found.model = Path(model).resolve().name if Path(model).exists() else model
    found.digest = digest
    found.notes = [*notes, *loaded.notes, *found.notes]
    return found
