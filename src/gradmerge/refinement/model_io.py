"""Load a model from disk to change its weights, and write the result as a new folder.

In memory the weights are float32, or float64 if the files are, so that small steps add up. The result has the same
tensors in the same dtypes. Tensors that did not change keep their bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..cards.card import write_card
from ..cards.eval_results import with_evaluations
from ..cards.metadata import CARD, ModelMetadata, may_be_hub_id, name_of, read_metadata
from ..cards.provenance import write_record
from ..checkpoints.adapter_config import is_adapter, read_adapter_config
from ..checkpoints.checkpoint import TORCH_TYPES, Buffers, Checkpoint
from ..checkpoints.lora import AdapterCheckpoint
from ..checkpoints.quantization import detect_quantization
from ..checkpoints.sidecars import copy_sidecars, sidecars, stems
from ..checkpoints.tied_weights import same_values, tied_to
from ..curvature.checkpoint_names import adapter_names, stored_shapes, stored_sources, stored_tensors
from ..engine.rounding import rounded
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..io.reader import bytes_of, open_files
from ..io.small_files import read_json
from ..io.writer import ShardWriter
from ..tasks import LoadedTask, LoadingInfo, LoadOptions, load_model, with_data
from ..tasks.resolve_model import folder_of
from ..text import listed
from .streaming import CHUNK

#: Dtypes of the weights in memory.
WIDE = ("float32", "float64")
SHARD_SIZE = 5_000_000_000


@dataclass
class LoadedModel:
    """A model from disk, in memory in float32 or float64. An adapter is on top of its base model."""

    reference: str
    model: nn.Module
    info: LoadingInfo
    options: LoadOptions
    stored: Checkpoint
    """The files of the weights; for an adapter, its own."""
    sources: dict[str, str]
    """Name of a tensor in the files → its parameter, for tensors with the entries of one parameter."""
    notes: list[str] = field(default_factory=list)

    @property
    def adapter(self) -> bool:
        return is_adapter(self.info.folder)

    def with_data(self, source: str) -> LoadedTask:
        """Load rows for the model."""
        return with_data(self.reference, self.model, self.info, source, **self.options)

    def round_weights(self) -> None:
        """Round the parameters in memory to the dtypes of the files, as in the written model."""
        types = {name: TORCH_TYPES[info.dtype] for name, info in self.stored.tensors.items() if info.is_float}
        usual = Counter(types.values()).most_common(1)[0][0]
        own = {parameter: types[name] for name, parameter in self.sources.items() if name in types}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(rounded(parameter, own.get(name, usual)))

    def changed_tensors(self) -> dict[str, Tensor]:
        """Name in the files → value of the parameters that may have changed."""
        fixed = {name for name, parameter in self.model.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in _values_in(self).items() if self.sources.get(name) not in fixed}


@contextlib.contextmanager
def open_model(reference: str, options: LoadOptions) -> Iterator[LoadedModel]:
    """Load the model of a folder, a Hub id or an adapter folder; the files stay open inside the ``with`` block."""
    if options["dtype"] not in ("auto", *WIDE):
        raise InputError(
            f"--dtype {options['dtype']}: use float32 or float64. The weights are rounded to the dtypes of the model's "
            "files when they are written"
        )
    folder = folder_of(reference)
    stem = "adapter_model" if is_adapter(folder) else "model"
    if stem == "adapter_model":
        read_adapter_config(folder)
    files = open_files(folder, stem)
    if not files:
        raise InputError(f"{reference}: no {stem}.safetensors, and no {stem}.safetensors.index.json, in {folder}")
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
        config = folder / "config.json"
        stored = Checkpoint(reference, files=files, folder=folder, config=read_json(config) if config.is_file() else {})
        if found := detect_quantization(stored):
            raise InputError(
                f"{reference}: {found}. Quantized weights cannot take small steps. Use the original model."
            )
        wide = "float64" if any(info.dtype == "F64" for info in stored.tensors.values()) else "float32"
        dtype = wide if options["dtype"] == "auto" else options["dtype"]
        model, info = load_model(
            reference,
            options["task"],
            device=options["device"],
            dtype=dtype,
            model_args=options["model_args"],
            merge_adapter=stem != "adapter_model",
        )
        stored.config = getattr(getattr(model, "config", None), "to_dict", dict)()
        adapter = stem == "adapter_model"
        sources = {file: own for own, file in adapter_names(model).items()} if adapter else stored_sources(model)
        loaded = LoadedModel(reference, model, info, options | {"dtype": dtype}, stored, sources, list(info.notes))
        lacking = [name for name in _values_in(loaded, meta=True) if name not in stored.tensors]
        if lacking:
            raise InputError(
                f"{reference}: these tensors have other names in its files than save_pretrained gives them:\n"
                f"{listed(lacking)}\n  Load the model and save it with save_pretrained first."
            )
        yield loaded


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
    tensors = {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()}
    for module in checkpoint.modules:
        (staging.folder / module).mkdir(exist_ok=True)
    folders = stems(checkpoint) if stem == "model" else {"": stem}
    writer = ShardWriter(staging.folder, stem, tensors, SHARD_SIZE, {"format": "pt"}, folders)
    staging.require_space(writer.nbytes)
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


def notes_of_folder(loaded: LoadedModel) -> list[str]:
    """Notes on files of the model's folder that are not copied."""
    return sidecars(loaded.stored).note(loaded.reference)


def _values_in(loaded: LoadedModel, meta: bool = False) -> dict[str, Tensor]:
    """The model's parameters, or the adapter's, by their names in the files; ``meta``: on the meta device."""
    if loaded.adapter:
        from peft import get_peft_model_state_dict

        found: dict[str, Tensor] = get_peft_model_state_dict(loaded.model, save_embedding_layers=False)
        return {name: value.detach() for name, value in found.items()}
    if meta:
        return {name: torch.empty(shape, device="meta") for name, shape in stored_shapes(loaded.model).items()}
    return stored_tensors(loaded.model, {name: p.detach() for name, p in loaded.model.named_parameters()})


def copy_adapter_config(home: Path, folder: Path) -> None:
    """Copy the adapter's config; a relative path of its base model is relative to the new folder."""
    config = read_adapter_config(home)
    stated = config.get("base_model_name_or_path")
    if isinstance(stated, str) and not Path(stated).exists() and (home / stated).is_dir():
        config["base_model_name_or_path"] = os.path.relpath(home / stated, folder)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
