"""Extract a LoRA adapter from a fine-tuned model and its base."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import checked
from ..progress import Progress
from .merge import merge

if TYPE_CHECKING:
    from ..engine.run import MergeResult


@checked()
def extract_lora(
    model: str | Path,
    out: str | Path,
    *,
    base: str | Path,
    rank: int,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    dtype: str = "auto",
    threads: int | None = None,
    force: bool = False,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    dequantize: bool = False,
    progress: bool | Progress = True,
) -> MergeResult:
    """Write the difference between a fine-tuned model and its base as a PEFT LoRA adapter, one matrix at a time.

    Each matrix of the difference becomes the nearest product BA of this rank, or of a lower one that loses nothing.
    Changed tensors that LoRA cannot represent (norms, biases, embeddings that are also the head) are saved whole.

    Args:
        model: The fine-tuned model: a folder, a `.safetensors` file, a Hub id, or a PEFT adapter folder.
        out: A new folder for the adapter.
        base: The base model; its folder must have a config.json.
        rank: The largest rank of a matrix.
        include: Names or glob patterns of tensors that the adapter may change; by default all.
        exclude: Names or glob patterns of tensors that stay as in the base, such as ``'*norm*'``.
        dtype: Type of the factors: float32 (auto), float64, bfloat16 or float16.
        threads: Threads; by default one per core, at most 4.
        force: Replace the output if gradmerge wrote it, or if it is empty.
        allow_pickle: Also read .bin and .pt files (tensors only, no code).
        allow_config: Accept that the models' configs differ in these keys, as the error names them.
        dequantize: Dequantize the weights of fp8 and bitsandbytes models on load.
        progress: Show a progress bar; or an object that gets the progress in bytes.

    Returns:
        The result. ``lost`` is the share of each matrix's change that the rank cannot represent, as squared Frobenius
        norm, and ``lost_share`` the same over all tensors.

    >>> extract_lora("./yelp", "./yelp-lora", base="./base", rank=16).lost_share  # doctest: +SKIP
    0.083
    """
    recipe: dict[str, Any] = {
        "method": "task-arithmetic",
        "base": str(base),
        "models": [str(model)],
        "include": list(include),
        "exclude": list(exclude),
        "output": {"format": "adapter", "rank": rank, "dtype": dtype},
    }
    return merge(
        recipe,
        out,
        threads=threads,
        force=force,
        allow_pickle=allow_pickle,
        allow_config=allow_config,
        dequantize=dequantize,
        progress=progress,
    )
