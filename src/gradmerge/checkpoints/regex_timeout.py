"""Match regular expressions from model files, such as an adapter's config, within a time limit."""

from __future__ import annotations

import time
from typing import Any

from ..errors import InputError

#: Time for all matches of one config. Ordinary patterns take milliseconds.
SECONDS = 10.0
MAX_LENGTH = 10_000


class Patterns:
    """Matches names against the patterns of one file. It uses ``regex``, because Python's ``re`` has no time limit."""

    def __init__(self, where: object) -> None:
        self._where = where
        self._left = SECONDS
        self._compiled: dict[str, Any] = {}

    def fits(self, pattern: str, name: str) -> bool:
        """Return whether the pattern matches the whole name, as ``re.fullmatch`` does."""
        began = time.perf_counter()
        try:
            if self._left <= 0:
                raise TimeoutError
            if pattern not in self._compiled:
                self._compiled[pattern] = self._compile(pattern)
            return self._compiled[pattern].fullmatch(name, timeout=self._left) is not None
        except TimeoutError:
            raise InputError(
                f"{self._where}: its regular expressions take longer than {SECONDS:g} seconds to match (the last is "
                f"{_abbreviated(pattern)}). Replace them by names."
            ) from None
        finally:
            elapsed = time.perf_counter() - began
            if elapsed > 1e-4:  # ordinary matches take microseconds, and there can be millions of them
                self._left -= elapsed

    def _compile(self, pattern: str) -> Any:
        import regex  # type: ignore[import-untyped]

        if len(pattern) > MAX_LENGTH:
            raise InputError(
                f"{self._where}: a regular expression has {len(pattern)} characters; the limit is {MAX_LENGTH}"
            )
        try:
            return regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError, ValueError) as error:
            raise InputError(f"{self._where}: {_abbreviated(pattern)} is not a regular expression: {error}") from error


def _abbreviated(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:79] + "…")
