"""Notes: what a user should know of work that was done all the same."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a note is about, and the numbers in its ``data``."""

    NOTE = "note"
    UNTRUSTED = "untrusted"
    """A removal whose step is too long: ``amplification``, and the least ``damping`` that is enough (None: none is)."""
    STRANGERS = "strangers"
    """A model may not stem from the base: ``distance`` and ``cosine`` of their weight matrices."""
    PENALTIES = "penalties"
    """Recorded penalties that do not fit: none is there for the ``lacking`` models, or the curvature is a mean."""
    COEFFICIENTS = "coefficients"
    """Gradient matching is close to task arithmetic: the ``share`` of the change on which coefficients exceed 1.5."""
    TOKENS = "tokens"
    """Rows are merged that mean different tokens: ``moved`` is how many tokens have another row."""
    UNUSED = "unused"
    """``keys`` of the recipe name curvature that the method does not read."""


class Note(str):
    """The text of a note, with its kind and its numbers, so that nobody has to read those out of the text."""

    kind: Kind
    data: dict[str, Any]

    def __new__(cls, text: str, kind: Kind = Kind.NOTE, **data: Any) -> Note:
        note = super().__new__(cls, text)
        note.kind, note.data = kind, data
        return note

    @property
    def is_warning(self) -> bool:
        """Whether it is shown also to those who asked for quiet: the result is probably not what they want."""
        return self.kind in (Kind.UNTRUSTED, Kind.STRANGERS, Kind.PENALTIES, Kind.COEFFICIENTS, Kind.TOKENS)
