"""Regular expressions from elsewhere, such as an adapter's config, matched within a limit of time."""

from __future__ import annotations

import time
from typing import Any

from ..errors import InputError

#: Seconds for all patterns of a config together; they take milliseconds unless they were made not to end.
SECONDS = 10.0
LONGEST_PATTERN = 10_000


class Patterns:
    """Matches names against the patterns of one file, with ``regex``: Python's own ``re`` cannot be stopped."""

    def __init__(self, where: object) -> None:
        self._where = where
        self._left = SECONDS
        self._compiled: dict[str, Any] = {}

    def fits(self, pattern: str, name: str) -> bool:
        """Whether the pattern matches the whole name, as ``re.fullmatch`` does."""
        began = time.perf_counter()
        try:
            if self._left <= 0:
                raise TimeoutError
            if pattern not in self._compiled:
                self._compiled[pattern] = self._compile(pattern)
            return self._compiled[pattern].fullmatch(name, timeout=self._left) is not None
        except TimeoutError:
            raise InputError(
                f"{self._where}: its regular expressions take longer than {SECONDS:g} seconds to match, the last of "
                f"them {_shown(pattern)}. Put names in their place."
            ) from None
        finally:
            taken = time.perf_counter() - began
            if taken > 1e-4:  # an honest match takes microseconds, and there may be millions of them
                self._left -= taken

    def _compile(self, pattern: str) -> Any:
        import regex  # type: ignore[import-untyped]

        length = len(pattern)
        if length > LONGEST_PATTERN:
            raise InputError(
                f"{self._where}: a regular expression of {length} characters; {LONGEST_PATTERN} is the limit"
            )
        try:
            return regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError, ValueError) as error:
            raise InputError(f"{self._where}: {_shown(pattern)} is no regular expression: {error}") from error


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:79] + "…")
