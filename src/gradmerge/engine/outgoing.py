"""A merge whose result goes to a URL: files of weights leave as soon as they are complete."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from ..storage.staging import Staging
from ..storage.tensorwriter import TensorWriter
from ..storage.uploads import Upload
from .journal import Finished
from .plan import Plan, Unit

File = tuple[TensorWriter, str]


class Outgoing:
    """Counts the units that each file lacks. Nothing leaves before the statistics are known: a guess may be wrong."""

    def __init__(self, plan: Plan, staging: Staging, upload: Upload, writers: Sequence[TensorWriter]) -> None:
        self._plan, self._staging, self._upload, self._writers = plan, staging, upload, writers
        self._files: dict[int, set[File]] = {}
        """Unit → the files that it goes to; empty until the statistics are known."""
        self._left: Counter[File] = Counter()
        self._lock = threading.Lock()

    def checked(self, found: Finished | None) -> Finished | None:
        """What an earlier run has finished; nothing if some of what it has sent is gone."""
        names = {self._name(writer, file) for writer in self._writers for file in writer.sizes}
        if found is None or not self._upload.is_there(names):
            self._staging.clear()
            return None
        for writer in self._writers:
            writer.gone = {file for file in writer.sizes if self._name(writer, file) in self._upload.sent}
        return found

    def space(self, nbytes: int) -> int:
        """Bytes that are needed here, of a result with so many: a few files, unless all wait for the statistics."""
        largest = max((size for writer in self._writers for size in writer.sizes.values()), default=0)
        return nbytes if self._plan.statistics_read else min(nbytes, 6 * largest)

    def settle(self, finished: Finished) -> None:
        """The statistics are known: send what is complete, and from now on what becomes so."""
        files = {unit.number: self._files_of(unit) for unit in self._plan.units()}
        self._left = Counter(file for number in files if number not in finished.units for file in files[number])
        complete = {file for own in files.values() for file in own if not self._left[file]}
        self._files = files
        for writer, file in sorted(complete, key=lambda one: one[1]):
            if file not in writer.gone:
                self._send(writer, file)

    def done(self, number: int) -> None:
        """A unit is written, and in the journal."""
        own = self._files.get(number, set())
        with self._lock:
            self._left.subtract(own)
            complete = [file for file in own if not self._left[file]]
        for writer, file in complete:
            self._send(writer, file)

    def _files_of(self, unit: Unit) -> set[File]:
        """A layer that is solved whole may have its bias in another file."""
        bias = unit.job.layer.bias if unit.job.layer is not None else None
        names = [unit.job.name, bias.name] if bias is not None else [unit.job.name]
        return {(writer, writer.place(name)[0]) for writer in self._writers for name in names if name in writer}

    def _send(self, writer: TensorWriter, file: str) -> None:
        writer.release(file)
        self._upload.send(self._name(writer, file))

    def _name(self, writer: TensorWriter, file: str) -> str:
        return (writer.folder.relative_to(self._staging.folder) / file).as_posix()
