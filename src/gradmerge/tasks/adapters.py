"""PEFT adapters: find their base model, and merge them into it."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoints.lora import PatternMatcher, is_adapter
from ..errors import InputError
from ..io.reader import local_path, open_files
from ..text import first_line
from .resolve_model import folder_of

#: Names of the layers with one row per class, in the files of an adapter.
_HEAD_WEIGHTS = [
    f"base_model.model.{head}{suffix}.weight"
    for head in ("score", "classifier", "classifier.out_proj")
    for suffix in ("", ".modules_to_save.default")
]


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


def num_classes(folder: Path) -> int | None:
    """Return the number of classes of an adapter that has a classification head of its own."""
    for file in open_files(folder, "adapter_model") or []:
        with contextlib.closing(file):
            for name in _HEAD_WEIGHTS:
                if name in file.entries:
                    return file.entries[name].shape[0]
    return None


def add_adapter(reference: str, model: nn.Module, folder: Path, *, merge: bool) -> tuple[nn.Module, tuple[str, ...]]:
    """Merge an adapter into its base model, or wrap the model for training the adapter.

    Returns:
        The model, and the prefixes of the modules that the adapter replaces, such as its head.
    """
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise InputError(
            f"{reference}: this is a PEFT adapter, which needs the library peft: pip install peft"
        ) from error
    try:
        config = resolve_patterns(PeftConfig.from_pretrained(str(folder)), model, folder)
        wrapped = PeftModel.from_pretrained(model, str(folder), config=config, is_trainable=not merge)
        saved_modules = [name for name, _ in wrapped.named_modules() if name.endswith(".modules_to_save")]
        result = wrapped.merge_and_unload() if merge else wrapped
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{reference}: the adapter does not fit its base model: {first_line(error)}") from error
    if merge:
        result.requires_grad_(True)  # peft freezes the base model
    assert isinstance(result, nn.Module)
    return result, tuple(
        name.removeprefix("base_model.model.").removesuffix("modules_to_save") for name in saved_modules
    )


def resolve_patterns(config: Any, model: nn.Module, folder: Path) -> Any:
    """Replace the regular expressions in an adapter's config by the names that they match.

    PEFT matches them with ``re``, which has no time limit.
    """
    path = folder / "adapter_config.json"
    matcher = PatternMatcher(path)
    modules = [name for name, _ in model.named_modules() if name]
    targets = [*modules, *(name for name, _ in model.named_parameters())] if config.target_parameters else modules

    def matching(pattern: str, names: list[str]) -> list[str]:
        return [name for name in names if matcher.fullmatch(pattern, name)]

    for key in ("target_modules", "exclude_modules"):
        value = getattr(config, key, None)
        if isinstance(value, str) and value != "all-linear":
            setattr(config, key, set(matching(value, modules)))
    if config.target_modules is not None and not config.target_modules and not config.target_parameters:
        raise InputError(f"{path}: target_modules fits no module of the base. Was it trained on another base?")
    for key in ("rank_pattern", "alpha_pattern"):
        values = getattr(config, key, None) or {}
        names = {pattern: matching(rf"(.*\.)?({pattern})", targets) for pattern in values}
        setattr(config, key, {"|".join(map(re.escape, names[p])): v for p, v in values.items() if names[p]})
    for key in ("modules_to_save", "layers_pattern"):
        value = getattr(config, key, None) or []
        for name in [value] if isinstance(value, str) else value:
            if not re.fullmatch(r"[\w.-]+", name):
                raise InputError(f"{path}: {key} must be names of modules, not {name[:80]!r}")
    return config
