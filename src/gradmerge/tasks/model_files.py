"""Find the files of a model, and check them before transformers or peft open them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..arguments import check_known
from ..checkpoints.lora import is_adapter, read_adapter_config
from ..checkpoints.open import HUB_ID, fetch_from_hub
from ..errors import InputError, library_errors
from ..io.reader import TensorFile, close_files, local_path, open_files
from ..io.small_files import MAX_TOKENIZER, read_json, readable_json, refuse_hub_code, require_within
from ..quiet import quiet_transformers
from ..text import size
from ..urls import remote_url
from .embedding import SentenceConfig, read_sentence_config

TASKS = ("classify", "causal-lm", "seq2seq", "image", "embedding")
#: Ends of the names of the files that transformers and peft read, apart from weights.
_SMALL_FILES = (
    *("config.json", "tokens.json", "tokens_map.json", "tokenizer.json", "tekken.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "chat_template.json", ".jinja", ".model", ".tiktoken", ".spm", ".codes"),
)
#: Task → the class in transformers, and the table of its architectures.
_AUTO_CLASSES = {
    "classify": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
_ADAPTER_TASKS = {"SEQ_CLS": "classify", "CAUSAL_LM": "causal-lm", "SEQ_2_SEQ_LM": "seq2seq"}
#: Names of the layers with one row per class, in the files of an adapter.
_HEAD_WEIGHTS = [
    f"base_model.model.{head}{suffix}.weight"
    for head in ("score", "classifier", "classifier.out_proj")
    for suffix in ("", ".modules_to_save.default")
]


@dataclass
class LoadingInfo:
    """The files of a model, and facts about how it was loaded."""

    reference: str
    """The model as the user names it."""
    folder: Path
    """The local folder of the model."""
    base_folder: Path
    """The folder of the weights: the same, that of an adapter's base, or that of a sentence-transformers module."""
    task: str
    config: Any
    """The config of transformers."""
    adapter: dict[str, Any] | None = None
    """The config of a PEFT adapter."""
    sentence_config: SentenceConfig | None = None
    """The modules of a sentence-transformers folder."""
    missing: dict[str, str] = field(default_factory=dict)
    """Parameters of the model that are not in the checkpoint, or have another shape there → what to tell the user."""
    notes: list[str] = field(default_factory=list)


def locate(reference: str, task: str = "auto") -> LoadingInfo:
    """Find a model, check the files that are read besides weights, and read its config."""
    folder = folder_of(reference)
    check_small_files(folder)
    adapter = read_adapter_config(folder) if is_adapter(folder) else None
    sentence_config = None
    base_folder = folder
    if task == "embedding" or (task == "auto" and adapter is None and (folder / "modules.json").is_file()):
        if adapter is not None:
            raise InputError(f"{reference}: task embedding takes no adapter. Merge it into its base with PEFT first")
        task, sentence_config = "embedding", read_sentence_config(reference, folder)
        base_folder = sentence_config.transformer
    elif adapter is not None:
        base_folder = base_folder_of(reference, folder, adapter)
    check_small_files(base_folder)
    config = _read_config(reference, folder, base_folder, adapter)
    task = _task_of(reference, config, task, adapter)
    return LoadingInfo(reference, folder, base_folder, task, config, adapter, sentence_config)


def folder_of(reference: str) -> Path:
    """Return the folder of a model. Downloads a model of the Hub or at a URL."""
    if (url := remote_url(reference)) is not None:
        from ..io.remote import download_url

        path = download_url(url)
    else:
        path = local_path(reference, None)
    if path.is_dir():
        return path
    if path.is_file():
        raise InputError(f"{reference}: a file is not enough to run a model. Give the folder with its config.json")
    if HUB_ID.fullmatch(reference) and not reference.startswith("."):
        return fetch_from_hub(reference, allow_pickle=False)
    raise InputError(f"{reference}: no such folder ({path.absolute()})")


def base_folder_of(reference: str, folder: Path, adapter_config: dict[str, Any]) -> Path:
    """Return the folder of the adapter's base model. Its path is relative to the working directory or the adapter."""
    base = adapter_config.get("base_model_name_or_path")
    if not base:
        raise InputError(f"{reference}: the adapter's config names no base model")
    beside_adapter = local_path(base, folder)
    try:
        use_beside = beside_adapter.is_dir() and not local_path(base, None).is_dir()
        base_folder = beside_adapter if use_beside else folder_of(base)
    except InputError as error:
        raise InputError(f"{reference}: the adapter's base cannot be opened. {error}") from error
    if is_adapter(base_folder):
        raise InputError(f"{reference}: the adapter's base is another adapter, {base}. Merge that one first.")
    return base_folder


def check_small_files(folder: Path) -> None:
    """Raise if a config or tokenizer file is a pipe or device, too large, or a link to outside the folder."""
    try:
        folders = [path for path in (folder, folder / "additional_chat_templates") if path.is_dir()]
        files = [path for parent in folders for path in sorted(parent.iterdir()) if path.name.endswith(_SMALL_FILES)]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from error
    for path in files:
        require_within(path, folder)
        if not os.access(path, os.F_OK) or path.is_dir():  # transformers ignores both
            continue
        if not path.is_file():
            raise InputError(f"{path}: is not a file but a pipe or a device")
        if path.stat().st_size > MAX_TOKENIZER:
            raise InputError(f"{path}: larger than {size(MAX_TOKENIZER)}, the limit for such a file")
    settings = folder / "tokenizer_config.json"
    names = (readable_json(settings) or {}).get("fast_tokenizer_files") or []
    if not isinstance(names, list) or any(Path(str(name)).name != name for name in names):
        raise InputError(f"{settings}: fast_tokenizer_files must be names of files in the folder")


def check_weights(info: LoadingInfo) -> None:
    """Raise unless all weights are safetensors files in their folder whose headers and index are valid.

    transformers and peft open pickles silently if an index names one, or if the folder has nothing else.
    """
    stems = [(info.base_folder, "model"), (info.folder, "adapter_model")]
    for folder, stem in stems if info.adapter is not None else stems[:1]:
        single = folder / f"{stem}.safetensors"
        # peft does not read shards: it ignores their index and looks for a pickle.
        files = open_files(folder, stem) if stem == "model" or single.is_file() else None
        if files is None:
            raise InputError(
                f"{info.reference}: there is no {stem}.safetensors in {folder}. Save the model as safetensors."
            )
        close_files(files)
        if single.is_file():  # transformers and peft prefer this file to an index
            require_within(single, folder)
            TensorFile(single).close()


def class_name(info: LoadingInfo) -> str:
    """Return the name of the class in transformers for the model's task."""
    if info.task != "embedding":
        return _AUTO_CLASSES[info.task][0]
    return "AutoModelForTextEncoding" if getattr(info.config, "is_encoder_decoder", False) else "AutoModel"


def architectures(config: Any) -> list[str]:
    names = getattr(config, "architectures", None)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list | tuple) else []


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Keep huggingface_hub off the network. All files of a model are local by now, whatever its config names."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _read_config(reference: str, folder: Path, base_folder: Path, adapter: dict[str, Any] | None) -> Any:
    """Read the model's config. An adapter without one has its base's, with the classes of the adapter's head."""
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        path = base_folder / "config.json"
    if not path.is_file():
        raise InputError(f"{reference}: there is no config.json in {base_folder}. Save the model with transformers.")
    refuse_hub_code(read_json(path), path)
    with library_errors(f"{reference}: {path} cannot be used"), quiet_transformers(), offline():
        config = AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    if adapter is not None and path.parent != folder and (classes := _num_classes(folder)) is not None:
        config.num_labels = classes
    return config


def _num_classes(folder: Path) -> int | None:
    """Return the number of classes of an adapter that stores a classification head."""
    files = open_files(folder, "adapter_model") or []
    shapes = [file.entries[name].shape for file in files for name in _HEAD_WEIGHTS if name in file.entries]
    close_files(files)
    return shapes[0][0] if shapes else None


def _task_of(reference: str, config: Any, task: str, adapter: dict[str, Any] | None) -> str:
    """Return the task that the user asks for. "auto" is the task of the config's architecture."""
    if task != "auto":
        check_known(f"task={task}", task, TASKS)
        return task
    if adapter is not None and adapter.get("task_type") in _ADAPTER_TASKS:
        return _ADAPTER_TASKS[adapter["task_type"]]
    from transformers.models.auto import modeling_auto

    names = architectures(config)
    for known, (_, table) in _AUTO_CLASSES.items():
        for value in getattr(modeling_auto, table).values():
            if not set(names).isdisjoint([value] if isinstance(value, str) else value):
                return known
    raise InputError(
        f"{reference}: no task has the architecture {', '.join(names) or 'none'}. Give a task, one of "
        f"{', '.join(TASKS)}"
    )
