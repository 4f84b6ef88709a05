"""From what a user writes to an open checkpoint: a folder, a file, a Hub id, or an adapter."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ..arguments import checked
from ..errors import GradmergeError, InputError
from ..io.reader import PositionalFile, TensorFile, is_plain_name, local_path, open_files, read_index
from ..io.small_files import MAX_CONFIG, read_bounded, read_json, require_within
from ..text import listed
from ..urls import as_url
from .adapter_config import is_adapter, read_adapter_config
from .checkpoint import Checkpoint
from .dequantize import dequantised
from .lora import AdapterCheckpoint
from .pickle import SUFFIXES, PickleFile

#: What of a Hub repository is fetched: weights that can be merged, and the small files that go with them.
HUB_FILES = (
    "model*.safetensors adapter_model*.safetensors */model.safetensors */model-0*.safetensors "
    "*diffusion_pytorch_model.safetensors *diffusion_pytorch_model-0*.safetensors "
    "curvature/curvature* penalty/curvature* *.json *.txt *.model *.jinja *.tiktoken README.md LICENSE* NOTICE*"
)
#: The list of a diffusers pipeline's parts.
PIPELINE = "model_index.json"
DIFFUSERS = "diffusion_pytorch_model"
OF_GGUF = (
    "GGUF holds quantised weights under names of its own, and cannot be merged. Take the safetensors checkpoint that "
    "it was made from, or load it with transformers (from_pretrained with gguf_file) and save it with save_pretrained."
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

    Folders and files may be URLs of fsspec (`s3://…`, `gs://…`, `hf://…`). Of these, and of Hub ids, headers and small
    files are fetched at once, and ranges of the weights when they are read.

    Args:
        reference: What to open, as a recipe names it.
        relative_to: The folder that relative paths start from.
        adapter_base: What an adapter goes on top of, if not the base that its own config names.
        allow_pickle: Also read .bin and .pt files, of which only the tensors are taken.
        dequantize: Read codes of fp8 and bitsandbytes as the numbers that they stand for.

    Returns:
        A :class:`Checkpoint`: tensors by name, read when they are asked for. Close it, or use it with ``with``.

    >>> with open_checkpoint("./yelp") as model:  # doctest: +SKIP
    ...     print(model.parameters, list(model.tensors))
    """
    reference = as_url(reference) or str(reference)
    path = local_path(reference, relative_to)
    if path.is_dir():
        hub_id = _hub_id_of(reference)
        return _open_folder(reference, path, adapter_base, allow_pickle, dequantize, hub_id)
    if path.is_file():
        return _plain(_open_file(reference, path, allow_pickle), dequantize)
    if HUB_ID.fullmatch(reference) and not reference.startswith("."):
        folder = hub_folder(reference, allow_pickle)
        return _open_folder(reference, folder, adapter_base, allow_pickle, dequantize, hub_id=reference)
    raise InputError(f"{reference}: no such folder or file ({path.absolute()})")


def put_adapter(
    reference: str, model: Checkpoint, *, relative_to: Path | None = None, allow_pickle: bool = False
) -> AdapterCheckpoint:
    """A PEFT LoRA adapter on top of a model, whatever base its config names. Closing it closes the model as well."""
    folder = local_path(reference, relative_to)
    hub_id = None
    if not folder.exists() and HUB_ID.fullmatch(reference) and not reference.startswith("."):
        folder, hub_id = hub_folder(reference, allow_pickle), reference
    hub_id = hub_id or _hub_id_of(reference)
    if not folder.is_dir() or not is_adapter(folder):
        raise InputError(f"{reference}: no PEFT adapter: there is no folder with an adapter_config.json ({folder})")
    config = read_adapter_config(folder)
    with ExitStack() as opened:
        files = _weight_files(folder, "adapter_model", allow_pickle, opened)
        label = f"{model.label}+{reference}"
        adapter = AdapterCheckpoint(label, folder, config, files, model, owns_base=True, hub_id=hub_id)
        opened.pop_all()
    adapter.notes += [*model.notes, *_note_on_base(adapter, config.get("base_model_name_or_path"))]
    return adapter


def _note_on_base(adapter: AdapterCheckpoint, stated: str | None) -> list[str]:
    """Says so when an adapter goes on another model than its config names."""
    base = adapter.base
    if stated is None or Path(stated).name in _names_of(base):
        return []
    return [f"{adapter.label}: the adapter says that it was trained on {stated!r}; it is applied to {base.label}"]


def hub_folder(reference: str, allow_pickle: bool) -> Path:
    """The folder of a Hub model: its snapshot if the cache has all its weights, else a stand-in, read by ranges."""
    from huggingface_hub import constants

    with suppress(InputError):
        cached = fetch_from_hub(reference, allow_pickle=allow_pickle, cached=True)
        # Of parts in folders of their own it cannot be told here whether all are there.
        if constants.HF_HUB_OFFLINE or not any((cached / name).is_file() for name in (PIPELINE, "modules.json")):
            with ExitStack() as opened:
                _weight_files(cached, "adapter_model" if is_adapter(cached) else stem_of(cached), allow_pickle, opened)
            return cached
    if constants.HF_HUB_OFFLINE:
        return fetch_from_hub(reference, allow_pickle=allow_pickle)  # which says that it may not
    repo, _, revision = reference.partition("@")
    try:
        return local_path(f"hf://{repo}" + (f"@{quote(revision, safe='')}" if revision else ""), None)
    except GradmergeError as error:
        raise InputError(
            f"{reference}: there is no such folder here, and the Hub did not give a model of that name: {error}"
        ) from error


def _hub_id_of(reference: str) -> str | None:
    """The Hub id of a model that is given as hf://org/name@revision."""
    text = unquote(reference.removeprefix("hf://"))
    return text if text != reference and HUB_ID.fullmatch(text) else None


def fetch_from_hub(
    reference: str, *, allow_pickle: bool = False, patterns: Sequence[str] | None = None, cached: bool = False
) -> Path:
    """The local folder of a Hub model, downloaded into the Hugging Face cache unless it is, or must be, ``cached``."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    repo, _, revision = reference.partition("@")
    usual = HUB_FILES.split() + (["*.bin", "*.bin.index.json"] if allow_pickle else [])
    try:
        allowed = list(patterns or usual)
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=allowed, local_files_only=cached))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{reference}: there is no such folder here, and the Hub did not give a model of that name: {reason}"
        ) from error


def _open_file(label: str, path: Path, allow_pickle: bool) -> Checkpoint:
    if path.suffix == ".safetensors":
        return Checkpoint(label, files=[TensorFile(path)])
    if path.suffix in SUFFIXES:
        _require_pickle_allowed(path, allow_pickle)
        return Checkpoint(label, files=[PickleFile(path)])
    if path.suffix == ".gguf":
        raise InputError(f"{path}: {OF_GGUF}")
    raise InputError(
        f"{path}: a checkpoint file ends in .safetensors (or, with --allow-pickle, {', '.join(sorted(SUFFIXES))})"
    )


def _require_pickle_allowed(path: Path, allow_pickle: bool) -> None:
    if not allow_pickle:
        raise InputError(
            f"{path}: this is a pickle, a format that can run code when it is opened. Pass --allow-pickle to read it "
            "(only its tensors are read), or convert it to safetensors."
        )


def _open_folder(
    label: str,
    folder: Path,
    adapter_base: Checkpoint | None,
    allow_pickle: bool,
    dequantize: bool,
    hub_id: str | None = None,
) -> Checkpoint:
    if is_adapter(folder):
        return _open_adapter(label, folder, adapter_base, allow_pickle, dequantize, hub_id)
    modules = _pipeline(folder) or _modules(folder)
    config = _config(folder)
    for module in modules:
        config |= {f"{module}_config": _config(folder / module)} if module else {}
    files = _weights_of_modules(folder, modules or [""], allow_pickle)
    inner = tuple(module for module in modules if module)
    opened = Checkpoint(label, files=files, folder=folder, config=config, hub_id=hub_id, modules=inner)
    return _plain(opened, dequantize)


def _plain(checkpoint: Checkpoint, dequantize: bool) -> Checkpoint:
    try:
        return dequantised(checkpoint) if dequantize else checkpoint
    except BaseException:
        checkpoint.close()
        raise


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    require_within(path, folder)
    return read_json(path)


def _pipeline(folder: Path) -> list[str]:
    """The folders of a diffusers pipeline's parts, such as unet, vae and scheduler; empty for any other model."""
    path = folder / PIPELINE
    if not path.is_file():
        return []
    require_within(path, folder)
    parts = [
        name
        for name, kind in read_json(path).items()
        if not name.startswith("_") and isinstance(kind, list) and len(kind) == 2 and all(kind)
    ]
    for name in parts:
        if not is_plain_name(name) or not (folder / name).is_dir():
            raise InputError(f"{path}: names the part {name[:80]!r}, which is no folder in {folder}")
        require_within(folder / name, folder)
    return parts


def _modules(folder: Path) -> list[str]:
    """The folders of a sentence-transformers model's modules, "" being the model's own; empty for any other model."""
    # Normalisation may have no files, and repositories keep no empty folders.
    places = [
        place for place, kind in modules_of(folder) if not kind.endswith(".Normalize") or (folder / place).is_dir()
    ]
    broken = f"{folder / 'modules.json'}: not a list of modules as sentence-transformers writes it"
    for place in places:
        if place and not (folder / place).is_dir():
            raise InputError(f"{broken}: it names {place[:80]!r}, which is no folder in {folder}")
        if place:
            require_within(folder / place, folder)
    return list(dict.fromkeys(places))


def modules_of(folder: Path) -> list[tuple[str, str]]:
    """(folder, class) of every module of a sentence-transformers model; empty for any other model."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    broken = f"{path}: not a list of modules as sentence-transformers writes it"
    try:
        require_within(path, folder)
        modules = [(entry["path"], str(entry["type"])) for entry in json.loads(read_bounded(path, MAX_CONFIG))]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{broken}. Save the model again.") from error
    for place, _ in modules:
        if not isinstance(place, str) or (place and not is_plain_name(place)):
            raise InputError(f"{broken}: it names {str(place)[:80]!r}, which is no folder in {folder}")
    return modules


def _weights_of_modules(folder: Path, modules: Sequence[str], allow_pickle: bool) -> list[PositionalFile]:
    """The weights of every module, by FOLDER/NAME if it has a folder. Modules such as pooling have none."""
    files: list[PositionalFile] = []
    with ExitStack() as opened:
        for module in modules:
            kinds = SUFFIXES | {".safetensors"}
            if module and not any(path.suffix in kinds for path in (folder / module).iterdir()):
                continue
            for file in _weight_files(folder / module, stem_of(folder / module), allow_pickle, opened):
                if module:
                    file.entries = {f"{module}/{name}": entry for name, entry in file.entries.items()}
                    file.memory = {f"{module}/{name}": tensor for name, tensor in file.memory.items()}
                files.append(file)
        opened.pop_all()
    if not files:
        raise InputError(_no_weights(folder, stem_of(folder)))
    return files


def _open_adapter(
    label: str, folder: Path, base: Checkpoint | None, allow_pickle: bool, dequantize: bool, hub_id: str | None
) -> AdapterCheckpoint:
    config = read_adapter_config(folder)
    stated = config.get("base_model_name_or_path")
    owns_base = base is None
    if base is None:
        base = _open_stated_base(folder, stated, allow_pickle, dequantize)
    elif stated is not None:
        base = _trained_on(stated, base)
    with ExitStack() as opened:
        if owns_base:
            opened.callback(base.close)
        files = _weight_files(folder, "adapter_model", allow_pickle, opened)
        adapter = AdapterCheckpoint(label, folder, config, files, base, owns_base, hub_id)
        opened.pop_all()
    adapter.notes += _note_on_base(adapter, stated) if not owns_base else []
    return adapter


def _trained_on(stated: str, base: Checkpoint) -> Checkpoint:
    """The base; or, if it is itself an adapter, the model below it that the new adapter's config names."""
    candidate = base
    while Path(stated).name not in _names_of(candidate):
        if not isinstance(candidate, AdapterCheckpoint):
            return base
        candidate = candidate.base
    return candidate


def _names_of(checkpoint: Checkpoint) -> set[str]:
    names = [checkpoint.label.partition("@")[0]]
    if not isinstance(checkpoint, AdapterCheckpoint):  # whose config is that of its base
        names.append(str(checkpoint.config.get("_name_or_path", "")))
    return {Path(name).name for name in names} | {checkpoint.folder.absolute().name if checkpoint.folder else ""}


def _open_stated_base(folder: Path, stated: str | None, allow_pickle: bool, dequantize: bool) -> Checkpoint:
    if not stated:
        raise InputError(
            f"{folder}: an adapter without a base: its config names none. Give the base model in the recipe."
        )
    if as_url(stated):
        raise InputError(
            f"{folder}: the adapter's config names a URL as its base, {stated}, which is not followed. Give the base "
            "model in the recipe."
        )
    start = folder if not local_path(stated, None).exists() and local_path(stated, folder).exists() else None
    if is_adapter(local_path(stated, start)):
        named = f"{folder}: the adapter names another adapter as its base, {stated}"
        raise InputError(f"{named}. Merge that one into its base first.")
    try:
        return open_checkpoint(stated, relative_to=start, allow_pickle=allow_pickle, dequantize=dequantize)
    except InputError as error:
        raise InputError(f"{folder}: the adapter's base cannot be opened. {error}") from error


def stem_of(folder: Path) -> str:
    """What the files of a folder's weights are called: diffusers has a name of its own."""
    ends = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
    return DIFFUSERS if any((folder / f"{DIFFUSERS}{end}").is_file() for end in ends) else "model"


def _weight_files(folder: Path, stem: str, allow_pickle: bool, opened: ExitStack) -> list[PositionalFile]:
    """The files of a folder's weights; ``opened`` closes them after an error."""
    files: list[PositionalFile] = [*(open_files(folder, stem) or [])]
    for file in files:
        opened.callback(file.close)
    if files:
        return files
    single = folder / ("pytorch_model.bin" if stem == "model" else f"{stem}.bin")
    index = single.with_name(f"{single.name}.index.json")
    if index.is_file():
        paths = [folder / name for name in read_index(index)]
    elif single.is_file():
        require_within(single, folder)
        paths = [single]
    else:
        raise InputError(_no_weights(folder, stem))
    _require_pickle_allowed(paths[0], allow_pickle)
    for path in paths:
        files.append(PickleFile(path))
        opened.callback(files[-1].close)
    return files


def _no_weights(folder: Path, stem: str) -> str:
    message = f"{folder}: no {stem}.safetensors, and no {stem}.safetensors.index.json, in this folder"
    if any(folder.glob("*.gguf")):
        return f"{message}, but a .gguf. {OF_GGUF}"
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    if others:
        message += f". To merge one of these, give its path:\n{listed(others)}"
    return message
