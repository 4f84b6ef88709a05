"""The two kinds of errors: the request is invalid (exit status 2), or the machine failed (exit status 1)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .urls import redact


class GradmergeError(Exception):
    """An error with a message for the user: what is wrong, where, and what to do."""

    status = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(redact(str(message)))


class InputError(GradmergeError):
    """The request is invalid: a recipe, a checkpoint, an option. Nothing was written."""

    status = 2


class MachineError(GradmergeError):
    """The machine failed: no space, a write error, a file that disappeared."""


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn the exceptions of a library into an InputError that begins with ``what``.

    Libraries raise exceptions of every kind for damaged files and models that do not fit. Errors of gradmerge are kept,
    and a lack of memory is not the user's fault.
    """
    from .text import first_line

    try:
        yield
    except (GradmergeError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # of torch, whose import takes long
            raise
        if "allocate memory" in str(error):
            raise MachineError(f"out of memory: {first_line(error)}. Try a smaller batch_size.") from error
        raise InputError(f"{what}: {first_line(error)}") from error
