"""A model from disk that steps are taken with, and the folder that comes of it.

In memory its weights are float32 (float64 where its files are), so that small steps add up. The result has the files of
the start, with the same tensors in the same types at the same places; what no step has changed stays bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..checkpoints.adapter_config import is_adapter, read_adapter_config
from ..checkpoints.model import TORCH_TYPES, Checkpoint
from ..checkpoints.published import CARD, RECORD, Published, may_be_hub_id, name_of, published
from ..checkpoints.quantised import quantisation
from ..checkpoints.sidecars import copy_sidecars, sidecars
from ..checkpoints.ties import same_values, tied_to
from ..curvature.stored_names import adapter_names, stored_shapes, stored_sources, stored_tensors
from ..engine.evaluations import PLACE, with_evaluations
from ..engine.front_matter import front_matter_of
from ..engine.rounding import rounded
from ..engine.usage import pipeline_tag, usage
from ..errors import InputError, MachineError
from ..markdown import as_card, as_text
from ..storage.bytesof import bytes_of
from ..storage.links import lies_within
from ..storage.smallfile import read_json
from ..storage.staging import Staging
from ..storage.tensorfile import TensorFile, open_files
from ..tasks import LoadedTask, LoadingInfo, LoadOptions, load_model, with_data
from ..tasks.folders import folder_of
from ..text import listed, to_json

#: Types that weights are kept in while steps are taken.
WIDE = ("float32", "float64")


@dataclass
class Start:
    """A model on disk, in memory with wide weights; of an adapter, its base with the adapter on top."""

    reference: str
    model: nn.Module
    info: LoadingInfo
    options: LoadOptions
    stored: Checkpoint
    """The files that are to be changed: the adapter's own, where it is one."""
    sources: dict[str, str]
    """Tensor of the files → the parameter that it holds; only those whose entries all come from one."""
    notes: list[str] = field(default_factory=list)

    @property
    def adapter(self) -> bool:
        return is_adapter(self.info.folder)

    def with_data(self, source: str) -> LoadedTask:
        """Rows that fit the model."""
        return with_data(self.reference, self.model, self.info, source, **self.options)

    def round_weights(self) -> None:
        """Round the parameters in memory to the types that they are stored in, as the written model will have them."""
        types = {name: TORCH_TYPES[info.dtype] for name, info in self.stored.tensors.items() if info.is_float}
        usual = Counter(types.values()).most_common(1)[0][0]
        own = {parameter: types[name] for name, parameter in self.sources.items() if name in types}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(rounded(parameter, own.get(name, usual)))

    def facts(self) -> dict[str, Any]:
        """The start as a record names it."""
        files = [{"name": path.name, "bytes": path.stat().st_size} for path in self.stored.files()]
        return {"source": self.reference, "files": files}


@contextlib.contextmanager
def opened_start(reference: str, options: LoadOptions) -> Iterator[Start]:
    """Load the model of a folder, a Hub id or an adapter, to change it and write it again."""
    if options["dtype"] not in ("auto", *WIDE):
        raise InputError(
            f"--dtype {options['dtype']}: weights that are changed in small steps are kept in float32, or float64, and "
            "rounded to the model's own types when they are written"
        )
    folder = folder_of(reference)
    stem = "adapter_model" if is_adapter(folder) else "model"
    if stem == "adapter_model":
        read_adapter_config(folder)
    if (folder / "modules.json").is_file():
        raise InputError(
            f"{reference}: a sentence-transformers folder. Steps by Kronecker curvature need every layer to be used "
            "once per example, which embeddings of two texts do not do: merge its models, or train it further instead."
        )
    files = open_files(folder, stem)
    if not files:
        raise InputError(f"{reference}: no {stem}.safetensors, and no {stem}.safetensors.index.json, in {folder}")
    with contextlib.ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
        config = folder / "config.json"
        stored = Checkpoint(reference, files=files, folder=folder, config=read_json(config) if config.is_file() else {})
        if found := quantisation(stored):
            raise InputError(
                f"{reference}: {found}. Codes cannot take small steps. Begin with the original, unquantised model."
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
        start = Start(reference, model, info, options | {"dtype": dtype}, stored, sources, list(info.notes))
        lacking = [name for name in _values_in(start, meta=True) if name not in stored.tensors]
        if lacking:
            raise InputError(
                f"{reference}: its files name tensors otherwise than its library saves them, so that the result could "
                f"not be written back:\n{listed(lacking)}\n  Load the model and save it with save_pretrained first."
            )
        yield start


def write_folder(
    staging: Staging,
    start: Start,
    changed: Collection[str],
    *,
    what: str,
    facts: Mapping[str, Any],
    card: str,
    measured: Sequence[Mapping[str, Any]],
    seconds: float,
    notes: Sequence[str] = (),
) -> None:
    """Fill the staged folder: weights with these parameters ``changed``, small files, the record and the model card.

    Args:
        staging: Where the folder comes about.
        start: The model, as it is to be written.
        changed: Names of parameters; all others are copied.
        what: The key of the record that ``facts`` go under.
        facts: What was done.
        card: The text of the model card, in Markdown, below its title.
        measured: Evaluations of the result, for the card and the record.
        seconds: How long it took.
        notes: What a user should know.
    """
    sizes = write_weights(staging.folder, start, changed)
    card = _card(staging, start, what, card)
    card = with_evaluations(card, staging.out.name, measured) if measured else card
    (staging.folder / CARD).write_text(card, "utf-8")
    record = {
        "gradmerge": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        what: dict(facts),
        "inputs": [{"role": "start", **start.facts()}],
        **({"evaluations": list(measured)} if measured else {}),
        "output": {"files": list(sizes), "sizes": sizes, "bytes": sum(sizes.values())},
        "versions": {
            "gradmerge": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "timings": {"total": round(seconds, 3)},
        "notes": list(notes),
    }
    (staging.folder / RECORD).write_text(to_json(record) + "\n", "utf-8")


def _card(staging: Staging, start: Start, what: str, text: str) -> str:
    part, home = published(start.stored), start.info.folder
    base, on = None, None
    if start.adapter:
        stated = str(read_adapter_config(home).get("base_model_name_or_path") or "")
        base = [Published(stated, hub_id=stated)] if may_be_hub_id(stated, home) else []
        on = stated if base else name_of(stated), start.stored.config
    front = front_matter_of(
        [part],
        bases=base,
        relation="adapter" if start.adapter else "finetune",
        library="peft" if start.adapter else "transformers",
        tags=["gradmerge", what, *(["lora"] if start.adapter else [])],
        pipeline=part.pipeline_tag or pipeline_tag(start.info.base_folder),
    )
    name = staging.out.name
    return as_card(front, f"# {as_text(name)}\n\n{text.rstrip()}\n{usage(staging.folder, name, on)}\n{PLACE}")


def write_weights(folder: Path, start: Start, changed: Collection[str]) -> dict[str, int]:
    """The start's files, with these parameters changed, and the small files that go with them; bytes of each file."""
    values = _values_in(start) if changed else {}
    moved = set(changed)
    values = {n: value for n, value in values.items() if n not in start.sources or start.sources[n] in moved}
    for name in start.stored.tensors:
        source = tied_to(name, start.stored) if name not in values else None
        if source in values and same_values(start.stored, name, source):  # one parameter, stored twice
            values[name] = values[source]
    sizes = {}
    home = start.info.folder
    try:
        for path in start.stored.files():
            shutil.copyfile(path, folder / path.name)
            sizes[path.name] = path.stat().st_size
            _overwrite(folder / path.name, values, start.reference)
        for path in home.glob("*model.safetensors.index.json"):
            if lies_within(path, home):
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise MachineError(f"{folder}: writing failed: {error.strerror}") from error
    copy_sidecars(start.stored, folder, "auto")
    if start.adapter:
        copy_adapter_config(home, folder)
    return sizes


def notes_of_folder(start: Start) -> list[str]:
    """What of the start's folder stays behind."""
    return sidecars(start.stored).note(start.reference)


def _values_in(start: Start, meta: bool = False) -> dict[str, Tensor]:
    """The model's parameters (of an adapter its own) by the names of files; ``meta``: names and shapes alone."""
    if start.adapter:
        from peft import get_peft_model_state_dict

        found: dict[str, Tensor] = get_peft_model_state_dict(start.model, save_embedding_layers=False)
        return {name: value.detach() for name, value in found.items()}
    if meta:
        return {name: torch.empty(shape, device="meta") for name, shape in stored_shapes(start.model).items()}
    return stored_tensors(start.model, {name: p.detach() for name, p in start.model.named_parameters()})


def _overwrite(path: Path, values: Mapping[str, Tensor], reference: str) -> None:
    """Put values in the place of the tensors of a safetensors file, rounded to the types there."""
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
                raise InputError(f"{reference}: {name} became too large for its type, {entry}; nothing was written")
            out.seek(entry.start)
            out.write(bytes_of(value.reshape(-1)))


def copy_adapter_config(home: Path, folder: Path) -> None:
    """The adapter's config; a base that it names from its own folder is named from the new one."""
    config = read_adapter_config(home)
    stated = config.get("base_model_name_or_path")
    if isinstance(stated, str) and not Path(stated).exists() and (home / stated).is_dir():
        config["base_model_name_or_path"] = os.path.relpath(home / stated, folder)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
