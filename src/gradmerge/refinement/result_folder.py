"""Write a model whose weights were changed as a new folder: weights, small files, record and card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..cards import card as cards, provenance
from ..cards.metadata import read_metadata
from ..checkpoints import Checkpoint
from ..checkpoints.checkpoint import TORCH_TYPES, Buffers
from ..checkpoints.sidecars import copy_sidecars, stems
from ..engine.run.rounding import rounded
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..io.reader import bytes_of
from ..io.writer import ShardWriter
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
    with writer:
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
    if stem == "model":
        copy_sidecars(checkpoint, staging.folder, "auto")
    return dict(writer.sizes)


def write_card(staging: AtomicDir, files: ModelFiles, what: str, text: str) -> None:
    """Write the model card; ``text`` says what was done, in Markdown."""
    metadata = [read_metadata(files.checkpoint)]
    cards.write_card(staging.folder, staging.out.name, text.rstrip(), metadata, relation="finetune", tags=[what])


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
    provenance.write_record(
        staging.folder,
        {"models": dict(models), what: dict(facts)},
        inputs=[{"role": "merged", "source": files.reference}],
        sizes=sizes,
        timings={"total": seconds},
        notes=notes,
    )
