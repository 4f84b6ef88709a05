"""Upload each weight file of a merge as soon as it is complete."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from ...io.atomic_dir import AtomicDir
from ...io.upload import Upload
from ...io.writer import ShardWriter
from ..plan.jobs import Block
from ..plan.plan import Plan
from .journal import Finished


class Outgoing:
    """Counts the missing blocks of each file."""

    def __init__(self, plan: Plan, staging: AtomicDir, upload: Upload, writer: ShardWriter) -> None:
        self._plan, self._staging, self._upload, self._writer = plan, staging, upload, writer
        self._files: dict[int, set[str]] = {}
        """Number of a block → the files that it is written to."""
        self._missing: Counter[str] = Counter()
        self._lock = threading.Lock()

    def checked(self, finished: Finished | None) -> Finished | None:
        """Return what an earlier run finished, or None if a file that it sent has disappeared."""
        if finished is None or not self._upload.resume(self._writer.sizes):
            self._staging.clear()
            return None
        self._writer.released = set(self._upload.sent)
        return finished

    def space(self, nbytes: int) -> int:
        """Return the local disk space for a result of ``nbytes``: a few files at a time."""
        few = 6 * max(self._writer.sizes.values(), default=0)
        return nbytes - max(0, self._writer.nbytes - few)

    def start(self, finished: Finished) -> None:
        """Send each file that becomes complete from now on."""
        self._files = {block.number: self._files_of(block) for block in self._plan.blocks()}
        missing = (files for number, files in self._files.items() if number not in finished.blocks)
        self._missing = Counter(file for files in missing for file in files)

    def done(self, numbers: Iterable[int]) -> None:
        """Note blocks that are written and in the journal. Send the files that they complete, in this thread."""
        files = [file for number in numbers for file in self._files.get(number, ())]
        with self._lock:
            self._missing.subtract(files)
            complete = [file for file in dict.fromkeys(files) if not self._missing[file]]
        for file in complete:
            self._send(file)

    def _files_of(self, block: Block) -> set[str]:
        """Return the files of a block: a layer may have its bias in another file than its weight."""
        return {self._writer.locate(name)[0] for name in block.job.tensors}

    def _send(self, file: str) -> None:
        self._writer.release(file)
        self._upload.send(file)
