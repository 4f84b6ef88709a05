"""PEFT adapters: their base, and the model that both make."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..checkpoints.adapter_config import PatternMatcher, is_adapter
from ..errors import InputError
from ..io.reader import local_path, open_files
from ..text import first_line
from .resolve_model import folder_of

if TYPE_CHECKING:
    from .models import LoadingInfo

#: Layers at the top whose number of rows is the number of classes.
_HEADS, _ENDS = ("score", "classifier", "classifier.out_proj"), ("", ".modules_to_save.default")


def base_of(reference: str, folder: Path, adapter: dict[str, Any]) -> Path:
    """The folder of the base that an adapter's config names: from here, or from beside the adapter."""
    stated = adapter.get("base_model_name_or_path")
    if not stated:
        raise InputError(f"{reference}: the adapter's config names no base model")
    beside = local_path(stated, folder)
    try:
        base = beside if beside.is_dir() and not local_path(stated, None).is_dir() else folder_of(stated)
    except InputError as error:
        raise InputError(f"{reference}: the adapter's base cannot be opened. {error}") from error
    if is_adapter(base):
        raise InputError(f"{reference}: the adapter names another adapter as its base, {stated}. Merge that one first.")
    return base


def classes_of(folder: Path) -> int | None:
    """The number of classes of the head that an adapter brings along, if it does."""
    for file in open_files(folder, "adapter_model") or []:
        with contextlib.closing(file):
            for name in (f"base_model.model.{head}{end}.weight" for head in _HEADS for end in _ENDS):
                if name in file.entries:
                    return file.entries[name].shape[0]
    return None


def with_adapter(reference: str, model: nn.Module, folder: Path, info: LoadingInfo, apart: bool = False) -> nn.Module:
    """The base with the adapter merged into it, or ``apart`` and to be trained.

    ``info`` no longer names as missing what the adapter brings.
    """
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        needs = "this is a PEFT adapter, which needs the library peft: pip install peft"
        raise InputError(f"{reference}: {needs}") from error
    try:
        config = without_patterns(PeftConfig.from_pretrained(str(folder)), model, folder)
        wrapped = PeftModel.from_pretrained(model, str(folder), config=config, is_trainable=apart)
        whole = [name for name, _ in wrapped.named_modules() if name.endswith(".modules_to_save")]
        merged = wrapped if apart else wrapped.merge_and_unload()
    except InputError:
        raise
    except Exception as error:
        refused = f"the adapter cannot be put on its base {info.base_folder}"
        raise InputError(f"{reference}: {refused}: {first_line(error)}") from error
    if not apart:
        merged.requires_grad_(True)  # an adapter freezes its base
    replaced = tuple(name.removeprefix("base_model.model.").removesuffix("modules_to_save") for name in whole)
    info.missing_keys = [key for key in info.missing_keys if not key.startswith(replaced)]
    info.other_shapes = {key: shapes for key, shapes in info.other_shapes.items() if not key.startswith(replaced)}
    assert isinstance(merged, nn.Module)
    return merged


def without_patterns(config: Any, model: nn.Module, folder: Path) -> Any:
    """Replace the regular expressions in an adapter's config by the names that they match.

    PEFT matches them with ``re``, which cannot be stopped after a time.
    """
    where = folder / "adapter_config.json"
    patterns = PatternMatcher(where)
    modules = [name for name, _ in model.named_modules() if name]
    targets = [*modules, *(name for name, _ in model.named_parameters())] if config.target_parameters else modules

    def matching(pattern: str, names: list[str]) -> list[str]:
        return [name for name in names if patterns.fullmatch(pattern, name)]

    for key in ("target_modules", "exclude_modules"):
        value = getattr(config, key, None)
        if isinstance(value, str) and value != "all-linear":
            setattr(config, key, set(matching(value, modules)))
    if config.target_modules is not None and not config.target_modules and not config.target_parameters:
        raise InputError(f"{where}: target_modules fits no module of the base. Was it trained on another base?")
    for key in ("rank_pattern", "alpha_pattern"):
        values = getattr(config, key, None) or {}
        names = {pattern: matching(rf"(.*\.)?({pattern})", targets) for pattern in values}
        setattr(config, key, {"|".join(map(re.escape, names[p])): v for p, v in values.items() if names[p]})
    for key in ("modules_to_save", "layers_pattern"):
        stated = getattr(config, key, None) or []
        for name in [stated] if isinstance(stated, str) else stated:
            if not re.fullmatch(r"[\w.-]+", name):
                raise InputError(f"{where}: {key} must be names of modules, not {name[:80]!r}")
    return config
