"""What long work tells of itself."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told what is being done and how far it is, in bytes, examples or merges."""

    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, amount: int) -> None: ...


class NoProgress:
    def begin(self, what: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, amount: int) -> None:
        pass
