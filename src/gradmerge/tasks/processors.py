"""What turns data into a model's input: its tokenizer, or its image processor."""

from __future__ import annotations

from typing import Any

from ..errors import InputError
from ..quiet import quiet_transformers
from ..text import first_line
from .models import LoadingInfo
from .resolve_model import check_small_files, folder_of, offline

_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken", "tekken.json")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PROCESSOR_SIZES = ("size", "crop_size", "pad_size")
#: Pixels along the longer edge of what an image processor makes.
LONGEST_EDGE = 10_000


def load_tokenizer(reference: str, info: LoadingInfo, tokenizer: str | None = None) -> Any:
    """The tokenizer that a user names, or the one beside the model, or beside the base of an adapter."""
    if tokenizer is not None:
        folders = [folder_of(tokenizer)]
        check_small_files(folders[0])
    else:
        folders = list(dict.fromkeys([info.folder, info.base_folder]))
    folder = next((f for f in folders if any(any(f.glob(name)) for name in _TOKENIZER_FILES)), None)
    if folder is None:
        raise InputError(
            f"{tokenizer or reference}: no tokenizer in {folders[0]} (no tokenizer.json, nor a vocabulary). "
            "Give a folder or Hub id that has one: model_args tokenizer=PATH"
        )
    from transformers import AutoTokenizer

    try:
        with quiet_transformers(), offline():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers passes on errors of every kind, from JSON to sentencepiece
        raise InputError(
            f"{tokenizer or reference}: the tokenizer in {folder} cannot be loaded: {first_line(error)}. "
            "Give another folder: model_args tokenizer=PATH"
        ) from error


def load_image_processor(reference: str, info: LoadingInfo) -> Any:
    """The image processor beside the model, or None when there is none."""
    folders = dict.fromkeys([info.folder, info.base_folder])
    folder = next((f for f in folders if any((f / name).is_file() for name in _PROCESSOR_FILES)), None)
    if folder is None:
        return None
    import transformers

    kind: Any = transformers.AutoImageProcessor
    try:
        with quiet_transformers(), offline():
            # The same pixels with and without torchvision: its resizing differs from that of PIL.
            processor = kind.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)
            sizes = [n for key in _PROCESSOR_SIZES for n in dict(getattr(processor, key, None) or {}).values()]
    except Exception as error:
        raise InputError(
            f"{reference}: the image processor in {folder} cannot be loaded: {first_line(error)}"
        ) from error
    if any(isinstance(n, int) and n > LONGEST_EDGE for n in sizes):
        large = f"makes images of {max(sizes)} pixels per edge; {LONGEST_EDGE} is the limit"
        raise InputError(f"{reference}: the image processor in {folder} {large}")
    return processor
