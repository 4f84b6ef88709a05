"""Read small untrusted files, such as configs.

They must be regular files, up to a limit, and inside their folder. A config must not run code from the Hub.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..text import size

#: Limit on the bytes of a config. Parsed JSON takes up to forty times its size in memory.
MAX_CONFIG = 10_000_000
#: Limit on the bytes of a tokenizer file. The largest vocabularies take a third of this.
MAX_TOKENIZER = 100_000_000
#: Limits on what a file unpacks to: bytes, or a multiple of its size. gzip compresses up to a thousandfold, and a
#: parquet file or a pickle may repeat one value a billion times.
UNPACKED_BYTES, UNPACKED_TIMES = 1_000_000_000, 100
#: The implementations in transformers. It takes any other name for a Hub repository and runs its code.
IMPLEMENTATIONS = {
    "attn_implementation": ["eager", "sdpa", "flex_attention", *(f"flash_attention_{n}" for n in (2, 3, 4))],
    "experts_implementation": ["eager", "batched_mm", "grouped_mm"],
}
#: Building a million layers takes hours.
MAX_LAYERS = 1000


def open_regular(path: Path) -> int:
    """Open a regular file for reading. This does not wait for a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path}: is not a regular file but a folder, a pipe or a device")
    return descriptor


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            raw = file.read(limit + 1)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > limit:
        raise InputError(f"{path}: larger than {size(limit)}, the limit for such a file")
    return raw


def read_start(path: Path) -> bytes:
    """Return the first 1,000 bytes of a regular file."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(1000)


def require_unpackable(path: Path, nbytes: int) -> None:
    """Raise if a file that unpacks to ``nbytes`` exceeds the limit."""
    if nbytes > max(UNPACKED_BYTES, UNPACKED_TIMES * path.stat().st_size):
        raise InputError(
            f"{path}: unpacks to more than the limit of {size(UNPACKED_BYTES)} and {UNPACKED_TIMES} times its size. If "
            "you trust the file, unpack it and pass the result."
        )


def read_json(path: Path, limit: int = MAX_CONFIG) -> dict[str, Any]:
    """Return the JSON object in a file of at most ``limit`` bytes."""
    return parse_json_object(read_bounded(path, limit), lambda why: InputError(f"{path}: {why}"))


def readable_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file does not exist or is invalid."""
    try:
        return read_json(path) if path.is_file() else None
    except InputError:
        return None


def parse_json_object(raw: bytes | bytearray, broken: Any) -> dict[str, Any]:
    """Parse a JSON object from untrusted bytes. ``broken`` makes an error from its reason."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("duplicate key")
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise broken(f"invalid JSON ({str(error)[:120]})") from None
    if not isinstance(value, dict):
        raise broken("its JSON is not an object")
    return value


def lies_within(path: Path, folder: Path) -> bool:
    """Return whether ``path`` lies inside ``folder`` after following all links. The folder may itself be a link.

    A snapshot of a Hub cache (…/snapshots/REVISION) may also link to the blobs of the same model (…/blobs).
    """
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, or an invalid name
        return False
    if home in target.parents:
        return True
    return any(
        parent.parent.name == "snapshots" and target.parent == parent.parent.parent / "blobs"
        for parent in (home, *home.parents)
    )


def require_within(path: Path, folder: Path) -> None:
    """Raise if a file is a link to a file outside its model folder."""
    if not lies_within(path, folder):
        raise InputError(
            f"{path}: is a link to {os.path.realpath(path)}, outside the model's folder. Copy the file into the "
            "folder, or pass the folder that contains it."
        )


def refuse_hub_code(config: Any, where: object) -> None:
    """Raise if any part of a config names Hub code or a weight file, or has too many layers."""
    parts = [config]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
            kind = key.removeprefix("_").removesuffix("_internal")
            if kind in IMPLEMENTATIONS:
                check_implementation(kind, value, f"{where}: {key}")
            elif key == "transformers_weights" and value is not None:
                raise InputError(
                    f"{where}: {key} names the weight file {str(value)[:80]!r}. Remove the key: gradmerge reads "
                    "model.safetensors."
                )
            elif isinstance(value, int) and value > MAX_LAYERS and key.endswith(("layer", "layers", "depth")):
                raise InputError(f"{where}: {key} is above the limit of {MAX_LAYERS}")
            else:
                parts.append(value)


def check_implementation(kind: str, value: Any, where: str) -> None:
    """Raise unless a value, or each value of a mapping, is an implementation in transformers."""
    if isinstance(value, dict):
        for part in value.values():
            check_implementation(kind, part, where)
    elif value is not None and value not in IMPLEMENTATIONS[kind]:
        raise InputError(
            f"{where}: {str(value)[:80]!r} is not one of {', '.join(IMPLEMENTATIONS[kind])}. gradmerge does not run "
            "code from the Hub."
        )
