"""Estimate the curvature of a model on data: in memory, or disk to disk.

Heavy modules are imported in the functions: the command line reads the signature of :func:`estimate_curvature` without
PyTorch.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from ..arguments import checked
from ..display import Displayed
from ..distributed import SINGLE, join
from ..errors import GradmergeError, InputError, MachineError
from ..io.atomic_dir import AtomicDir
from ..progress import Progress, shown
from ..urls import output_path

if TYPE_CHECKING:
    from torch import nn

    from ..curvature.curvature import Curvature
    from ..curvature.losses import ExampleLoss
    from ..tasks import LoadedTask, LoadOptions
    from ..tasks.model_args import ModelArgs

#: Seconds between two copies of the sums so far.
SAVE_EVERY = 180.0


@dataclass(repr=False)
class Estimate(Displayed):
    """What was estimated and written: sums over examples."""

    out: Path
    kind: str
    task: str
    examples: int
    tensors: int
    entries: int
    seconds: float
    device: str
    resumed_from: int = 0
    """Examples that an earlier run had gone through."""
    processes: int = 1
    """The number of processes, each of which estimated a share of the examples."""
    notes: list[str] = field(default_factory=list)

    def _line(self) -> list[str]:
        return [str(self.out), self.kind, f"{self.tensors} tensors", f"{self.examples} examples", self.task]


Likelihood = Literal["empirical", "sampled", "exact"]
Kind = Literal["diagonal", "gram", "kronecker"]


@overload
def estimate_curvature(
    model: nn.Module, batches: Iterable[Any], likelihood: Likelihood = ..., *, kind: Kind = ..., **options: Any
) -> Curvature: ...
@overload
def estimate_curvature(
    model: str | Path, batches: str | Path, likelihood: Likelihood = ..., *, out: str | Path, **options: Any
) -> Estimate: ...
@checked()
def estimate_curvature(
    model: nn.Module | str | Path,
    batches: Iterable[Any] | str | Path,
    likelihood: Likelihood = "empirical",
    *,
    kind: Kind = "diagonal",
    out: str | Path | None = None,
    seed: int = 0,
    progress: bool | Progress = True,
    max_kronecker_dim: int = 16384,
    output: str | ExampleLoss | None = None,
    at_delta: str | Path | None = None,
    precision: Literal["float32", "bfloat16", "log8"] = "float32",
    shard_size: int = 5_000_000_000,
    resume: bool = False,
    force: bool = False,
    save_every: float = SAVE_EVERY,
    processes: bool = False,
    accumulate_on: Literal["device", "cpu"] | None = None,
    **loading: Any,
) -> Curvature | Estimate:
    """Estimate the curvature of a model on some data: Σ_i [∇ℓ_i(θ)]², the squared gradients of single examples.

    ℓ_i is the negative log-likelihood of example i. For a sequence it is the sum over its tokens, never their mean.
    Neither batch size nor padding changes the result. It costs about a training step per batch.

    Args:
        model: A module, such as a model of transformers with a head. It is not changed, and parameters with
            ``requires_grad=False`` are left out. Or the folder or Hub id of a model, which needs ``out``.
        batches: For a module: mappings of keyword arguments with ``labels``, or tuples that end with the labels. For a
            model on disk: its data, as for `gradmerge curvature estimate --data`.
        likelihood: ``empirical``: the data's labels; ``sampled``: labels drawn from the model; ``exact``: expectation
            over the model's classes.
        kind: ``diagonal``: squared gradients; ``gram``: XᵀX of linear layers' inputs, for ``regmean``; ``kronecker``:
            factors A = Σ x̃x̃ᵀ and G = Σ ggᵀ of linear layers and a diagonal for others, for ``gradient-matching`` and
            ``removal``.
        out: For a model on disk: the new folder to write, such as the model's own `curvature/`.
        seed: Seed of sampled labels. They depend only on the seed and on the example's index in the data.
        progress: True shows a progress bar, False none. Or an object that receives the progress, in batches for a
            module and in examples for a model on disk.
        max_kronecker_dim: With kind ``kronecker``: layers with more inputs or outputs have a diagonal instead.
        output: For a module: ``classes``, ``labels``, ``squared``, ``next-token`` or ``tokens``. Default: by the model
            and its labels. See :mod:`gradmerge.curvature.losses`.
        at_delta: A base model on disk, to estimate at MODEL − BASE instead of MODEL, for ``fa1``.
        precision: How to store it. ``log8`` takes one byte per number.
        shard_size: Bytes of a file, as for :meth:`Curvature.save`.
        resume: Resume an unfinished run, which saves its sums every few minutes.
        force: Replace the output if gradmerge wrote it, or if it is empty.
        save_every: On disk: seconds between two saves.
        processes: On disk: divide the rows over the processes that torchrun or `accelerate launch` started. All call
            this alike; the first one writes. For a module, add up the curvature of the processes' batches yourself.
        accumulate_on: Where the sums are kept: on the `device` of each layer, or on the `cpu`. Default: on the CPU if
            accelerate offloads weights, else on the device.
        loading: On disk: how to load the model and its data, as in :class:`gradmerge.LoadOptions`. For a module only
            ``device``, where batches are moved to; default: where the model is.

    Returns:
        For a module its :class:`Curvature`, **sums** over examples; for a model on disk what was written.

    >>> estimate_curvature(module, batches).save("./yelp/curvature")  # doctest: +SKIP
    >>> estimate_curvature("./yelp", "reviews.jsonl", out="./yelp/curvature", limit=1000)  # doctest: +SKIP
    """
    from torch import nn

    on_disk: Any = {"out": out, "at_delta": at_delta, "precision": precision, "shard_size": shard_size}
    on_disk |= {"resume": resume, "force": force, "save_every": save_every, "processes": processes}
    estimating: dict[str, Any] = {"kind": kind, "seed": seed, "max_kronecker_dim": max_kronecker_dim}
    if isinstance(model, nn.Module) is isinstance(batches, str | os.PathLike):
        expected = "batches in memory, for a module" if isinstance(model, nn.Module) else "a path or name, like model"
        raise InputError(f"batches is {type(batches).__name__}, but must be {expected}")
    if isinstance(model, nn.Module):
        _refuse(on_disk | {n: v for n, v in loading.items() if n != "device"}, "a model on disk, not for a module")
        estimating |= {"accumulate_on": accumulate_on or "device", "output": output, "device": loading.get("device")}
        return _estimate_module(model, cast(Iterable[Any], batches), likelihood, progress, **estimating)
    _refuse({"output": output}, "a module, not for a model on disk")
    if out is None:
        raise InputError("out is None, but must be the folder to write, for a model on disk: out=…")
    from ..curvature.curvature import write_curvature_card
    from ..curvature.estimate import expert_notes
    from ..curvature.format import KINDS
    from ..curvature.offload import offloaded_modules
    from ..engine.input_state import changed, digest_of_state, model_paths, state_of
    from ..tasks import complete, load_task
    from ..tasks.data import data_paths
    from ..tasks.model_args import ModelArgs
    from .saved_sums import SavedSums, estimate_with_saves

    options = complete(cast("LoadOptions", loading), estimate_curvature, None)
    args = ModelArgs.parse(options["model_args"])
    check_estimate_options(likelihood, kind, precision, at_delta, max_kronecker_dim, accumulate_on, args)
    begun = time.perf_counter()
    model, source, base = str(model), str(batches), None if at_delta is None else str(at_delta)
    models = [path for reference in (model, base, args.tokenizer) for path in model_paths(reference)]
    data = data_paths(source)
    group = join() if processes else SINGLE
    output_dir: AbstractContextManager[AtomicDir | None] = nullcontext()
    if group.is_first:
        # A model's curvature may be in its folder, where merges look for it.
        paths = model_paths(model)
        output_dir = AtomicDir(
            Path(out), f"estimate of {KINDS[kind]}", force=force, resume=resume, reads=[*models, *data], inside=paths
        )
    with output_dir as staging, shown(progress if group.is_first else False, "examples") as bar:
        folder = Path(group.all_gather(None if staging is None else str(staging.folder))[0])
        files = state_of(models) + state_of(data, deep=True)
        nbytes = 4 if accumulate_on in (None, "device") else 0
        loaded = load_task(model, source, gradients=kind != "gram", bytes_per_parameter=nbytes, **options)
        _check_task(loaded, kind, likelihood)
        group.check_equal(loaded.shared_facts())
        notes = _subtract_base(loaded, base, options) if base is not None else []
        request = {
            **estimating,
            **{name: options[name] for name in ("limit", "max_length", "dtype")},
            "model": model,
            "source": source,
            "files": digest_of_state(files),
            "task": loaded.task,
            "likelihood": likelihood,
            "at_delta": base,
            "columns": dict(options["columns"] or {}),
            "tokenizer": args.tokenizer,
            "bits": args.bits,
        }
        estimating["accumulate_on"] = accumulate_on or ("cpu" if offloaded_modules(loaded.model) else "device")
        saved = SavedSums(folder, request, group)
        try:
            rows = saved.rows_left(loaded.examples)
            result = estimate_with_saves(loaded, likelihood, rows, saved, save_every, bar, group, **estimating)
            notes += [*result.notes, *expert_notes(loaded.model, result)]
            if path := changed(files, state_of(models) + state_of(data, deep=True)):
                saved.remove()
                raise MachineError(f"{path}: changed during the estimate. Nothing was written; run it again.")
            # The name of a folder without its path, because files may be published.
            result.model = Path(model).resolve().name if Path(model).exists() else model
            if staging is not None:
                result.write(staging.folder, precision, shard_size)
                write_curvature_card(staging.folder, _card_facts(source, loaded, options, base))
                saved.remove()
        except BaseException:
            if staging is not None:
                staging.keep = saved.exist
            raise
    return Estimate(
        out=output_path(out),
        kind=kind,
        task=loaded.task,
        examples=result.examples,
        tensors=len(result),
        entries=sum(value.numel() for value in result.values()),
        seconds=time.perf_counter() - begun,
        device=str(loaded.device),
        resumed_from=loaded.examples - len(rows),
        processes=group.world_size,
        notes=[*loaded.notes, *notes],
    )


def _refuse(options: Mapping[str, Any], whose: str) -> None:
    """Raise if one of these options is set, because it would have no effect."""
    parameters = inspect.signature(estimate_curvature).parameters
    for name, value in options.items():
        if name not in parameters or value != parameters[name].default:
            raise InputError(f"{name} is an option for {whose}")


def _estimate_module(
    model: nn.Module, batches: Iterable[Any], likelihood: str, progress: bool | Progress, **options: Any
) -> Curvature:
    """``estimate_curvature`` of a module."""
    from ..curvature.batches import with_progress
    from ..curvature.estimate import estimate_curvature as estimate_in_memory, expert_notes

    _check_kind(options["kind"], options["max_kronecker_dim"])
    with shown(progress, "batches") as bar:
        result = estimate_in_memory(model, with_progress(batches, bar, "estimating"), likelihood, **options)
    result.notes += expert_notes(model, result)
    return result


def _check_task(loaded: LoadedTask, kind: str, likelihood: str) -> None:
    """Raise if the task does not go together with the kind or the likelihood."""
    import torch

    from ..curvature.losses import TokenLoss

    if kind == "kronecker" and loaded.task == "embedding":
        raise InputError(
            "kind kronecker: embedding models use every layer once per text, but Kronecker factors need layers "
            "that are used once. Estimate a diagonal, or Gram matrices."
        )
    if likelihood == "exact" and kind != "gram" and isinstance(loaded.loss, TokenLoss):
        next(loaded.loss.factors(torch.empty(0)))  # raises an error that explains why this is not possible


def _card_facts(source: str, loaded: LoadedTask, options: LoadOptions, at_delta: str | None) -> dict[str, str]:
    """Return what the card says in addition to the header of the curvature file."""
    from ..cards.metadata import name_of
    from ..tasks.data import dataset_metadata

    facts = {"data": dataset_metadata(source)[0], "task": loaded.task}
    facts |= {"max length": f"{options['max_length']} tokens"} if options["max_length"] is not None else {}
    return facts | ({"estimated at": f"the model minus {name_of(at_delta)}"} if at_delta is not None else {})


def check_estimate_options(
    likelihood: str,
    kind: str,
    precision: str,
    at_delta: str | Path | None,
    max_kronecker_dim: int,
    accumulate_on: str | None,
    args: ModelArgs,
) -> None:
    """Raise for unknown values, and for options that exclude each other."""
    from ..curvature.format import KINDS

    _check_kind(kind, max_kronecker_dim)
    quantized = f"load_in_{args.bits}bit"
    if kind != "diagonal" and precision != "float32":
        raise InputError(f"precision {precision}: {KINDS[kind]} are stored as float32 only")
    if kind != "diagonal" and at_delta is not None:
        raise InputError(f"at_delta is for the Fisher of fa1; {KINDS[kind]} are estimated at the model itself")
    if kind == "gram" and args.bits:
        raise InputError(
            f"model_args: {quantized} estimates the parameters of an adapter; Gram matrices are of the model's layers"
        )
    if at_delta is not None and (args.device_map is not None or args.bits):
        key = "device_map" if args.device_map is not None else quantized
        raise InputError(f"at_delta changes the model's weights in memory, and excludes {key} of model_args")


def _check_kind(kind: str, max_kronecker_dim: int) -> None:
    from ..curvature.kernels import MAX_KRONECKER_DIM

    if max_kronecker_dim < 1:
        raise InputError(f"max_kronecker_dim is {max_kronecker_dim}, but must be at least 1")
    if kind != "kronecker" and max_kronecker_dim != MAX_KRONECKER_DIM:
        raise InputError(f"max_kronecker_dim is for kind kronecker, not for {kind}")


def _subtract_base(loaded: LoadedTask, base: str, options: LoadOptions) -> list[str]:
    """Subtract the base's parameters in place. Parameters that the base does not have, such as a head, stay."""
    import torch

    from ..tasks import load_model

    try:
        base_model, info = load_model(
            base,
            loaded.task,
            device=str(loaded.device),
            dtype=options["dtype"],
            model_args=options["model_args"],
            allow_missing=True,
        )
    except GradmergeError as error:
        raise InputError(f"at_delta: {error}") from error
    base_parameters = {name: value for name, value in base_model.named_parameters() if name not in info.missing}
    unchanged = []
    with torch.no_grad():
        for name, value in loaded.model.named_parameters():
            if name in base_parameters and base_parameters[name].shape == value.shape:
                value.sub_(base_parameters[name].to(value.dtype))
            else:
                unchanged.append(name)
    if len(unchanged) == sum(1 for _ in loaded.model.named_parameters()):
        raise InputError(f"at_delta {base}: has none of the tensors of the model. Name a base of this model.")
    return [f"not in the base, and taken as they are: {', '.join(unchanged)}"] if unchanged else []
