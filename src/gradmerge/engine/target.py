"""Where a merge goes on disk: files of weights and of curvature, and the journal of the units that are in them."""

from __future__ import annotations

import threading
from collections import Counter

from ..checkpoints.sidecars import sidecars, stems
from ..curvature.curvature_card import OF_MERGES, write_curvature_card
from ..curvature.files import STEM, metadata
from ..errors import InputError, MachineError
from ..storage.bytesof import bytes_of
from ..storage.staging import Staging
from ..storage.tensorwriter import TensorWriter
from .journal import Finished, Journal
from .local import MergedBlock
from .plan import Plan, Unit


class Target:
    """The unfinished result of a merge. An error leaves it there to go on with, unless the input is to blame."""

    def __init__(self, plan: Plan, staging: Staging, journal: Journal, shard_size: int) -> None:
        self._plan, self._staging, self._journal = plan, staging, journal
        self._sources = plan.inputs.sources
        self._finished = Finished()
        folders = stems(plan.inputs.template)
        self._model = TensorWriter(staging.folder, "model", plan.tensors, shard_size, {"format": "pt"}, folders)
        self._writers = [self._model]
        if plan.write_precision:
            likelihood = next((c.likelihood for c in plan.inputs.curvatures if c.likelihood), "empirical")
            header = metadata(plan.examples, likelihood, staging.out.name)
            folder = staging.folder / STEM
            self._writers.append(TensorWriter(folder, STEM, plan.precision_tensors, shard_size, header))
        self._left: Counter[tuple[TensorWriter, str]] = Counter()
        """Of a result at a URL: the units that each file still lacks, once the statistics are known."""
        self._settled = False
        self._lock = threading.Lock()

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._journal.close()
        for writer in self._writers:
            writer.close()
        if isinstance(error, InputError):  # going on could only fail again
            self._staging.keep = False

    def open(self, resume: bool) -> Finished:
        """Open the files and the journal, and say what an earlier run has finished."""
        found = self._journal.load() if resume else None
        self._staging.keep = found is not None
        if found is None and resume:
            self._staging.clear()
        found = self._check_sent(found)
        small = sidecars(self._plan.inputs.template).nbytes + 1_000_000
        needed = sum(writer.nbytes for writer in self._writers)
        if self._staging.upload is not None and not self._plan.statistics_read:  # files leave as they are complete
            largest = max(nbytes for writer in self._writers for nbytes in writer.sizes.values())
            needed = min(needed, 6 * largest)
        self._staging.require_space(needed + small)
        for writer in self._writers:
            writer.folder.mkdir(exist_ok=True)
            if not writer.open():
                found = None
        self._staging.keep = True  # before, so that Ctrl-C finds it set as soon as there is a journal to go on from
        try:
            self._journal.open(fresh=found is None)
        except MachineError:
            self._staging.keep = found is not None
            raise
        self._finished = found or Finished()
        return self._finished

    def _check_sent(self, found: Finished | None) -> Finished | None:
        """Of a result at a URL: start over if what an earlier run has sent there is gone."""
        upload = self._staging.upload
        if upload is None:
            return found
        names = [self._name(writer, file) for writer in self._writers for file in writer.sizes]
        if found is None or not upload.is_there(names):
            self._staging.clear()
            return None
        for writer in self._writers:
            writer.gone = {file for file in writer.sizes if self._name(writer, file) in upload.sent}
        return found

    def _name(self, writer: TensorWriter, file: str) -> str:
        return (writer.folder.relative_to(self._staging.folder) / file).as_posix()

    def settle(self) -> None:
        """The statistics are known, so that what is finished stays: files at a URL are sent when they are complete."""
        if self._staging.upload is None:
            return
        self._left = Counter()
        for unit in self._plan.units():
            for one in self._files_of(unit):
                self._left[one] += unit.number not in self._finished.units
        self._settled = True
        for (writer, file), left in list(self._left.items()):
            if left == 0 and file not in writer.gone:
                self._send(writer, file)

    def _files_of(self, unit: Unit) -> set[tuple[TensorWriter, str]]:
        """The files that a unit goes to: a layer that is solved whole may have its bias in another one."""
        job, bias = unit.job, unit.job.layer.bias if unit.job.layer is not None else None
        names = [job.name, bias.name] if bias is not None else [job.name]
        found = ((writer, writer.file_of(name)) for writer in self._writers for name in names)
        return {(writer, file) for writer, file in found if file is not None}

    def _send(self, writer: TensorWriter, file: str) -> None:
        assert self._staging.upload is not None
        writer.release(file)
        self._staging.upload.send(self._name(writer, file))

    def put(self, block: MergedBlock) -> None:
        """Write a block and then its line of the journal; may be called from several threads at once."""
        unit = block.unit
        self._model.write(unit.job.name, unit.start, bytes_of(block.values.contiguous()))
        for name, values in block.beside.items():
            self._model.write(name, 0, bytes_of(values.contiguous()))
        if block.precision is not None:
            self._writers[1].write(unit.job.name, unit.start, bytes_of(block.precision.contiguous()))
        record = [block.digests.get(source, -1) for source in self._sources]
        self._journal.unit(unit.number, record)
        self._finished.units[unit.number] = record
        if self._settled:
            with self._lock:
                self._left.subtract(self._files_of(unit))
                full = [file for file in self._files_of(unit) if self._left[file] == 0]
            for writer, file in full:
                self._send(writer, file)

    def finish(self) -> dict[str, int]:
        """Write the indexes and close the files; bytes of each file, by its name in the result."""
        for writer in self._writers:
            writer.finish()
        if len(self._writers) > 1:
            write_curvature_card(self._writers[1].folder, what=OF_MERGES)
        folders = ((writer.folder.relative_to(self._staging.folder), writer.sizes) for writer in self._writers)
        return {str(folder / name): nbytes for folder, sizes in folders for name, nbytes in sizes.items()}
