"""Write a model whose weights changed as a new folder.

The result has the same tensors in the same dtypes. Tensors that did not change keep their bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..cards.card import with_evaluations, write_card
from ..cards.metadata import CARD, ModelMetadata, may_be_hub_id, name_of, read_metadata
from ..cards.provenance import write_record
from ..checkpoints.checkpoint import TORCH_TYPES, Buffers, Checkpoint
from ..checkpoints.lora import AdapterCheckpoint, is_adapter, read_adapter_config
from ..checkpoints.sidecars import copy_sidecars
from ..checkpoints.tied_weights import same_values, tied_to
from ..engine.jobs import rounded
from ..errors import InputError
from ..io.atomic_dir import AtomicDir, require_space
from ..io.reader import bytes_of
from ..io.writer import ShardWriter
from ..tasks import LoadingInfo
from .streaming import CHUNK

SHARD_SIZE = 5_000_000_000


def write_folder(
    staging: AtomicDir,
    checkpoint: Checkpoint,
    info: LoadingInfo,
    changed: Mapping[str, Any],
    *,
    action: str,
    card: str,
    facts: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]] = (),
    seconds: float,
    notes: Sequence[str] = (),
) -> None:
    """Write a model folder or an adapter folder: weights, configuration and tokenizer files, record and model card.

    Args:
        staging: The temporary folder.
        checkpoint: The model before, or the adapter.
        info: Where it is.
        changed: Tensor of the checkpoint → its new value, or what returns it as ``get()``. All others are copied.
        action: What was done, as a tag of the card.
        card: The text of the model card, in Markdown, without its title.
        facts: The facts of the record.
        inputs: The inputs of the record.
        measured: Evaluations of the result, for the card and the record.
        seconds: How long it took.
        notes: What a user should know.
    """
    folder = info.folder
    adapter = is_adapter(folder) and not isinstance(checkpoint, AdapterCheckpoint)  # this is the full model
    sizes = _write_weights(staging, checkpoint, changed, "adapter_model" if adapter else "model")
    copy_sidecars(checkpoint, staging.folder, "auto")
    base, base_folder = None, None
    if adapter:
        copy_adapter_config(folder, staging.folder)
        name = str(read_adapter_config(folder).get("base_model_name_or_path") or "")
        base = ModelMetadata(name_of(name), ids=(name,) if may_be_hub_id(name, folder) else ())
        base_folder = info.base_folder
    write_card(
        staging.folder,
        staging.out.name,
        card.rstrip(),
        [read_metadata(checkpoint)],
        relation="finetune",
        tags=[action],
        base=base,
        base_folder=base_folder,
    )
    if measured:
        path = staging.folder / CARD
        path.write_text(with_evaluations(path.read_text("utf-8"), staging.out.name, measured), "utf-8")
        facts = {**facts, "evaluations": list(measured)}
    write_record(staging.folder, facts, inputs=inputs, sizes=sizes, timings={"total": seconds}, notes=notes)


def _write_weights(staging: AtomicDir, checkpoint: Checkpoint, changed: Mapping[str, Any], stem: str) -> dict[str, int]:
    """Write all tensors of a checkpoint, some of them changed; return the bytes of each file."""
    for module in checkpoint.modules:
        (staging.folder / module).mkdir(exist_ok=True)
    folders = checkpoint.modules if stem == "model" else ()
    writer = ShardWriter(staging.folder, stem, checkpoint.tensors, SHARD_SIZE, {"format": "pt"}, folders)
    require_space(staging.folder, writer.nbytes)
    buffers = Buffers()
    with writer:
        for name, info in checkpoint.tensors.items():
            value = changed.get(name)
            if value is None and (source := tied_to(name, checkpoint)) in changed and source is not None:
                value = changed[source] if same_values(checkpoint, name, source) else None  # tied, but stored twice
            if value is not None:
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
    return dict(writer.sizes)


def copy_adapter_config(home: Path, folder: Path) -> None:
    """Copy the adapter's config; a relative path of its base model is relative to the new folder."""
    config = read_adapter_config(home)
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and not Path(base).exists() and (home / base).is_dir():
        config["base_model_name_or_path"] = os.path.relpath(home / base, folder)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
