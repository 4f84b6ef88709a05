"""The merged posterior: models drawn from N(θ̂, temperature · H̄⁻¹)."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from .._version import __version__
from ..arguments import checked
from ..checkpoints.checkpoint import TORCH_TYPES, Buffers, Checkpoint
from ..checkpoints.open import open_checkpoint
from ..checkpoints.sidecars import copy_sidecars, sidecars, stems
from ..checkpoints.tied_weights import same_values, tied_to
from ..curvature.format import CurvatureFile, default_curvature, open_curvature
from ..engine.inputs import CurvatureInput
from ..engine.plan import BLOCK
from ..engine.randomness import standard_normal
from ..engine.thread_pool import run_parallel, with_buffers
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..io.reader import FLOATS, bytes_of
from ..io.writer import ShardWriter
from ..text import count, listed, to_json
from .merge import default_threads

#: No number that :func:`standard_normal` gives is farther from 0.
FARTHEST = 9.0
SHARD_SIZE = 5_000_000_000
_STORED = {word: code for code, word in FLOATS.items()}


@dataclass(frozen=True)
class _SamplingSettings:
    temperature: float
    seed: int
    damping: float
    reduction: str
    dtype: str

    def check(self, n: int) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InputError(f"n: how many models to draw, a whole number from 1 on, not {n!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InputError(f"seed: must be a whole number, not {self.seed!r}")
        for name, value in (("temperature", self.temperature), ("damping", self.damping)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise InputError(f"{name}: must be a finite number that is not negative, not {value!r}")
        if self.reduction not in ("sum", "mean"):
            raise InputError(f"reduction: must be sum or mean, not {self.reduction!r}")
        if self.dtype != "auto" and self.dtype not in _STORED:
            raise InputError(f"dtype: must be auto, {', '.join(_STORED)}, not {self.dtype!r}")


@overload
def sample_posterior(folder: str | Path, n: int, *, out: None = ..., **options: Any) -> Iterator[dict[str, Tensor]]: ...
@overload
def sample_posterior(folder: str | Path, n: int, *, out: str | Path, **options: Any) -> list[Path]: ...
@checked("n", "seed", "temperature", "damping")  # type: ignore[misc]  # the options of both forms are those below
def sample_posterior(
    folder: str | Path,
    n: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    damping: float = 0.0,
    reduction: str = "sum",
    dtype: str = "auto",
    out: str | Path | None = None,
    force: bool = False,
    threads: int | None = None,
) -> Iterator[dict[str, Tensor]] | list[Path]:
    """Draw ``n`` models from N(θ̂, temperature · (H̄ + damping)⁻¹), the posterior of a merge.

    Args:
        folder: A merge written with `output.curvature: true`: its weights are θ̂, and its `curvature/` holds H̄.
        n: How many models.
        temperature: Multiplies the variance.
        seed: The random numbers depend on it, the number of the model, tensor and position alone.
        damping: Entries whose H̄ + damping is 0 have no finite variance: they stay at θ̂, as do tensors without
            curvature, and a warning says how many.
        reduction: "sum" takes H̄ as the file holds it, the sum over examples; "mean" divides it by their number, as a
            merge does whose recipe says so, which makes the draws wider by the square root of that number.
        dtype: Of the draws. Beside large weights, a small spread is rounded away in bfloat16 and float16.
        out: Write the models as the folders `out/0`, `out/1`, …, which appear together when all are complete.
        force: Replace ``out`` if gradmerge wrote it, or it is empty.
        threads: By default one per core, at most 4.

    Returns:
        An iterator over state dicts by the files' names, one model in memory at a time; with ``out``, the folders.

    >>> [evaluate(model, "reviews.jsonl") for model in sample_posterior("./merged", 5, out="./draws")]  # doctest: +SKIP
    """
    settings = _SamplingSettings(temperature, seed, damping, reduction, dtype)
    settings.check(n)
    threads = threads or default_threads()
    with _opened(folder, settings) as posterior:
        for text in posterior.notes(threads):
            warnings.warn(text, UserWarning, stacklevel=3)
        if out is not None:
            return _write(posterior, n, Path(out), force, threads)
    return _states(folder, settings, n, threads)


@contextlib.contextmanager
def _opened(folder: str | Path, settings: _SamplingSettings) -> Iterator[_Posterior]:
    with open_checkpoint(str(folder)) as model:
        inside = default_curvature(model.folder)
        if inside is None:
            raise InputError(
                f"{folder}: has no curvature/ folder, which holds the precision H̄ of a merged model. Merge again with "
                "output.curvature: true."
            )
        with open_curvature(str(inside)) as file:
            file.label = f"{folder}/{inside.name}"
            yield _Posterior(model, file, settings)


class _Posterior:
    """A merged model and its precision, open to be drawn from."""

    def __init__(self, model: Checkpoint, file: CurvatureFile, settings: _SamplingSettings) -> None:
        self.model, self.settings = model, settings
        _check_fit(model, file)
        self._precision = CurvatureInput.of_file(file, settings.reduction)
        self.sources = {name: _source(model, file, name) for name in model.tensors}
        """Tensor → the one whose precision and random numbers it has; None: it stays as it is."""
        self.tensors = {
            name: (info.dtype if settings.dtype == "auto" or not info.is_float else _STORED[settings.dtype], info.shape)
            for name, info in model.tensors.items()
        }
        self.inputs = [*model.files(), *file.files(), *([model.folder] if model.folder else [])]

    def units(self) -> Iterator[tuple[str, int, int]]:
        for name, info in self.model.tensors.items():
            for start in range(0, max(info.numel, 1), BLOCK):
                yield name, start, min(start + BLOCK, info.numel)

    def draw(self, sample: int, name: str, start: int, stop: int, buffers: Buffers) -> Tensor:
        """A block of a model, in the type that it is stored in. It may lie in a buffer."""
        values = self.model.read(name, start, stop, buffers)
        spread = self._spread(name, start, stop, buffers)
        if spread is not None:
            source = self.sources[name]
            assert source is not None
            values = spread.mul_(standard_normal(self.settings.seed, sample, source, start, stop)).add_(values)
        return values.to(TORCH_TYPES[self.tensors[name][0]])

    def _spread(self, name: str, start: int, stop: int, buffers: Buffers) -> Tensor | None:
        """√(temperature / (H̄ + damping)) in float64, 0 where it is infinite; None where nothing moves."""
        source, temperature = self.sources[name], self.settings.temperature
        if source is None or temperature == 0:
            return None
        precision = self._precision.read(source, start, stop, buffers, "precision", torch.float64)
        precision = precision + self.settings.damping
        return torch.where(precision > 0, (temperature / precision).sqrt(), 0.0)

    def notes(self, threads: int) -> list[str]:
        """Look at all of it once: what should be known of the draws. Raises where they would not be finite."""
        if self.settings.temperature == 0:
            return []
        lock = threading.Lock()
        still = entries = 0
        noise = weights = 0.0

        def work(buffers: Buffers, unit: tuple[str, int, int]) -> None:
            nonlocal still, entries, noise, weights
            spread = self._spread(*unit, buffers)
            if spread is None:
                return
            values = self.model.read(*unit, buffers).double()
            self._check_range(unit[0], values, spread)
            with lock:
                still += int((spread == 0).sum())
                entries += spread.numel()
                noise += float(spread.square().sum())
                weights += float(values.square().sum())

        run_parallel(self.units(), with_buffers(work), threads)
        noise, weights = math.sqrt(noise), math.sqrt(weights)
        label, found = self.model.label, []
        if still:
            found.append(
                f"{label}: {still} of {entries} entries have the precision 0, and so no finite variance; they stay at "
                "the merged model's. A damping above 0 lets them move."
            )
        tensors = self.model.tensors
        outside = [n for n, info in tensors.items() if self.sources[n] is None and info.is_float and info.numel]
        if outside:
            found.append(
                f"{label}: {count(sum(tensors[name].numel for name in outside))} entries are of tensors without "
                f"curvature and stay at the merged model's:\n{listed(outside, 4)}"
            )
        if noise > weights:
            found.append(
                f"{label}: a draw is about {noise:.3g} away from the merged model, whose own norm is {weights:.3g}: "
                "little of the model is left in it. Precision near 0 does this; pass a damping, or a lower temperature."
            )
        return found

    def _check_range(self, name: str, values: Tensor, spread: Tensor) -> None:
        if not values.numel():
            return
        kind = self.tensors[name][0]
        reach = float((values.abs() + FARTHEST * spread).max())
        if not reach <= torch.finfo(TORCH_TYPES[kind]).max:
            raise InputError(
                f"{self.model.label}: draws of {name} may reach {reach:.3g}, too large for {FLOATS[kind]}: its weights "
                "are not finite, or its precision is almost 0. Pass a damping, or a wider dtype."
            )


def _check_fit(model: Checkpoint, file: CurvatureFile) -> None:
    if file.kind != "diagonal":
        raise InputError(f"{file.label}: holds {file.kind} matrices, where a diagonal is needed")
    wrong = []
    for name, shape in file.shapes.items():
        info = model.tensors.get(name)
        if info is None:
            wrong.append(f"{name}: the model has no such tensor")
        elif info.shape != shape or not info.is_float:
            wrong.append(f"{name}: {list(shape)}, but the weight is {info}")
    if wrong or not file.shapes:
        raise InputError(f"{file.label}: is not the curvature of {model.label}\n{listed(wrong) or '  it is empty'}")


def _source(model: Checkpoint, file: CurvatureFile, name: str) -> str | None:
    """Tied weights that are stored twice are drawn once, so that they stay tied."""
    tied = tied_to(name, model)
    if tied is not None and tied in file.shapes and same_values(model, name, tied):
        return tied
    return name if name in file.shapes else None


def _states(folder: str | Path, settings: _SamplingSettings, n: int, threads: int) -> Iterator[dict[str, Tensor]]:
    for sample in range(n):
        with _opened(folder, settings) as posterior:
            state = {
                name: torch.empty(shape, dtype=TORCH_TYPES[kind]) for name, (kind, shape) in posterior.tensors.items()
            }

            def put(name: str, start: int, block: Tensor, state: dict[str, Tensor] = state) -> None:
                state[name].view(-1)[start : start + block.numel()] = block

            _fill(posterior, sample, put, threads)
        yield state


def _write(posterior: _Posterior, n: int, out: Path, force: bool, threads: int) -> list[Path]:
    with AtomicDir(out, "set of samples", force=force, reads=posterior.inputs) as staging:
        small = sidecars(posterior.model).nbytes
        for sample in range(n):
            folder = staging.folder / str(sample)
            modules = stems(posterior.model)
            writer = ShardWriter(folder, "model", posterior.tensors, SHARD_SIZE, {"format": "pt"}, modules)
            if sample == 0:
                staging.require_space(n * (writer.nbytes + small) + 1_000_000)
            folder.mkdir()
            with writer:

                def put(name: str, start: int, block: Tensor, writer: ShardWriter = writer) -> None:
                    writer.write(name, start, bytes_of(block.contiguous()))

                _fill(posterior, sample, put, threads)
                writer.finish()
            copy_sidecars(posterior.model, folder, posterior.settings.dtype)
        record = {"gradmerge": __version__, "samples": n, "of": posterior.model.label, **asdict(posterior.settings)}
        (staging.folder / "gradmerge.json").write_text(to_json(record) + "\n", "utf-8")
    return [out / str(sample) for sample in range(n)]


def _fill(posterior: _Posterior, sample: int, put: Callable[[str, int, Tensor], None], threads: int) -> None:
    def work(buffers: Buffers, unit: tuple[str, int, int]) -> None:
        put(unit[0], unit[1], posterior.draw(sample, *unit, buffers))

    run_parallel(posterior.units(), with_buffers(work), threads)
