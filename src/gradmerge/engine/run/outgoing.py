"""A merge whose result goes to a URL: files of weights leave as soon as they are complete."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from ...io.atomic_dir import AtomicDir
from ...io.upload import Upload
from ...io.writer import ShardWriter
from ..plan.plan import Plan, Unit
from .journal import Finished


class Outgoing:
    """Counts the units that each file lacks. Nothing leaves before the statistics are known: a guess may be wrong."""

    def __init__(self, plan: Plan, staging: AtomicDir, upload: Upload, writer: ShardWriter) -> None:
        self._plan, self._staging, self._upload, self._writer = plan, staging, upload, writer
        self._files: dict[int, set[str]] = {}
        """Unit → the files that it goes to; empty until the statistics are known."""
        self._left: Counter[str] = Counter()
        self._lock = threading.Lock()

    def checked(self, found: Finished | None) -> Finished | None:
        """What an earlier run has finished; nothing if some of what it has sent is gone."""
        if found is None or not self._upload.is_there(self._writer.sizes):
            self._staging.clear()
            return None
        self._writer.gone = self._writer.sizes.keys() & self._upload.sent.keys()
        return found

    def space(self, nbytes: int) -> int:
        """Bytes that are needed here, of a result with so many: a few files, unless all wait for the statistics."""
        few = 6 * max(self._writer.sizes.values(), default=0)
        return nbytes if self._plan.statistics_read else nbytes - max(0, self._writer.nbytes - few)

    def settle(self, finished: Finished) -> None:
        """The statistics are known: send what is complete, and from now on what becomes so."""
        self._files = {unit.number: self._files_of(unit) for unit in self._plan.units()}
        left = (own for number, own in self._files.items() if number not in finished.units)
        self._left = Counter(file for own in left for file in own)
        for file in sorted({file for own in self._files.values() for file in own} - self._writer.gone):
            if not self._left[file]:
                self._send(file)

    def done(self, numbers: Iterable[int]) -> None:
        """Units are written, and in the journal."""
        own = [file for number in numbers for file in self._files.get(number, ())]
        with self._lock:
            self._left.subtract(own)
            complete = [file for file in dict.fromkeys(own) if not self._left[file]]
        for file in complete:
            self._send(file)

    def _files_of(self, unit: Unit) -> set[str]:
        """A layer that is solved whole may have its bias in another file."""
        bias = unit.job.layer.bias if unit.job.layer is not None else None
        names = [unit.job.name, bias.name] if bias is not None else [unit.job.name]
        return {self._writer.place(name)[0] for name in names}

    def _send(self, file: str) -> None:
        self._writer.release(file)
        self._upload.send(file)
