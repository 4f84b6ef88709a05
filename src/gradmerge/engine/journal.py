"""The journal of an unfinished merge, from which a killed merge resumes."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import InputError, MachineError

NAME = "gradmerge.journal"


class Journal:
    """An append-only file: a header, then a line with the number of each finished block.

    The line of a block is written after its bytes, so that a block in the journal is a block on disk. After a crash of
    the machine that need not hold. The header therefore names the boot, and a journal of another boot is not used.
    Every line ends with a checksum: a damaged line could name a block that is not there.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.path = folder / NAME
        self._header = {"fingerprint": fingerprint, "boot": boot_id()}
        self._fd = -1
        self._lock = threading.Lock()

    def load(self) -> set[int] | None:
        """Return the blocks that an earlier run finished; None without a valid journal.

        Raise if the journal is that of another merge.
        """
        header = read_header(self.path.parent)
        if header.get("fingerprint", self._header["fingerprint"]) != self._header["fingerprint"]:
            raise InputError(
                f"{self.path.parent}: the unfinished merge there has another recipe, or its inputs have changed since. "
                "Merge without resume=True to start over."
            )
        if header != self._header:
            return None
        try:
            return set(map(_number, self.path.read_bytes().split(b"\n")[1:-1]))
        except ValueError:
            return None

    def open(self, fresh: bool) -> None:
        """Open the journal for writing, empty if ``fresh``."""
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0), 0o666)
            # Cut off an incomplete last line of a killed process: it would damage the next line.
            os.ftruncate(self._fd, self.path.read_bytes().rfind(b"\n") + 1)
        except OSError as error:
            raise MachineError(f"{self.path}: {error.strerror}") from error
        if fresh:
            self._write(json.dumps(self._header).encode() + b"\n")

    def add(self, numbers: Iterable[int]) -> None:
        """Record finished blocks."""
        texts = [str(number).encode() for number in numbers]
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


def read_header(folder: Path) -> dict[str, Any]:
    """Return the header of the journal in a folder: the fingerprint of the merge, and the boot. Empty without one."""
    try:
        header = json.loads((folder / NAME).read_bytes().partition(b"\n")[0])
        return header if isinstance(header, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _number(line: bytes) -> int:
    text, _, checksum = line.rpartition(b" ")
    if checksum != b"%08x" % zlib.crc32(text):
        raise ValueError("damaged line")
    return int(text)


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
