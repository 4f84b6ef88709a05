"""A model and data for it without the weights: shapes and types, from the config and the headers of the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..checkpoints.adapter_config import is_adapter, read_adapter_config
from ..checkpoints.model import TORCH_TYPES
from ..curvature.needs import BatchNeeds, batch_needs
from ..errors import InputError
from ..quiet import quiet_transformers
from ..storage.tensorfile import Entry, close_files, open_files
from ..text import first_line, nearest
from .adapters import base_of
from .data_sources import read_rows
from .folders import check_small_files, folder_of, offline
from .loading import LoadedTask, Loading, joined
from .models import DTYPES, LoadingInfo, class_name, config_of, task_of
from .sentence_model import EmbeddingModel, read_setup

#: Batches whose rows are tokenized, spread evenly over the data.
SAMPLED = 16


@dataclass
class TaskOutline:
    """What is known of a task before any weight is loaded."""

    loaded: LoadedTask
    """With a model of fake tensors, which have shapes and types alone."""
    files: list[Path]
    """Of its weights."""
    tokens: int
    """Of all rows, padding included, as the sampled batches have it; an image is one."""
    needs: BatchNeeds | None
    """Of the longest of the sampled batches; None if the model does not run without values."""
    longest: int
    """Tokens of that batch, padding included."""
    why: str = ""
    """Why the model does not run without values."""
    adapter: int = 0
    """Parameters of the adapter that the model is, if it is one."""
    bits: int = 0
    """Of the codes that its base is stored as by bitsandbytes; 0 for a base that is not."""


def outline_task(reference: str, source: str, on: str, loading: Loading) -> TaskOutline:
    """As :func:`~gradmerge.tasks.loading.load_task`, but no weight is read, and the kind of device need not be here."""
    options: Loading = {**loading, "device": "cpu"}
    rows = read_rows(source, limit=options["limit"])
    folder = folder_of(reference)
    check_small_files(folder)
    adapter = read_adapter_config(folder) if is_adapter(folder) else None
    task, base, setup = options["task"], folder, None
    if adapter is not None:
        base = base_of(reference, folder, adapter)
    elif task == "embedding" or (task == "auto" and (folder / "modules.json").is_file()):
        setup = read_setup(reference, folder)
        task, base = "embedding", setup.transformer
    check_small_files(base)
    config = config_of(reference, folder, base, adapter)
    task = task_of(reference, config, task, adapter)
    entries, files = _entries(base, "model")
    dtype = _type_of([entry.dtype for entry in entries if entry.is_float], options["dtype"], on)
    from transformers import PreTrainedModel

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with quiet_transformers(), offline():
        model = _made(reference, config, task, dtype, options["attn"])
        if setup is not None:
            model = EmbeddingModel(model, setup, dtype)
        with mode:
            model.to_empty(device="cpu")
            for part in model.modules():
                if isinstance(part, PreTrainedModel):  # emptying has parted what was tied
                    part.tie_weights()
    loaded = joined(reference, model, LoadingInfo(folder, base, task), rows, options)
    found = _looked_at(loaded, mode, files)
    if adapter is not None:
        found.adapter = sum(entry.numel for entry in _entries(folder, "adapter_model")[0])
        found.bits = _bits(config)
    return found


def _bits(config: Any) -> int:
    stated = getattr(config, "quantization_config", None)
    stated = stated if isinstance(stated, dict) else getattr(stated, "__dict__", {})
    return 4 if stated.get("load_in_4bit") or stated.get("_load_in_4bit") else 8 if stated.get("load_in_8bit") else 0


def _entries(folder: Path, stem: str) -> tuple[list[Entry], list[Path]]:
    """What the headers of a folder's files say, and the files."""
    files = open_files(folder, stem) or []
    entries = [entry for file in files for entry in file.entries.values()]
    close_files(files)
    return entries, [file.path for file in files]


def _type_of(stored: list[str], asked: str, on: str) -> torch.dtype:
    """The type that the model would be loaded in: as asked for, or as most of its tensors are stored."""
    if asked not in DTYPES:
        raise InputError(f"--dtype {asked}: not known{nearest(asked, DTYPES)}\n  Known are {', '.join(DTYPES)}.")
    if asked != "auto":
        return cast(torch.dtype, getattr(torch, asked))
    found = TORCH_TYPES[Counter(stored).most_common(1)[0][0]] if stored else torch.float32
    return torch.float32 if found == torch.float16 and on == "cpu" else found


def _made(reference: str, config: Any, task: str, dtype: torch.dtype, attn: str | None) -> nn.Module:
    import transformers

    given: dict[str, Any] = {} if attn is None else {"attn_implementation": attn}
    try:
        kind = getattr(transformers, class_name(task, config))
        with torch.device("meta"):
            model = kind.from_config(config, dtype=dtype, trust_remote_code=False, **given)
    except Exception as error:  # no such model for the task, values that do not fit
        raise InputError(f"{reference}: no model of its config for task {task}: {first_line(error)}") from error
    assert isinstance(model, nn.Module)
    return model.eval()


def _looked_at(loaded: LoadedTask, mode: Any, files: list[Path]) -> TaskOutline:
    """Some batches of the data, and what the longest of them takes."""
    step = max(1, -(-loaded.examples // SAMPLED) // loaded.batch_size) * loaded.batch_size
    longest: dict[str, Tensor] = {}
    positions = rows = 0
    with quiet_transformers():
        for first in range(0, loaded.examples, step):
            batch = loaded.data.batch(range(first, min(first + loaded.batch_size, loaded.examples)))
            positions += positions_in(batch)
            rows += len(batch["labels"])
            longest = max(longest, batch, key=positions_in)
    if not rows:
        raise InputError("there are no examples to estimate curvature on")
    needs, why = None, ""
    try:
        with mode, quiet_transformers():
            fake = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in longest.items()}
            needs = batch_needs(loaded.model, fake, loaded.output)
    except Exception as error:  # a model that looks at values on its way
        why = first_line(error)
    tokens = round(positions / rows * loaded.examples)
    return TaskOutline(loaded, files, tokens, needs, positions_in(longest), why)


def positions_in(batch: Mapping[str, Tensor]) -> int:
    """Tokens of a batch, padding included; where it has none, its examples."""
    if "input_ids" in batch:
        return batch["input_ids"].numel()
    return len(batch["labels"]) if batch else 0
