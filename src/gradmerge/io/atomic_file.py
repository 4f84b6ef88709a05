"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError, MachineError
from ..urls import is_url


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A path to write to; when the ``with`` block ends, the file replaces ``path``."""
    if is_url(path):
        raise InputError(f"{path}: can only be written to this machine; give a local file, and copy it")
    partial = path.with_name(f".{path.name}.{os.getpid()}.gradmerge-partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
