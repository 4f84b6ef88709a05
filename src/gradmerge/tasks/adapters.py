"""What PEFT is given of an adapter's config."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..checkpoints.patterns import Patterns
from ..errors import InputError


def without_patterns(config: Any, modules: Iterable[str], folder: Path) -> Any:
    """The config with the names that its regular expressions fit in their place.

    PEFT matches them with ``re``, which no limit of time can stop.
    """
    where = folder / "adapter_config.json"
    patterns = Patterns(where)
    names = [name for name in modules if name]

    def fitting(pattern: str) -> list[str]:
        return [name for name in names if patterns.fits(pattern, name)]

    for key in ("target_modules", "exclude_modules"):
        stated = getattr(config, key, None)
        if isinstance(stated, str) and stated != "all-linear":
            setattr(config, key, set(fitting(stated)))
    if config.target_modules is not None and not config.target_modules:
        raise InputError(f"{where}: target_modules fits no module of the base. Was it trained on another base?")
    for key in ("rank_pattern", "alpha_pattern"):
        stated = getattr(config, key, None) or {}
        if not isinstance(stated, dict):
            raise InputError(f"{where}: {key} is no mapping of names to numbers")
        found = {pattern: fitting(rf"(.*\.)?({pattern})") for pattern in stated}
        setattr(config, key, {"|".join(map(re.escape, found[p])): v for p, v in stated.items() if found[p]})
    for key in ("modules_to_save", "layers_pattern"):
        stated = getattr(config, key, None) or []
        for name in [stated] if isinstance(stated, str) else stated:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
                raise InputError(f"{where}: {key} must be names of modules, not {str(name)[:80]!r}")
    return config
