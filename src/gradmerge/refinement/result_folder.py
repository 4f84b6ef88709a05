"""Write a model whose weights were changed as a new folder: weights, small files, record and card."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..checkpoints import Checkpoint
from ..checkpoints.checkpoint import TORCH_TYPES, Buffers
from ..checkpoints.hub_metadata import CARD, RECORD, published
from ..checkpoints.sidecars import copy_sidecars, stems
from ..engine.eval_results import PLACE
from ..engine.front_matter import front_matter_of
from ..engine.run.rounding import rounded
from ..engine.usage import pipeline_tag, usage
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..io.reader import bytes_of
from ..io.writer import ShardWriter
from ..markdown import as_card, as_text
from ..text import to_json
from .streaming import CHUNK, ModelFiles

SHARD_SIZE = 5_000_000_000


def write_weights(
    staging: AtomicDir, checkpoint: Checkpoint, changed: Mapping[str, Any], stem: str = "model"
) -> dict[str, int]:
    """Write all tensors of a checkpoint, some of them changed; returns the bytes of each file.

    Args:
        staging: The folder to write into.
        checkpoint: Gives names, types and all other tensors.
        changed: Tensor of the checkpoint → new value, or what has it as ``get()``.
        stem: How the files are called.
    """
    tensors = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    folders = stems(checkpoint) if stem == "model" else {"": stem}
    for module in checkpoint.modules:
        (staging.folder / module).mkdir(exist_ok=True)
    writer = ShardWriter(staging.folder, stem, tensors, SHARD_SIZE, {"format": "pt"}, folders)
    staging.require_space(writer.nbytes)
    buffers = Buffers()
    try:
        writer.open()
        for name, info in checkpoint.tensors.items():
            if name in changed:
                value = changed[name]
                value = value if isinstance(value, Tensor) else value.get()
                value = rounded(value.detach().cpu(), TORCH_TYPES[info.dtype])
                if not bool(value.isfinite().all()):
                    raise InputError(f"{name}: the new weight is too large for the type {info.dtype}")
                writer.write(name, 0, bytes_of(value.contiguous().reshape(-1)))
                continue
            for start in range(0, info.numel, CHUNK):
                block = checkpoint.read(name, start, min(start + CHUNK, info.numel), buffers)
                writer.write(name, start, bytes_of(block.contiguous()))
        writer.finish()
    finally:
        writer.close()
    if stem == "model":
        copy_sidecars(checkpoint, staging.folder, "auto")
    return dict(writer.sizes)


def write_card(staging: AtomicDir, files: ModelFiles, what: str, text: str) -> None:
    """Write the model card: front matter, title, ``text`` and how to load the model."""
    part = published(files.checkpoint)
    front = front_matter_of(
        [part],
        relation="finetune",
        library="transformers",
        tags=["gradmerge", what],
        pipeline=part.pipeline_tag or pipeline_tag(files.info.base_folder),
    )
    name = staging.out.name
    body = f"# {as_text(name)}\n\n{text.rstrip()}\n{usage(staging.folder, name)}\n{PLACE}"
    (staging.folder / CARD).write_text(as_card(front, body), "utf-8")


def write_record(
    staging: AtomicDir,
    files: ModelFiles,
    what: str,
    facts: Mapping[str, Any],
    models: Mapping[str, str],
    sizes: Mapping[str, int],
    seconds: float,
    notes: Sequence[str],
) -> None:
    """Write gradmerge.json.

    Args:
        staging: The folder to write into.
        files: The model before.
        what: The key that ``facts`` go under: ``calibration`` or ``distillation``.
        facts: What was done.
        models: Name → path relative to the result, or Hub id, of the models that the merge was made of.
        sizes: File → bytes.
        seconds: How long it took.
        notes: What a user should know.
    """
    record = {
        "gradmerge": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        what: dict(facts),
        "models": dict(models),
        "inputs": [{"role": "merged", "source": files.reference}],
        "output": {"files": list(sizes), "sizes": dict(sizes), "bytes": sum(sizes.values())},
        "versions": {"gradmerge": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "timings": {"total": round(seconds, 3)},
        "notes": list(notes),
    }
    (staging.folder / RECORD).write_text(to_json(record) + "\n", "utf-8")
