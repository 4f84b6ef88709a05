"""Estimating the curvature of a model on data: in memory, or disk to disk."""

from __future__ import annotations

import inspect
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack, cast, overload

import torch
from torch import nn

from ..arguments import check_known, checked
from ..cards.metadata import name_of
from ..curvature.batches import with_progress
from ..curvature.curvature import Curvature
from ..curvature.curvature_card import write_curvature_card
from ..curvature.estimate import LIKELIHOODS, estimate_curvature as estimate_in_memory
from ..curvature.format import PRECISIONS
from ..curvature.gram import Gram, gram_of
from ..curvature.kronecker import MAX_KRONECKER_DIM, KroneckerCurvature
from ..curvature.losses import ExampleLoss, TokenLoss
from ..curvature.offload import elsewhere
from ..curvature.sum_storage import LOCATIONS, SumStorage
from ..display import Displayed
from ..distributed import SINGLE, join
from ..engine.input_state import changed, digest_of_state, model_paths, state_of
from ..errors import GradmergeError, InputError, MachineError
from ..io.atomic_dir import AtomicDir
from ..progress import Progress, shown
from ..tasks import LoadedTask, LoadOptions, complete, load_model, load_task
from ..tasks.data.read import data_paths, dataset_metadata
from ..tasks.model_args import ModelArgs
from ..text import listed
from ..urls import output_path
from .saved_sums import SavedSums, estimate_with_saves, share_of

#: What can be estimated, and what unfinished work on it is called.
KINDS = {
    "diagonal": "measurement of diagonal curvature",
    "gram": "measurement of Gram matrices",
    "kronecker": "measurement of Kronecker factors",
}
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
    """How many have estimated it, each a share of the examples."""
    memory: list[dict[str, int]] = field(default_factory=list)
    """Of every process, the most that it has held, in bytes: of the machine's memory, and of its GPUs'."""
    notes: list[str] = field(default_factory=list)

    def _line(self) -> list[str]:
        return [str(self.out), self.kind, f"{self.tensors} tensors", f"{self.examples} examples", self.task]


@overload
def estimate_curvature(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: str = ...,
    *,
    structure: Literal["diagonal"] = ...,
    **options: Any,
) -> Curvature: ...
@overload
def estimate_curvature(
    model: nn.Module, batches: Iterable[Any], likelihood: str = ..., *, structure: Literal["kronecker"], **options: Any
) -> KroneckerCurvature: ...
@overload
def estimate_curvature(
    model: nn.Module, batches: Iterable[Any], likelihood: str = ..., *, kind: Literal["kronecker"], **options: Any
) -> KroneckerCurvature: ...
@overload
def estimate_curvature(
    model: str | Path, batches: str | Path, likelihood: str = ..., *, out: str | Path, **options: Any
) -> Estimate: ...
@checked()
def estimate_curvature(
    model: nn.Module | str | Path,
    batches: Iterable[Any] | str | Path,
    likelihood: str = "empirical",
    *,
    structure: str = "diagonal",
    out: str | Path | None = None,
    seed: int = 0,
    progress: bool | Progress = True,
    max_kronecker_dim: int = MAX_KRONECKER_DIM,
    output: str | ExampleLoss | None = None,
    each_batch: Callable[[Callable[[], Any]], None] | None = None,
    kind: str | None = None,
    at_delta: str | Path | None = None,
    precision: str = "float32",
    shard_size: int = 5_000_000_000,
    resume: bool = False,
    force: bool = False,
    save_every: float = SAVE_EVERY,
    processes: bool = False,
    accumulate_on: str | None = None,
    **loading: Any,
) -> Curvature | KroneckerCurvature | Estimate:
    """The curvature of a model on some data: Σ_i [∇ℓ_i(θ)]², the square of every single example's gradient.

    ℓ_i is the negative log-likelihood of example i: of a sequence it is the sum over its tokens, never their mean.
    Neither batch size nor padding changes the result. It costs about a training step per batch.

    Args:
        model: A module, such as a model of transformers with a head, which is left as it was found (parameters with
            ``requires_grad=False`` are left out). Or the folder or Hub id of a model: then ``out`` is written.
        batches: For a module: mappings of keyword arguments with ``labels``, or tuples that end with the labels. A list
            or a DataLoader lets the estimate begin anew where a quick formula turns out wrong; an iterator does not.
            For a model on disk: its data, as `gradmerge curvature estimate --data` takes it.
        likelihood: ``empirical`` takes the data's labels, ``sampled`` draws them from the model, ``exact`` takes the
            expectation over the model's classes.
        structure: ``diagonal``; ``kronecker``: of every linear layer the factors A = Σ x̃x̃ᵀ and G = Σ ggᵀ over tokens,
            of every other parameter the diagonal; on disk also ``gram``, as of :func:`gradmerge.estimate_gram`.
        out: For a model on disk: the new folder to write, such as the model's own `curvature/`.
        seed: Of the labels that are drawn. They depend on the seed and the example's place in the data alone.
        progress: A bar on long work; False for none; or what is told how far it is, in batches or, on disk, examples.
        max_kronecker_dim: Layers with more inputs or outputs have a diagonal instead of Kronecker factors; the result
            names them.
        output: For a module: ``classes``, ``labels``, ``squared``, ``next-token`` or ``tokens``, where the model and
            its labels do not tell. See :mod:`gradmerge.curvature.losses`.
        each_batch: For a module: called after every batch with a function that gives the curvature so far.
        kind: Another name of ``structure``, the one that files and the command line have for it.
        at_delta: On disk: a base, to estimate at MODEL − BASE, for ``fa1``.
        precision, shard_size, force: On disk: as of :meth:`Curvature.save`.
        resume: On disk: go on with a run that was stopped, from the sums that it saved every ``save_every`` seconds.
        processes: On disk: divide the rows over the processes that torchrun or `accelerate launch` has started, all of
            which must call this alike; the first writes. Without it every process is on its own, as with a module: add
            the curvature of its batches to that of the others.
        accumulate_on: Where the sums are kept: on the ``device`` of each layer, the ``cpu`` or ``disk``; by default
            where the model's weights are.
        loading: On disk: how the model and its data are loaded, as :class:`gradmerge.LoadOptions` says. For a module
            only ``device``: where batches are moved to, by default where the model is.

    Returns:
        For a module its :class:`Curvature` or :class:`KroneckerCurvature`, **sums** over examples; for a model on disk
        what was written.

    >>> estimate_curvature(module, batches).save("./yelp/curvature")  # doctest: +SKIP
    >>> estimate_curvature("./yelp", "reviews.jsonl", out="./yelp/curvature", limit=1000)  # doctest: +SKIP
    """
    of_modules: Any = {"output": output, "each_batch": each_batch}
    of_disk: Any = {"out": out, "at_delta": at_delta, "precision": precision, "shard_size": shard_size}
    of_disk |= {"resume": resume, "force": force, "save_every": save_every}
    of_disk["processes"] = processes
    if kind is not None and structure not in ("diagonal", kind):
        raise InputError(f"structure {structure!r} and kind {kind!r} are two names of one option: give one of them")
    structure = kind or structure
    _check_max_kronecker_dim(max_kronecker_dim, structure)
    on_disk = not isinstance(model, nn.Module)
    if on_disk is not isinstance(batches, str | os.PathLike):
        expected = "the path or name of its data, for a model on disk" if on_disk else "batches in memory, for a module"
        raise InputError(f"batches is {type(batches).__name__}, but must be {expected}")
    if isinstance(model, nn.Module):
        device = loading.pop("device", None)
        complete(cast(LoadOptions, loading), estimate_curvature)
        if structure == "gram":
            raise InputError("structure gram: of a module, gradmerge.estimate_gram(model, batches) gives Gram matrices")
        _refuse(of_disk | loading, "a model on disk, not for a module")
        with shown(progress, "batches") as told:
            seen = with_progress(cast(Iterable[Any], batches), told, "estimating")
            keywords: Any = of_modules | {"seed": seed, "device": device, "max_kronecker_dim": max_kronecker_dim}
            keywords["storage"] = SumStorage(accumulate_on or "device")
            return estimate_in_memory(model, seen, likelihood, structure=structure, **keywords)
    _refuse(of_modules, "a module, not for a model on disk")
    if out is None:
        raise InputError("out is None, but must be the folder to write, for a model on disk: out=…")
    of_disk |= {
        "accumulate_on": accumulate_on,
        "likelihood": likelihood,
        "kind": structure,
        "seed": seed,
        "max_kronecker_dim": max_kronecker_dim,
        "progress": progress,
    }
    return estimate_to_disk(model, str(batches), **of_disk, **loading)


def _refuse(options: Mapping[str, Any], whose: str) -> None:
    """Raise if one of these was given: it would be dropped."""
    parameters = inspect.signature(estimate_curvature).parameters
    for name, value in options.items():
        if name not in parameters or value != parameters[name].default:
            raise InputError(f"{name} is an option for {whose}")


def estimate_to_disk(
    model: str | Path,
    source: str | Path,
    out: str | Path,
    *,
    likelihood: str = "empirical",
    kind: str = "diagonal",
    at_delta: str | Path | None = None,
    max_kronecker_dim: int = MAX_KRONECKER_DIM,
    seed: int = 0,
    precision: str = "float32",
    shard_size: int = 5_000_000_000,
    resume: bool = False,
    force: bool = False,
    progress: bool | Progress = True,
    save_every: float = SAVE_EVERY,
    processes: bool = False,
    accumulate_on: str | None = None,
    **loading: Unpack[LoadOptions],
) -> Estimate:
    """``estimate_curvature`` of a model on disk."""
    options = complete(loading, estimate_to_disk, None)
    args = ModelArgs.parse(options["model_args"])
    check_estimate_options(likelihood, kind, precision, at_delta, max_kronecker_dim, accumulate_on, args)
    begun = time.perf_counter()
    model, source, at_delta = str(model), str(source), None if at_delta is None else str(at_delta)
    models = [path for reference in (model, at_delta, args.tokenizer) for path in model_paths(reference)]
    data = data_paths(source)
    group = join() if processes else SINGLE
    output: AbstractContextManager[AtomicDir | None] = nullcontext()
    if group.is_first:
        # A model's curvature may be in its folder, where merges look for it.
        paths = model_paths(model)
        output = AtomicDir(Path(out), KINDS[kind], force=force, resume=resume, reads=[*models, *data], inside=paths)
    with output as staging, shown(progress if group.is_first else False, "examples") as bar:
        shared_folder = group.all_gather(None if staging is None else str(staging.folder))[0]
        files = state_of(models) + state_of(data, deep=True)
        loaded = load_task(
            model,
            source,
            gradients=kind != "gram",
            bytes_per_parameter=4 if accumulate_on in (None, "device") else 0,
            **options,
        )
        storage = _storage_for(loaded.model, accumulate_on, Path(shared_folder))
        if kind == "kronecker" and loaded.task == "embedding":
            raise InputError(
                "kind kronecker: embedding models use every layer once per text, but Kronecker factors need layers "
                "that are used once. Estimate a diagonal, or Gram matrices."
            )
        if likelihood == "exact" and kind != "gram" and isinstance(loaded.loss, TokenLoss):
            next(loaded.loss.factors(torch.empty(0)))  # raises an error that explains why this is not possible
        group.check_equal(loaded.shared_facts())
        notes = _subtract(loaded, at_delta, options) if at_delta is not None else []
        request = {
            "model": model,
            "source": source,
            "files": digest_of_state(files),
            "task": loaded.task,
            "kind": kind,
            "likelihood": likelihood,
            "at_delta": at_delta,
            "columns": dict(options["columns"] or {}),
            "seed": seed,
            "limit": options["limit"],
            "max_length": options["max_length"],
            "dtype": options["dtype"],
            "tokenizer": args.tokenizer,
            "bits": args.bits,
            "max_kronecker_dim": max_kronecker_dim,
        }
        saved = SavedSums(Path(shared_folder), request, group.rank)
        done: list[list[int]] = []
        try:
            result: Curvature | KroneckerCurvature | Gram
            if kind == "gram":
                bar.begin("estimating", len(group.share(loaded.examples)))
                result = gram_of(loaded.model, share_of(loaded, group), loaded.device, bar.advance, group, storage)
            else:
                done = group.all_gather(saved.join(loaded.examples) if group.is_first and resume else [])[0]
                keywords: Any = {"structure": kind, "seed": seed, "storage": storage}
                keywords["max_kronecker_dim"] = max_kronecker_dim
                result = estimate_with_saves(loaded, likelihood, done, saved, save_every, bar, group, **keywords)
                if group.is_first:
                    saved.add_joined(result)
                if isinstance(result, KroneckerCurvature) and result.wide:
                    wide = f"layers with more than {max_kronecker_dim:,} inputs or outputs have a diagonal"
                    notes.append(f"{wide}:\n{listed(result.wide)}")
            if path := changed(files, state_of(models) + state_of(data, deep=True)):
                saved.remove()
                raise MachineError(f"{path}: changed during the estimate. Nothing was written; run it again.")
            # The name of a folder without its path, because files may be published.
            result.model = Path(model).resolve().name if Path(model).exists() else model
            if staging is not None:
                saved.remove(rest=True)
                result.write(staging.folder, precision, shard_size)
                write_curvature_card(staging.folder, _card_facts(source, loaded, options, at_delta))
                saved.remove()
        except BaseException:
            if staging is not None:
                staging.keep = saved.exist
            raise
        memory = group.all_gather(_peak_memory())
    return Estimate(
        out=output_path(out),
        kind=kind,
        task=loaded.task,
        examples=result.examples,
        tensors=len(result),
        entries=sum(value.numel() for value in result.values()),
        seconds=time.perf_counter() - begun,
        device=str(loaded.device),
        resumed_from=sum(end - first for first, end in done),
        processes=group.world_size,
        memory=memory,
        notes=[*(staging.notes if staging is not None else []), *loaded.notes, *notes],
    )


def _card_facts(source: str, loaded: LoadedTask, options: LoadOptions, at_delta: str | None) -> dict[str, str]:
    """What a card tells beyond the header of the file."""
    known = {"data": dataset_metadata(source)[0], "task": loaded.task}
    known |= {"max length": f"{options['max_length']} tokens"} if options["max_length"] is not None else {}
    return known | ({"estimated at": f"the model minus {name_of(at_delta)}"} if at_delta is not None else {})


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
    for option, value, known in (
        ("likelihood", likelihood, LIKELIHOODS),
        ("kind", kind, tuple(KINDS)),
        ("precision", precision, tuple(PRECISIONS)),
    ):
        check_known(f"{option} {value}", value, known)
    if accumulate_on is not None:
        check_known(f"accumulate_on {accumulate_on}", accumulate_on, LOCATIONS)
    _check_max_kronecker_dim(max_kronecker_dim, kind)
    matrices = {"gram": "Gram matrices", "kronecker": "Kronecker factors"}.get(kind)
    if matrices and precision != "float32":
        raise InputError(f"precision {precision}: {matrices} are stored as float32 only")
    if matrices and at_delta is not None:
        raise InputError(f"at_delta is for the Fisher of fa1; {matrices} are estimated at the model itself")
    quantized = f"load_in_{args.bits}bit"
    if kind == "gram" and args.bits:
        raise InputError(
            f"model_args: {quantized} estimates the parameters of an adapter; Gram matrices are of the model's layers"
        )
    if at_delta is not None and (args.device_map is not None or args.bits):
        key = "device_map" if args.device_map is not None else quantized
        raise InputError(f"at_delta changes the model's weights in memory, and excludes {key} of model_args")


def _check_max_kronecker_dim(max_kronecker_dim: int, kind: str) -> None:
    if max_kronecker_dim < 1:
        raise InputError(f"max_kronecker_dim is {max_kronecker_dim}, but must be at least 1")
    if kind != "kronecker" and max_kronecker_dim != MAX_KRONECKER_DIM:
        raise InputError(f"max_kronecker_dim is for kind kronecker, not for {kind}")


def _storage_for(model: nn.Module, accumulate_on: str | None, folder: Path) -> SumStorage:
    """Return the storage of a model's sums: by default, where its weights are."""
    if accumulate_on is None:
        offloaded = [hook.weights_map for _, _, hook in elsewhere(model)]
        on_disk = any(getattr(getattr(weights, "dataset", None), "index", None) for weights in offloaded)
        accumulate_on = "device" if not offloaded else "disk" if on_disk else "cpu"
    return SumStorage(accumulate_on, folder if folder.is_dir() else Path(tempfile.gettempdir()))


def _peak_memory() -> dict[str, int]:
    """The peak memory of this process so far, in bytes: of the machine, and of its GPUs if it uses any."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    status = Path("/proc/self/status")  # on Linux, ru_maxrss may be that of the program that started this one
    if status.is_file() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        peak = int(found[1]) * 1024
    memory = {"peak_rss_bytes": peak}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        memory["peak_cuda_bytes"] = sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return memory


def _subtract(loaded: LoadedTask, base: str, options: LoadOptions) -> list[str]:
    """Turn θ_t into θ_t − θ_0, tensor by tensor; what the base does not have, such as a head of its own, stays."""
    try:
        other, info = load_model(
            base,
            loaded.task,
            device=str(loaded.device),
            dtype=options["dtype"],
            model_args=options["model_args"],
            allow_missing=True,
        )
    except GradmergeError as error:
        raise InputError(f"--at-delta: {error}") from error
    absent = {*info.missing_keys, *info.mismatched_keys}
    theirs = {name: value for name, value in other.named_parameters() if name not in absent}
    kept = []
    with torch.no_grad():
        for name, value in loaded.model.named_parameters():
            if name in theirs and theirs[name].shape == value.shape:
                value.sub_(theirs[name].to(value.dtype))
            else:
                kept.append(name)
    if len(kept) == sum(1 for _ in loaded.model.named_parameters()):
        raise InputError(f"--at-delta {base}: has none of the model's tensors; is it a base of this model?")
    return [f"not in the base, and taken as they are: {', '.join(kept)}"] if kept else []
