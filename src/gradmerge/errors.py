"""The two kinds of errors: the request is invalid (exit status 2), or the machine failed (exit status 1)."""

from __future__ import annotations

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
