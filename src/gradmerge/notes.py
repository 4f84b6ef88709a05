"""Notes: messages about finished work that are not errors."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a note is about. Its docstring lists the numbers in ``data``."""

    NOTE = "note"
    UNTRUSTED = "untrusted"
    """The step of a removal is too long: ``amplification``, and the least sufficient ``damping`` (None if none is)."""
    STRANGERS = "strangers"
    """A model may not stem from the base: ``distance`` and ``cosine`` of their weight matrices."""
    PENALTIES = "penalties"
    """The recorded penalties do not fit: the ``lacking`` models have none, or the curvature is a mean."""
    COEFFICIENTS = "coefficients"
    """Gradient matching is close to task arithmetic: the ``share`` of the change on which coefficients exceed 1.5."""
    TOKENS = "tokens"
    """Merged rows belong to different tokens: ``moved`` is the number of tokens whose row differs."""
    UNUSED = "unused"
    """``keys`` of the recipe name curvature that the method does not read."""


class Note(str):
    """The text of a note, with its kind and its numbers for programs."""

    kind: Kind
    data: dict[str, Any]

    def __new__(cls, text: str, kind: Kind = Kind.NOTE, **data: Any) -> Note:
        note = super().__new__(cls, text)
        note.kind, note.data = kind, data
        return note

    @property
    def is_warning(self) -> bool:
        """Whether ``--quiet`` also prints it: the result is probably not what the user wants."""
        return self.kind in (Kind.UNTRUSTED, Kind.STRANGERS, Kind.PENALTIES, Kind.COEFFICIENTS, Kind.TOKENS)
