"""Where a model lies on this machine, and what must be true of the folder before transformers or peft may open it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ..checkpoints.open import HUB_ID, fetch_from_hub
from ..errors import InputError
from ..io.reader import TensorFile, close_files, local_path, open_files, require_utf8_path
from ..io.small_files import MAX_CONFIG, MAX_TOKENIZER, read_bounded, require_within
from ..text import size
from ..urls import remote_url

#: What is read of a folder beside weights, by the ends of names.
_ENDS = (
    *("config.json", "tokens.json", "tokens_map.json", "tokenizer.json", "tekken.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "chat_template.json", ".jinja", ".model", ".tiktoken", ".spm", ".codes"),
)


def folder_of(reference: str) -> Path:
    """The folder of a model, as it is or fetched from the Hub or a URL."""
    if (url := remote_url(reference)) is not None:
        from ..io.remote import download_model

        return download_model(url)
    path = local_path(reference, None)
    if path.is_dir():
        return require_utf8_path(path)
    if path.is_file():
        raise InputError(f"{reference}: a file is not enough to run a model; give the folder with its config.json")
    if HUB_ID.fullmatch(reference) and not reference.startswith("."):
        return fetch_from_hub(reference, allow_pickle=False)
    raise InputError(f"{reference}: no such folder ({path.absolute()})")


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Without the Hub: all that a model needs lies in its folder by now, whatever its config may ask for."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def check_small_files(folder: Path) -> None:
    """Refuse configs and tokenizer files that are no files, too large, or links out of the folder."""
    try:
        places = [place for place in (folder, folder / "additional_chat_templates") if place.is_dir()]
        found = [path for place in places for path in sorted(place.iterdir()) if path.name.endswith(_ENDS)]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from error
    for path in found:
        require_within(path, folder)
        if not os.access(path, os.F_OK) or path.is_dir():  # a link to nothing is as good as no file
            continue
        if not path.is_file():
            raise InputError(f"{path}: is no file but a pipe or a device")
        limit = MAX_CONFIG if path.name.endswith("config.json") else MAX_TOKENIZER
        if path.stat().st_size > limit:
            raise InputError(f"{path}: larger than {size(limit)}, the limit for such a file")
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        try:
            named = json.loads(read_bounded(settings, MAX_CONFIG)).get("fast_tokenizer_files") or []
        except (ValueError, AttributeError, RecursionError):
            return  # what is wrong with it is said when the tokenizer is loaded
        if not isinstance(named, list) or any(not isinstance(n, str) or "/" in n or "\\" in n for n in named):
            raise InputError(f"{settings}: fast_tokenizer_files must be names of files in the folder")


def check_weights(reference: str, folder: Path, stem: str) -> None:
    """Refuse weights that are no safetensors, or whose headers or index a merge would refuse.

    transformers and peft open pickles without a word where an index names one, or where there is nothing else.
    """
    single = folder / f"{stem}.safetensors"
    # peft knows no shards: beside their index it would look for a pickle.
    files = open_files(folder, stem) if stem == "model" or single.is_file() else None
    if files is None:
        raise InputError(
            f"{reference}: no {stem}.safetensors in {folder}. Models in other formats are not loaded here."
        )
    close_files(files)
    if single.is_file():  # where there is an index too, transformers and peft take this one
        require_within(single, folder)
        TensorFile(single).close()
