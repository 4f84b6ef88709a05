"""Samples from the posterior of a merge: N(θ̂, temperature · (H̄ + damping)⁻¹)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, overload

from torch import Tensor

from ..arguments import checked
from ..checkpoints.checkpoint import Buffers
from ..checkpoints.open import open_checkpoint
from ..checkpoints.tied_weights import tied_to
from ..curvature.format import default_curvature, open_curvature
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..recipe import Recipe, make_recipe
from ..text import to_json
from ..urls import redact
from .merge import merge


@overload
def sample_posterior(folder: str | Path, n: int, *, out: None = ..., **options: Any) -> Iterator[dict[str, Tensor]]: ...
@overload
def sample_posterior(folder: str | Path, n: int, *, out: str | Path, **options: Any) -> list[Path]: ...
@checked()  # type: ignore[misc]  # the options of both forms are those below
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

    Each sample is a merge with the method `posterior-sample`. Tensors without curvature, and entries whose H̄ + damping
    is 0, stay at θ̂.

    Args:
        folder: A merge written with `output.curvature: true`: its weights are θ̂, and its `curvature/` holds H̄.
        n: The number of models.
        temperature: Factor of the variance.
        seed: The random numbers depend only on the seed, the number of the model, the tensor and the position.
        damping: Added to H̄.
        reduction: "sum" reads H̄ as the file stores it, the sum over examples; "mean" divides it by their number, as a
            merge does whose recipe says so.
        dtype: Of the samples. In bfloat16 and float16, rounding hides a small spread of large weights.
        out: Write the models as the folders `out/0`, `out/1`, …, which appear together when all are complete.
        force: Replace ``out`` if gradmerge wrote it, or it is empty.
        threads: By default one per core, at most 4.

    Returns:
        An iterator over state dicts with the files' names, one model in memory at a time; with ``out``, the folders.

    >>> [evaluate(model, "reviews.jsonl") for model in sample_posterior("./merged", 5, out="./draws")]  # doctest: +SKIP
    """
    if n < 1:
        raise InputError(f"n={n}: must be at least 1")
    with open_checkpoint(folder) as model:
        if (curvature := default_curvature(model.folder)) is None:
            raise InputError(
                f"{folder}: has no curvature/ folder, which holds the precision H̄ of a merged model. Merge again with "
                "output.curvature: true."
            )
        with open_curvature(str(curvature)) as file:
            sampled = [name for name in model.tensors if {name, tied_to(name, model)} & file.shapes.keys()]
        inputs = model.files()
    if not sampled:
        raise InputError(f"{curvature}: has no tensor of {folder}")
    recipe = {
        "method": "posterior-sample",
        "models": [{"model": str(folder)}],
        "damping": damping,
        "reduction": reduction,
        "include": sampled,
        "output": {"dtype": dtype},
    }

    def recipe_of(sample: int) -> Recipe:
        return make_recipe(recipe | {"options": {"temperature": temperature, "seed": seed, "sample": sample}})

    def write(sample: int, target: Path) -> Path:
        merge(recipe_of(sample), target, threads=threads, progress=False)
        return target

    recipe_of(0)  # raises if an argument is invalid
    if out is None:
        return _states(write, n)
    with AtomicDir(Path(out), "set of samples", force=force, reads=[*inputs, Path(folder)]) as staging:
        for sample in range(n):
            write(sample, staging.folder / str(sample))
        record = redact(to_json({"samples": n, "recipe": recipe}))
        (staging.folder / "gradmerge.json").write_text(f"{record}\n", "utf-8")
    return [Path(out) / str(sample) for sample in range(n)]


def _states(write: Any, n: int) -> Iterator[dict[str, Tensor]]:
    for sample in range(n):
        with tempfile.TemporaryDirectory(prefix="gradmerge-") as temporary:
            with open_checkpoint(write(sample, Path(temporary) / "sample")) as model:
                state = {
                    name: model.read(name, 0, info.numel, Buffers()).clone().reshape(info.shape)
                    for name, info in model.tensors.items()
                }
        yield state
