"""Estimating the curvature of a model on data: in memory, or disk to disk."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack, overload

import torch
from torch import nn

from ..curvature.batches import Again
from ..curvature.curvature import Curvature
from ..curvature.estimate import LIKELIHOODS
from ..curvature.estimate import estimate_curvature as estimate_in_memory
from ..curvature.files import PRECISIONS
from ..curvature.gram import Gram, estimate_gram
from ..curvature.losses import TokenLoss
from ..curvature.stored_names import for_files
from ..engine.progress import NoProgress, Progress
from ..engine.reads import changed, digest_of_state, model_paths, state_of
from ..errors import GradmergeError, InputError, MachineError
from ..storage.smallfile import read_json
from ..storage.staging import MARK, REPLACED, Staging
from ..tasks import LoadedTask, Loading, complete, load_model, load_task
from ..tasks.data_sources import data_paths
from ..text import nearest

#: What can be estimated, and what unfinished work on it is called.
KINDS = {"diagonal": "measurement of diagonal curvature", "gram": "measurement of Gram matrices"}
#: Seconds between two copies of the sums so far.
SAVE_EVERY = 180.0


@dataclass
class Estimate:
    """What was estimated and written."""

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
    notes: list[str] = field(default_factory=list)


@overload
def estimate_curvature(
    model: nn.Module, batches: Iterable[Any], likelihood: str = "empirical", **options: Any
) -> Curvature: ...
@overload
def estimate_curvature(model: str | Path, source: str | Path, out: str | Path, **options: Any) -> Estimate: ...
def estimate_curvature(model: Any, *data: Any, **options: Any) -> Curvature | Estimate:
    """The curvature of a model on data: Σ_i [∇ℓ_i(θ)]², a sum over examples of squared gradients.

    Args:
        model: A module; or, to go from disk to disk, the folder or Hub id of a model.
        data: For a module, its batches, and the likelihood (``empirical`` if left out). For a model on disk, its data,
            as `gradmerge curvature estimate --data` takes it, and the folder to write.
        options: For a module, those of :func:`gradmerge.curvature.estimate.estimate_curvature`; for a model on disk,
            those of :func:`gradmerge.api.estimating.estimate_to_disk`.

    Returns:
        The curvature of the module; or, from disk to disk, what was written.

    >>> estimate_curvature(module, batches).save("./yelp/curvature")  # doctest: +SKIP
    >>> estimate_curvature("./yelp", "reviews.jsonl", "./yelp/curvature", limit=1000)  # doctest: +SKIP
    """
    return (estimate_to_disk if isinstance(model, str | Path) else estimate_in_memory)(model, *data, **options)


def estimate_to_disk(
    model: str | Path,
    source: str | Path,
    out: str | Path,
    *,
    likelihood: str = "empirical",
    kind: str = "diagonal",
    at_delta: str | None = None,
    seed: int = 0,
    precision: str = "float32",
    shard_size: int = 5_000_000_000,
    resume: bool = False,
    force: bool = False,
    durable: bool = False,
    progress: Progress | None = None,
    save_every: float = SAVE_EVERY,
    **loading: Unpack[Loading],
) -> Estimate:
    """Estimate the curvature of a model (folder, Hub id or adapter) on data, and write a curvature folder.

    The options are those of `gradmerge curvature estimate`. Every ``save_every`` seconds the sums so far are saved
    beside ``out``; with ``resume`` a run that was stopped goes on from there.
    """
    options = complete(loading, estimate_to_disk)
    _check_options(likelihood, kind, precision, at_delta)
    begun = time.perf_counter()
    model, source, progress = str(model), str(source), progress or NoProgress()
    models = [path for reference in (model, at_delta, options["tokenizer"]) for path in model_paths(reference)]
    data = data_paths(source)
    # A model's curvature may lie in its folder; that is where merges look for it.
    with Staging(
        Path(out),
        KINDS[kind],
        force=force,
        resume=resume,
        reads=[*models, *data],
        inside=model_paths(model),
        durable=durable,
    ) as staging:
        saved = _Saved(staging, save_every)
        files = state_of(models) + state_of(data, deep=True)
        loaded = load_task(model, source, **options)
        if likelihood == "exact" and kind == "diagonal" and isinstance(loaded.output, TokenLoss):
            next(loaded.output.factors(torch.empty(0)))  # explains why it cannot be done
        notes = _subtract(loaded, at_delta, options) if at_delta is not None else []
        result: Curvature | Gram
        start = None
        if kind == "gram":
            progress.begin("measuring", loaded.examples)
            result = estimate_gram(loaded.model, loaded.batches(), device=loaded.device, each_batch=progress.advance)
        else:
            asked = dict(options)
            saved.request = {
                "model": model,
                "source": source,
                "files": digest_of_state(files),
                "task": loaded.task,
                "likelihood": likelihood,
                "at_delta": at_delta,
                "columns": dict(options["columns"] or {}),
                "seed": seed,
                **{name: asked[name] for name in ("limit", "max_length", "dtype", "tokenizer")},
            }
            start = saved.read() if resume else None
            result = _estimate(loaded, likelihood, seed, start, saved, progress)
        if path := changed(files, state_of(models) + state_of(data, deep=True)):
            staging.keep = False
            raise MachineError(f"{path}: changed while it was being used, so that nothing was written. Measure again.")
        # The name of a folder without the path to it, as files are published.
        result.model = Path(model).resolve().name if Path(model).exists() else model
        saved.clear_rest()
        result.write(staging.folder, precision, shard_size)
        saved.remove()
    return Estimate(
        out=Path(out),
        kind=kind,
        task=loaded.task,
        examples=result.examples,
        tensors=len(result),
        entries=sum(value.numel() for value in result.values()),
        seconds=time.perf_counter() - begun,
        device=str(loaded.device),
        resumed_from=start.examples if start is not None else 0,
        notes=[*staging.notes, *loaded.notes, *notes],
    )


def _check_options(likelihood: str, kind: str, precision: str, at_delta: str | None) -> None:
    for option, value, known in (
        ("likelihood", likelihood, LIKELIHOODS),
        ("kind", kind, tuple(KINDS)),
        ("precision", precision, tuple(PRECISIONS)),
    ):
        if value not in known:
            raise InputError(f"--{option} {value}: known are {', '.join(known)}{nearest(value, known)}")
    if kind == "gram" and precision != "float32":
        raise InputError("--kind gram: Gram matrices are stored as float32 only")
    if kind == "gram" and at_delta is not None:
        raise InputError("--at-delta is for the Fisher of fa1; Gram matrices are measured at the model itself")


def _estimate(
    loaded: LoadedTask, likelihood: str, seed: int, start: Curvature | None, saved: _Saved, progress: Progress
) -> Curvature:
    done = first = start.examples if start is not None else 0
    if start is not None and done == loaded.examples:
        return Curvature(start, done, likelihood, stored=for_files(loaded.model))
    progress.begin("measuring", loaded.examples, done)

    def each_batch(so_far: Any) -> None:
        nonlocal done
        now = min(done + loaded.batch_size, loaded.examples)
        progress.advance(now - done)
        done = now
        saved.maybe_write(so_far)

    return estimate_in_memory(
        loaded.model,
        Again(lambda: loaded.batches(start=first)),
        likelihood,
        output=loaded.output,
        seed=seed,
        device=loaded.device,
        start=start,
        each_batch=each_batch,
    )


class _Saved:
    """The sums so far, in the folder that becomes the result, with the request that they are for."""

    def __init__(self, staging: Staging, every: float) -> None:
        self._staging, self._folder = staging, staging.folder
        self._curvature, self._request = self._folder / "so-far", self._folder / "so-far.json"
        self._every, self._last = every, time.monotonic()
        self.request: dict[str, Any] = {}
        staging.keep = self._request.is_file()

    def maybe_write(self, so_far: Any) -> None:
        if time.monotonic() - self._last < self._every:
            return
        curvature: Curvature = so_far()
        # As in memory: names of files are for the result.
        Curvature(curvature, curvature.examples, curvature.likelihood).save(self._curvature, force=True)
        temporary = self._request.with_suffix(".new")
        temporary.write_text(json.dumps(self.request))
        os.replace(temporary, self._request)  # noqa: PTH105
        self._staging.keep = True
        self._last = time.monotonic()

    def clear_rest(self) -> None:
        """Make room for the result; the sums stay until that is written."""
        for child in self._folder.iterdir():
            if child not in (self._curvature, self._request, self._folder / MARK):
                shutil.rmtree(child) if child.is_dir() else child.unlink()

    def remove(self) -> None:
        self._request.unlink(missing_ok=True)
        shutil.rmtree(self._curvature, ignore_errors=True)

    def read(self) -> Curvature | None:
        if not self._request.is_file():
            return None
        aside = self._curvature.with_name(self._curvature.name + REPLACED)
        if aside.is_dir() and not self._curvature.exists():  # a kill came while newer sums took the place of these
            aside.rename(self._curvature)
        try:
            found, so_far = read_json(self._request), Curvature.load(self._curvature)
        except (InputError, OSError, ValueError) as error:
            unread = f"what it holds cannot be read ({error})"
            raise InputError(f"{self._folder}: {unread}. Run without --resume to begin anew.") from error
        if found != self.request:
            raise InputError(
                f"{self._folder}: holds a measurement of another model, other data or other options. "
                "Run it with the same ones, or without --resume to begin anew."
            )
        return so_far


def _subtract(loaded: LoadedTask, base: str, options: Loading) -> list[str]:
    """Turn θ_t into θ_t − θ_0, tensor by tensor; what the base does not have, such as a head of its own, stays."""
    try:
        other, info = load_model(
            base, loaded.task, device=str(loaded.device), dtype=options["dtype"], attn=options["attn"], whole=False
        )
    except GradmergeError as error:
        raise InputError(f"--at-delta: {error}") from error
    absent = {*info.missing_keys, *info.other_shapes}
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
