"""What can go wrong, in two kinds: the request is wrong (exit status 2), or the machine failed (1)."""

from __future__ import annotations

from .urls import redact


class GradmergeError(Exception):
    """A failure with a message meant for the user: what is wrong, where, and what to do."""

    status = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(redact(str(message)))


class InputError(GradmergeError):
    """What was asked for is wrong: a recipe, a checkpoint, an option. Nothing was written."""

    status = 2


class MachineError(GradmergeError):
    """The machine could not do it: no space, a write that failed, a file that vanished half-way."""
