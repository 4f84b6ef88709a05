"""Load a model from disk to change its weights, and write the result as a new folder.

In memory the weights are float32, or float64 if the files are, so that small steps add up. The result has the same
files as the model, with the same tensors in the same dtypes at the same offsets. Parameters that did not change keep
their bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from ..checkpoints.checkpoint import TORCH_TYPES, Checkpoint
from ..checkpoints.compat.tied_weights import same_values, tied_to
from ..checkpoints.quantization import detect_quantization
from ..checkpoints.sidecars import copy_sidecars, sidecars
from ..curvature.checkpoint_names import adapter_names, stored_shapes, stored_sources, stored_tensors
from ..engine.run.rounding import rounded
from ..errors import InputError, MachineError
from ..io.atomic_dir import AtomicDir
from ..io.reader import TensorFile, bytes_of, open_files
from ..io.small_files import lies_within, read_json
from ..tasks import LoadedTask, LoadingInfo, LoadOptions, load_model, with_data
from ..tasks.resolve_model import folder_of
from ..text import listed

#: Dtypes of the weights in memory.
WIDE = ("float32", "float64")


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

    def facts(self) -> dict[str, Any]:
        """The model's entry in the record of the result."""
        files = [{"name": path.name, "bytes": path.stat().st_size} for path in self.stored.files()]
        return {"source": self.reference, "files": files}


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
            adapter_apart=stem == "adapter_model",
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
    loaded: LoadedModel,
    changed: Collection[str],
    *,
    action: str,
    facts: Mapping[str, Any],
    card: str,
    measured: Sequence[Mapping[str, Any]],
    seconds: float,
    notes: Sequence[str] = (),
) -> None:
    """Write a model folder: weights, configuration and tokenizer files, the record and the model card.

    Args:
        staging: The temporary folder.
        loaded: The model, with its new weights.
        changed: Names of the parameters that changed; all others are copied.
        action: The key of ``facts`` in the record, and a tag of the card.
        facts: What was done.
        card: The text of the model card, in Markdown, without its title.
        measured: Evaluations of the result, for the card and the record.
        seconds: How long it took.
        notes: What a user should know.
    """
    sizes = _write_weights(staging.folder, loaded, changed)
    metadata, name = read_metadata(loaded.stored), staging.out.name
    base, base_folder = (_adapter_base(loaded), loaded.info.base_folder) if loaded.adapter else (None, None)
    write_card(
        staging.folder,
        name,
        card.rstrip(),
        [metadata],
        relation="finetune",
        tags=[action],
        base=base,
        base_folder=base_folder,
    )
    if measured:
        path = staging.folder / CARD
        path.write_text(with_evaluations(path.read_text("utf-8"), name, measured), "utf-8")
    write_record(
        staging.folder,
        {action: dict(facts), **({"evaluations": list(measured)} if measured else {})},
        inputs=[{"role": "start", **loaded.facts()}],
        sizes=sizes,
        timings={"total": seconds},
        notes=notes,
    )


def _adapter_base(loaded: LoadedModel) -> ModelMetadata:
    """The base model that an adapter's config names."""
    name = str(read_adapter_config(loaded.info.folder).get("base_model_name_or_path") or "")
    return ModelMetadata(name_of(name), ids=(name,) if may_be_hub_id(name, loaded.info.folder) else ())


def _write_weights(folder: Path, loaded: LoadedModel, changed: Collection[str]) -> dict[str, int]:
    """Write the model's files with the changed parameters, and copy its other files; return the size of each."""
    values = _values_in(loaded) if changed else {}
    values = {n: value for n, value in values.items() if n not in loaded.sources or loaded.sources[n] in set(changed)}
    for name in loaded.stored.tensors:
        source = tied_to(name, loaded.stored) if name not in values else None
        if source in values and same_values(loaded.stored, name, source):  # tied weights that are stored twice
            values[name] = values[source]
    sizes = {}
    home = loaded.info.folder
    try:
        for path in loaded.stored.files():
            shutil.copyfile(path, folder / path.name)
            sizes[path.name] = path.stat().st_size
            _overwrite(folder / path.name, values, loaded.reference)
        for path in home.glob("*model.safetensors.index.json"):
            if lies_within(path, home):
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise MachineError(f"{folder}: writing failed: {error.strerror}") from error
    copy_sidecars(loaded.stored, folder, "auto")
    if loaded.adapter:
        copy_adapter_config(home, folder)
    return sizes


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


def _overwrite(path: Path, values: Mapping[str, Tensor], reference: str) -> None:
    """Overwrite tensors of a safetensors file, rounded to their dtypes there."""
    file = TensorFile(path)
    file.close()
    with path.open("r+b") as out:
        for name, entry in file.entries.items():
            if name not in values or not entry.is_float:
                continue
            value = rounded(values[name].cpu(), TORCH_TYPES[entry.dtype]).contiguous()
            if tuple(value.shape) != entry.shape:
                raise InputError(f"{reference}: {name} is {entry} in its files, and {list(value.shape)} in the model")
            if not bool(value.isfinite().all()):
                raise InputError(f"{reference}: {name} has values that are too large for {entry}. Nothing was written")
            out.seek(entry.start)
            out.write(bytes_of(value.reshape(-1)))


def copy_adapter_config(home: Path, folder: Path) -> None:
    """Copy the adapter's config; a relative path of its base model is relative to the new folder."""
    config = read_adapter_config(home)
    stated = config.get("base_model_name_or_path")
    if isinstance(stated, str) and not Path(stated).exists() and (home / stated).is_dir():
        config["base_model_name_or_path"] = os.path.relpath(home / stated, folder)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
