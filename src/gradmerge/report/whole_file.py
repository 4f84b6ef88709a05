"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError, MachineError
from ..urls import is_url


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write a file; it takes its name, and the place of an older one, when the ``with`` block ends well."""
    if is_url(path):
        raise InputError(f"{path}: is written to this machine only; give a file here, and copy it there")
    partial = path.with_name(f".{path.name}.{os.getpid()}.gradmerge-partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
