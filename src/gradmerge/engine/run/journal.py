"""What a merge has finished so far, kept beside its unfinished output so that a killed merge can go on."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import MachineError
from ..plan.plan import Unit
from .statistics import Statistics

NAME = "gradmerge.journal"


@dataclass
class Finished:
    """What a journal says: the statistics, and the numbers of the finished units."""

    statistics: Statistics | None = None
    guess: Statistics | None = None
    """What the units were made with before the statistics were known."""
    units: set[int] = field(default_factory=set)

    def know(self, statistics: Statistics, units: Iterable[Unit]) -> list[int]:
        """Take the statistics, and do not count what was made with a wrong guess of them; returned are its numbers."""
        guess, again = self.guess or statistics, []
        for unit in units:
            if unit.number in self.units and guess.of(unit.job.name) != statistics.of(unit.job.name):
                self.units.remove(unit.number)
                again.append(unit.number)
        self.statistics, self.guess = statistics, None
        return again


class Journal:
    """An append-only file: a header line, a line of statistics, then a line for each finished unit.

    A guess of the statistics may come first; then the line of statistics follows where they are known, with the
    numbers of the units that were made with a wrong guess.

    A line is written after the unit's bytes are, so that a unit in the journal is a unit on disk. After a crash of the
    whole machine that need not hold, so the header names the boot; a journal of another boot is not believed. Nor is
    one with a line that has changed since: it could name a unit that is not there. So every line ends with a checksum.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.path = folder / NAME
        self._header = {"fingerprint": fingerprint, "boot": _boot()}
        self._fd = -1
        self._lock = threading.Lock()

    def load(self) -> Finished | None:
        """What an earlier run finished; None if there is no journal to believe."""
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]
        except OSError:
            return None
        with contextlib.suppress(ValueError, IndexError, KeyError, AttributeError, TypeError, RecursionError):
            if json.loads(lines[0]) == self._header:
                finished = Finished()
                for line in lines[1:]:
                    record = _checked(line)
                    if isinstance(record, dict) and "guess" in record:
                        finished.guess = Statistics.from_json(record["guess"])
                    elif isinstance(record, dict):
                        finished.statistics = Statistics.from_json(record["statistics"])
                        wrong = finished.guess not in (None, finished.statistics)
                        for number in record.get("again", [*finished.units] if wrong else ()):
                            finished.units.remove(number)
                        finished.guess = None
                    elif isinstance(record, int):
                        finished.units.add(record)
                    else:
                        return None
                return finished
        return None

    def belongs_to_another_merge(self) -> bool:
        """Whether there is a journal, and of other inputs or another recipe."""
        try:
            header = json.loads(self.path.read_bytes().partition(b"\n")[0])
            return bool(header["fingerprint"] != self._header["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    def open(self, fresh: bool) -> None:
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0), 0o666)
            # A line that a killed process did not end would spoil the next.
            os.ftruncate(self._fd, self.path.read_bytes().rfind(b"\n") + 1)
        except OSError as error:
            raise MachineError(f"{self.path}: {error.strerror}") from error
        if fresh:
            self._write(json.dumps(self._header).encode() + b"\n")

    def guess(self, value: Statistics) -> None:
        self._append({"guess": value.to_json()})

    def statistics(self, value: Statistics, again: Sequence[int] | None = None) -> None:
        """``again`` are the units that were made with a wrong guess, if not all or none."""
        self._append({"statistics": value.to_json(), **({} if again is None else {"again": again})})

    def units(self, numbers: Iterable[int]) -> None:
        self._append(*numbers)

    def _append(self, *records: Any) -> None:
        texts = [json.dumps(record, separators=(",", ":")).encode() for record in records]
        self._write(b"".join(text + b" %08x\n" % zlib.crc32(text) for text in texts))

    def _write(self, line: bytes) -> None:
        with self._lock:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError as error:
                raise MachineError(f"{self.path}: writing failed: {error.strerror}") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


def _checked(line: bytes) -> Any:
    text, _, checksum = line.rpartition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        raise ValueError("a line that is not as it was written")
    return json.loads(text)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
