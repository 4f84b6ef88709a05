"""A LoRA adapter from two whole models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..arguments import checked
from ..engine.run.merge import MergeResult
from ..progress import Progress
from .merge import merge


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
    resume: bool = False,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    dequantize: bool = False,
    progress: bool | Progress = True,
) -> MergeResult:
    """Write what fine-tuning changed as a PEFT LoRA adapter of the base, streamed one matrix at a time.

    Each matrix of the difference is replaced by the nearest product BA of the rank, or of a lower one that loses
    nothing. Norms, biases and other tensors that have changed and that LoRA cannot hold are saved whole, and so are
    embeddings that the model shares with its head.

    Args:
        model: The fine-tuned model: a folder, a `.safetensors` file, a Hub id, or a PEFT adapter folder.
        out: A new folder for the adapter.
        base: The model that it was tuned from; its folder must have a config.json.
        rank: The largest rank of a matrix.
        include: Glob patterns over tensor names: what the adapter may change.
        exclude: Glob patterns over tensor names: what stays as in the base.
        dtype: Type of the factors: float32 by default, or float64, bfloat16, float16.
        threads: By default one per core, at most 4.
        force: Replace ``out`` if gradmerge wrote it, or it is empty.
        resume: Go on with work that was killed.
        allow_pickle: Also read .bin and .pt checkpoints, of which only the tensors are taken.
        allow_config: Keys in which configs may differ although they make another function of the weights.
        dequantize: Read codes of fp8 and bitsandbytes as the numbers that they stand for.
        progress: A bar on long work; False for none; or what is told how far it is, in bytes.

    Returns:
        What was done. ``lost`` has the share of each matrix's change that the rank does not hold, as squared Frobenius
        norm, and ``lost_share`` that of all tensors together.

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
        resume=resume,
        allow_pickle=allow_pickle,
        allow_config=allow_config,
        dequantize=dequantize,
        progress=progress,
    )
