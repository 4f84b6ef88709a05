"""Open a checkpoint from what the user wrote: a folder, a file, a Hub id, a URL or an adapter."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ..arguments import checked
from ..errors import GradmergeError, InputError
from ..io.reader import PositionalFile, TensorFile, is_plain_name, local_path, open_files, read_index
from ..io.small_files import MAX_CONFIG, read_bounded, read_json, require_within
from ..text import first_line, listed
from ..urls import as_url, redact
from .checkpoint import Checkpoint
from .lora import AdapterCheckpoint, is_adapter, read_adapter_config
from .pickle import SUFFIXES, PickleFile
from .quantization import DequantizedCheckpoint, detect_quantization

#: What is downloaded from a Hub repository: safetensors weights, curvature, and small files.
HUB_FILES = (
    "model*.safetensors adapter_model*.safetensors */model.safetensors */model-0*.safetensors "
    "curvature/curvature* penalty/curvature* *.json *.txt *.model *.jinja *.tiktoken README.md LICENSE* NOTICE*"
)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


@checked()
def open_checkpoint(
    reference: str | Path,
    *,
    relative_to: Path | None = None,
    adapter_base: Checkpoint | None = None,
    allow_pickle: bool = False,
    dequantize: bool = False,
) -> Checkpoint:
    """Open a model folder, a `.safetensors` file, a Hub id (`org/name@revision`) or a PEFT LoRA adapter folder.

    Folders and files can be fsspec URLs (`s3://…`, `gs://…`, `hf://…`). For URLs and Hub ids, headers and small files
    are downloaded now, and ranges of the weights when they are read.

    Args:
        reference: What to open, as in a recipe.
        relative_to: The folder that relative paths start from.
        adapter_base: The model that an adapter is applied to. The default is the base that the adapter's config names.
        allow_pickle: Also read .bin and .pt files (tensors only).
        dequantize: Read the codes of fp8 and bitsandbytes as the numbers that they represent.

    Returns:
        A :class:`Checkpoint`, whose tensors are read on demand. Close it, or use it in a ``with`` statement.

    >>> with open_checkpoint("./yelp") as model:  # doctest: +SKIP
    ...     print(model.parameters, list(model.tensors))
    """
    reference = as_url(reference) or str(reference)
    label = redact(reference)
    path, hub_id = _resolve(reference, relative_to, allow_pickle)
    with ExitStack() as opened:
        if path.is_dir() and is_adapter(path):
            base = adapter_base
            while isinstance(base, AdapterCheckpoint):  # adapters name models, not other adapters, as their base
                base = base.base
            if base is None:
                base = opened.enter_context(_open_named_base(path, allow_pickle, dequantize))
            checkpoint: Checkpoint = _open_adapter(label, path, base, adapter_base is None, allow_pickle, hub_id)
        else:
            if path.is_dir():
                stored = _open_folder(label, path, allow_pickle, hub_id)
            else:
                stored = Checkpoint(label, files=[_open_file(path, allow_pickle)])
            opened.enter_context(stored)
            checkpoint = DequantizedCheckpoint(stored) if dequantize and detect_quantization(stored) else stored
        opened.pop_all()
    return checkpoint


def apply_adapter(
    reference: str, model: Checkpoint, *, relative_to: Path | None = None, allow_pickle: bool = False
) -> AdapterCheckpoint:
    """Apply a PEFT LoRA adapter to a model, whatever base its config names. Closing it also closes the model."""
    folder, hub_id = _resolve(reference, relative_to, allow_pickle)
    if not folder.is_dir() or not is_adapter(folder):
        raise InputError(f"{reference}: not a PEFT adapter: no folder with an adapter_config.json ({folder})")
    adapter = _open_adapter(f"{model.label}+{redact(reference)}", folder, model, True, allow_pickle, hub_id)
    adapter.notes += model.notes
    return adapter


def _resolve(reference: str, relative_to: Path | None, allow_pickle: bool) -> tuple[Path, str | None]:
    """Return the local folder or file of a reference, and its Hub id. A local path takes precedence over the Hub."""
    path = local_path(reference, relative_to)
    if path.exists():
        hub_id = unquote(reference.removeprefix("hf://"))
        return path, hub_id if reference.startswith("hf://") and HUB_ID.fullmatch(hub_id) else None
    if HUB_ID.fullmatch(reference) and not reference.startswith("."):
        return _hub_folder(reference, allow_pickle), reference
    raise InputError(f"{reference}: no such folder or file ({path.absolute()})")


# The Hub


def _hub_folder(reference: str, allow_pickle: bool) -> Path:
    """Return the cached snapshot of a Hub model if it has all weights, otherwise a stand-in that is read by ranges."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return fetch_from_hub(reference, allow_pickle=allow_pickle, cached=True)
    with suppress(InputError), ExitStack() as opened:
        cached = fetch_from_hub(reference, allow_pickle=allow_pickle, cached=True)
        # For a model with parts in subfolders, the snapshot does not tell whether all are there.
        if not (cached / "modules.json").is_file():
            _weight_files(cached, "adapter_model" if is_adapter(cached) else "model", allow_pickle, opened)
            return cached
    repo, _, revision = reference.partition("@")
    try:
        return local_path(f"hf://{repo}" + (f"@{quote(revision, safe='')}" if revision else ""), None)
    except GradmergeError as error:
        raise _not_on_hub(reference, error) from error


def fetch_from_hub(reference: str, *, allow_pickle: bool = False, cached: bool = False) -> Path:
    """Return the local folder of a Hub model, downloaded into the Hugging Face cache unless ``cached`` forbids it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repo, _, revision = reference.partition("@")
    allowed = HUB_FILES.split() + (["*.bin", "*.bin.index.json"] if allow_pickle else [])
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=allowed, local_files_only=cached))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise _not_on_hub(reference, error) from error


def _not_on_hub(reference: str, error: Exception) -> InputError:
    return InputError(f"{reference}: no such local folder, and the Hub did not return this model: {first_line(error)}")


# Files and folders


def _open_file(path: Path, allow_pickle: bool) -> PositionalFile:
    if path.suffix == ".safetensors":
        return TensorFile(path)
    if path.suffix not in SUFFIXES:
        suffixes = ", ".join(sorted(SUFFIXES))
        raise InputError(f"{path}: a checkpoint file ends in .safetensors (or, with allow_pickle, {suffixes})")
    if not allow_pickle:
        raise InputError(
            f"{path}: this is a pickle, a format that can run code when it is opened. Pass "
            "allow_pickle=True to read it (tensors only), or convert it to safetensors."
        )
    return PickleFile(path)


def _open_folder(label: str, folder: Path, allow_pickle: bool, hub_id: str | None) -> Checkpoint:
    modules = [name for name in dict(modules_of(folder)) if (folder / name).is_dir()] or [""]
    config = _config(folder)
    files: list[PositionalFile] = []
    with ExitStack() as opened:
        for module in modules:
            if module:
                config[f"{module}_config"] = _config(folder / module)
                if not any(path.suffix in SUFFIXES | {".safetensors"} for path in (folder / module).iterdir()):
                    continue  # modules such as pooling have no weights
            for file in _weight_files(folder / module, "model", allow_pickle, opened):
                if module:
                    file.entries = {f"{module}/{name}": entry for name, entry in file.entries.items()}
                    file.memory = {f"{module}/{name}": tensor for name, tensor in file.memory.items()}
                files.append(file)
        if not files:
            raise InputError(_no_weights(folder, "model"))
        inner = tuple(filter(None, modules))
        checkpoint = Checkpoint(label, files=files, folder=folder, config=config, hub_id=hub_id, modules=inner)
        opened.pop_all()
    return checkpoint


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    require_within(path, folder)
    return read_json(path)


def modules_of(folder: Path) -> list[tuple[str, str]]:
    """Return (subfolder, class) of every module of a sentence-transformers model; empty for other models."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    require_within(path, folder)
    try:
        modules = [(str(entry["path"]), str(entry["type"])) for entry in json.loads(read_bounded(path, MAX_CONFIG))]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{path}: not a list of sentence-transformers modules. Save the model again.") from error
    for name, kind in modules:
        # Normalize modules have no files, and Git repositories store no empty folders.
        if name and not (is_plain_name(name) and (kind.endswith(".Normalize") or (folder / name).is_dir())):
            raise InputError(f"{path}: names the module {name[:80]!r}, which is not a folder in {folder}")
        require_within(folder / name / "config.json", folder)
    return modules


def _weight_files(folder: Path, stem: str, allow_pickle: bool, opened: ExitStack) -> list[PositionalFile]:
    """Open the weight files of a folder. ``opened`` closes them if something fails later."""
    if stored := open_files(folder, stem):
        for file in stored:
            opened.callback(file.close)
        return [*stored]
    single = folder / ("pytorch_model.bin" if stem == "model" else f"{stem}.bin")
    index = single.with_name(f"{single.name}.index.json")
    paths = [folder / name for name in read_index(index)] if index.is_file() else [single]
    if not paths[0].is_file():
        raise InputError(_no_weights(folder, stem))
    files: list[PositionalFile] = []
    for path in paths:
        require_within(path, folder)
        files.append(_open_file(path, allow_pickle))
        opened.callback(files[-1].close)
    return files


def _no_weights(folder: Path, stem: str) -> str:
    message = f"{folder}: no {stem}.safetensors and no {stem}.safetensors.index.json in this folder"
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    return f"{message}. To merge one of these files, give its path:\n{listed(others)}" if others else message


# Adapters


def _open_adapter(
    label: str, folder: Path, base: Checkpoint, owns_base: bool, allow_pickle: bool, hub_id: str | None
) -> AdapterCheckpoint:
    """Open an adapter on a base, with a note if its config names another one."""
    config = read_adapter_config(folder)
    with ExitStack() as opened:
        files = _weight_files(folder, "adapter_model", allow_pickle, opened)
        adapter = AdapterCheckpoint(label, folder, config, files, base, owns_base, hub_id)
        opened.pop_all()
    trained_on = config.get("base_model_name_or_path")
    base_names = (
        base.label.partition("@")[0],
        base.config.get("_name_or_path", ""),
        (base.folder or Path()).absolute(),
    )
    if trained_on is not None and Path(trained_on).name not in [Path(str(name)).name for name in base_names]:
        adapter.notes.append(
            f"{label}: the adapter's config says it was trained on {trained_on!r}; applied to {base.label}"
        )
    return adapter


def _open_named_base(folder: Path, allow_pickle: bool, dequantize: bool) -> Checkpoint:
    """Open the base that an adapter's config names: a path (also relative to the adapter) or a Hub id."""
    name = read_adapter_config(folder).get("base_model_name_or_path")
    if not name or as_url(name):
        what = f"names a URL as its base ({name}), which is not opened" if name else "does not name its base"
        raise InputError(f"{folder}: the adapter's config {what}. Give the base model in the recipe.")
    start = folder if local_path(name, folder).exists() else None
    if is_adapter(local_path(name, start)):
        raise InputError(
            f"{folder}: the adapter's base is another adapter, {name}. Merge that adapter into its base first."
        )
    return open_checkpoint(name, relative_to=start, allow_pickle=allow_pickle, dequantize=dequantize)
