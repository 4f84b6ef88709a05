"""Find the folder of a model, and check its files before transformers or peft open them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ..checkpoints.open import HUB_ID, fetch_from_hub
from ..errors import InputError
from ..io.reader import TensorFile, close_files, local_path, open_files
from ..io.small_files import MAX_CONFIG, MAX_TOKENIZER, read_bounded, require_within
from ..text import size
from ..urls import remote_url

#: Ends of the names of the files that transformers and peft read, apart from weights.
_SMALL_FILES = (
    *("config.json", "tokens.json", "tokens_map.json", "tokenizer.json", "tekken.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "chat_template.json", ".jinja", ".model", ".tiktoken", ".spm", ".codes"),
)


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
        limit = MAX_CONFIG if path.name.endswith("config.json") else MAX_TOKENIZER
        if path.stat().st_size > limit:
            raise InputError(f"{path}: larger than {size(limit)}, the limit for such a file")
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        try:
            names = json.loads(read_bounded(settings, MAX_CONFIG)).get("fast_tokenizer_files") or []
        except (ValueError, AttributeError, RecursionError):
            return  # loading the tokenizer raises the error
        if not isinstance(names, list) or any(not isinstance(n, str) or "/" in n or "\\" in n for n in names):
            raise InputError(f"{settings}: fast_tokenizer_files must be names of files in the folder")


def check_weights(reference: str, folder: Path, stem: str) -> None:
    """Raise unless the weights are safetensors files in the folder whose headers and index are valid.

    transformers and peft open pickles silently if an index names one, or if the folder has nothing else.
    """
    single = folder / f"{stem}.safetensors"
    # peft does not read shards: it ignores their index and looks for a pickle.
    files = open_files(folder, stem) if stem == "model" or single.is_file() else None
    if files is None:
        raise InputError(f"{reference}: there is no {stem}.safetensors in {folder}. Save the model as safetensors.")
    close_files(files)
    if single.is_file():  # transformers and peft prefer this file to an index
        require_within(single, folder)
        TensorFile(single).close()
