"""The unfinished result of a merge: files of weights and of curvature, and the journal of the blocks in them."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.sidecars import code_notes, copy_sidecars, sidecars
from ..curvature.curvature import MERGED_CURVATURE, write_curvature_card
from ..curvature.format import STEM, metadata
from ..errors import InputError, MachineError
from ..io.atomic_dir import AtomicDir, require_space
from ..io.reader import FLOATS, bytes_of
from ..io.writer import ShardWriter
from .jobs import Block, Job, MergedBlock
from .plan import Plan

JOURNAL = "gradmerge.journal"
"""The name of the journal in an unfinished folder."""


class WeightFiles:
    """The weight and curvature files of a result. Several processes may write blocks to them."""

    def __init__(self, plan: Plan, folder: Path, name: str) -> None:
        folders, shard_size = plan.inputs.template.modules, plan.recipe.output.shard_size
        self.model = ShardWriter(folder, "model", plan.tensors, shard_size, {"format": "pt"}, folders)
        self.writers = [self.model]
        if plan.precision_factor is not None:
            likelihood = next((c.likelihood for c in plan.inputs.curvatures if c.likelihood), "empirical")
            header = metadata(plan.examples, likelihood, name)
            self.writers.append(ShardWriter(folder / STEM, STEM, plan.precision_tensors, shard_size, header))

    def files_of(self, job: Job) -> set[tuple[ShardWriter, str]]:
        """Return the files that a job writes to. The bias of a layer may be in another file than its weight."""
        names = [(writer, name) for writer in self.writers for name in job.tensors if name in writer]
        return {(writer, writer.locate(name)[0]) for writer, name in names}

    def put(self, merged: MergedBlock) -> None:
        """Write a block; may be called from several threads at once."""
        for name, values in merged.tensors.items():
            self.model.write(name, merged.start, bytes_of(values.contiguous()))
        if merged.precision is not None:
            self.writers[1].write(merged.job.name, merged.start, bytes_of(merged.precision.contiguous()))

    def close(self, *, sync: bool = False) -> None:
        for writer in self.writers:
            writer.close(sync=sync)


class Output:
    """The unfinished result of a merge. After an error it stays for ``resume``, except after an InputError."""

    report: None = None
    """Only :class:`~gradmerge.engine.adapter.AdapterOutput` has a report."""

    def __init__(self, plan: Plan, folder: AtomicDir, fingerprint: str, resume: bool) -> None:
        self._plan, self._folder = plan, folder
        self._upload = folder.upload
        self._journal = Journal(folder.folder, fingerprint)
        self.finished: set[int] = self._journal.load() if resume and folder.upload is None else set()
        """The blocks that an earlier run finished."""
        self.files = WeightFiles(plan, folder.folder, folder.out.name)
        self._missing: Counter[tuple[ShardWriter, str]] = Counter()
        """File → the number of its blocks that are not in the journal."""
        self._lock = threading.Lock()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._journal.close()
        self.files.close()
        if isinstance(error, InputError):  # a resumed run would fail again
            self._folder.keep = False

    def open(self) -> list[Block]:
        """Open the files and the journal, and return the blocks that no earlier run finished."""
        model = self.files.model
        needed = sum(writer.nbytes for writer in self.files.writers)
        if self._upload is not None:
            needed -= max(0, model.nbytes - 6 * max(model.sizes.values(), default=0))  # a few files at a time
        if not self.finished:
            self._folder.clear()
        needed += sum(path.stat().st_size for path in sidecars(self._plan.inputs.template).values()) + 1_000_000
        require_space(self._folder.folder, needed)
        for writer in self.files.writers:
            writer.folder.mkdir(exist_ok=True)
            if not writer.open():
                self.finished = set()
        # Set before the journal exists, so that Ctrl-C keeps the folder as soon as it can be resumed.
        self._folder.keep = True
        self._journal.open(fresh=not self.finished)
        left = [block for block in self._plan.blocks() if block.number not in self.finished]
        self._missing = Counter(file for block in left for file in self.files.files_of(block.job))
        return left

    def put(self, merged: MergedBlock) -> None:
        """Write a block, then its line of the journal; may be called from several threads at once."""
        self.files.put(merged)
        self.record_blocks([merged.block])

    def record_blocks(self, blocks: Sequence[Block]) -> None:
        """Record written blocks in the journal. Close and upload the files that these blocks complete."""
        self._journal.add(block.number for block in blocks)
        files = [file for block in blocks for file in self.files.files_of(block.job)]
        with self._lock:
            self._missing.subtract(files)
            complete = [file for file in dict.fromkeys(files) if not self._missing[file]]
        for writer, name in complete:
            writer.close_file(name)
            # Curvature is uploaded at the end: its card is written from its files.
            if self._upload is not None and writer is self.files.model:
                writer.uploaded.add(name)
                self._upload.send(self._folder.folder, name)

    def finish(self) -> dict[str, int]:
        """Complete the weight files, copy the small files, and return the size of each weight file."""
        for writer in self.files.writers:
            writer.finish()
        if len(self.files.writers) > 1:
            write_curvature_card(self.files.writers[1].folder, what=MERGED_CURVATURE)
        template, folder = self._plan.inputs.template, self._folder.folder
        self._plan.note(code_notes(template))
        copy_sidecars(template, folder, config_dtype(self._plan))
        if self._plan.inputs.result_files is not None:
            self._plan.inputs.result_files.write(folder)
        folders = ((writer.folder.relative_to(folder), writer.sizes) for writer in self.files.writers)
        return {str(path / name): nbytes for path, sizes in folders for name, nbytes in sizes.items()}


def config_dtype(plan: Plan) -> str:
    """Return the dtype for the result's config; `auto` if that of the template is right."""
    dtype = plan.recipe.output.dtype
    if dtype != "widest":
        return dtype
    merged, template = plan.merged_tensors, plan.inputs.template
    types = {info.dtype for info in merged.values()}
    unchanged = types == {template.tensors[name].dtype for name in merged}
    return "auto" if unchanged or len(types) != 1 else FLOATS[types.pop()]


class Journal:
    """An append-only file: a header, then a line with the number of each finished block.

    The line of a block is written after its bytes, so that a block in the journal is a block on disk. After a crash of
    the machine that need not hold. The header therefore names the boot, and a journal of another boot is not used.
    Every line ends with a checksum: a damaged line could name a block that is not there.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.path = folder / JOURNAL
        self._header = {"fingerprint": fingerprint, "boot": boot_id()}
        self._fd = -1
        self._lock = threading.Lock()

    def load(self) -> set[int]:
        """Return the blocks that an earlier run finished; none without a valid journal.

        Raise if the journal is that of another merge.
        """
        header = read_header(self.path.parent)
        if header.get("fingerprint", self._header["fingerprint"]) != self._header["fingerprint"]:
            raise InputError(
                f"{self.path.parent}: the unfinished merge there has another recipe, or its inputs have changed since. "
                "Merge without resume=True to start over."
            )
        if header != self._header:
            return set()
        try:
            return set(map(_number, self.path.read_bytes().split(b"\n")[1:-1]))
        except ValueError:
            return set()

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
        header = json.loads((folder / JOURNAL).read_bytes().partition(b"\n")[0])
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
