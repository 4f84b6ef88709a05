"""Samples from the posterior of a merge: N(θ̂, temperature · (H̄ + damping)⁻¹)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..arguments import checked
from ..checkpoints.open import open_checkpoint
from ..checkpoints.tied_weights import tied_to
from ..curvature.format import default_curvature, open_curvature
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..recipe import make_recipe
from ..text import to_json
from ..urls import redact
from .merge import merge


@checked()
def sample_posterior(
    folder: str | Path,
    n: int,
    *,
    out: str | Path,
    temperature: float = 1.0,
    seed: int = 0,
    damping: float = 0.0,
    reduction: str = "sum",
    dtype: str = "auto",
    force: bool = False,
) -> list[Path]:
    """Draw ``n`` models from N(θ̂, temperature · (H̄ + damping)⁻¹), the posterior of a merge.

    Each sample is a merge with the method `posterior-sample`. Tensors without curvature, and entries whose H̄ + damping
    is 0, stay at θ̂.

    Args:
        folder: A merge written with `output.curvature: true`: its weights are θ̂, and its `curvature/` holds H̄.
        n: The number of models.
        out: The new folder. It gets the models `out/0`, `out/1`, …, which appear together when all are complete.
        temperature: Factor of the variance.
        seed: The random numbers depend only on the seed, the number of the model, the tensor and the position.
        damping: Added to H̄.
        reduction: "sum" reads H̄ as the file stores it, the sum over examples; "mean" divides it by their number, as a
            merge does whose recipe says so.
        dtype: Of the samples. In bfloat16 and float16, rounding hides a small spread of large weights.
        force: Replace ``out`` if gradmerge wrote it, or it is empty.

    Returns:
        The folders of the models.

    >>> [evaluate(model, "reviews.jsonl") for model in sample_posterior("./merged", 5, out="./draws")]  # doctest: +SKIP
    """
    if n < 1:
        raise InputError(f"n={n}: must be at least 1")
    with open_checkpoint(folder) as model:
        if (curvature := default_curvature(model.folder)) is None:
            raise InputError(f"{folder}: has no curvature/ folder with H̄. Merge again with output.curvature: true.")
        with open_curvature(str(curvature)) as file:
            sampled = [name for name in model.tensors if {name, tied_to(name, model)} & file.shapes.keys()]
        inputs = model.files()
    if not sampled:
        raise InputError(f"{curvature}: has no tensor of {folder}")
    recipe: dict[str, Any] = {"method": "posterior-sample", "models": [{"model": str(folder)}], "damping": damping}
    recipe |= {"reduction": reduction, "include": sampled, "output": {"dtype": dtype}}
    options = {"temperature": temperature, "seed": seed}
    with AtomicDir(Path(out), "set of samples", force=force, reads=[*inputs, Path(folder)]) as staging:
        for sample in range(n):
            sampled_recipe = make_recipe(recipe | {"options": options | {"sample": sample}})
            merge(sampled_recipe, staging.folder / str(sample), progress=False)
        record = redact(to_json({"samples": n, "recipe": recipe | {"options": options}}))
        (staging.folder / "gradmerge.json").write_text(f"{record}\n", "utf-8")
    return [Path(out) / str(sample) for sample in range(n)]
