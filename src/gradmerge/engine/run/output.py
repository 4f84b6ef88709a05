"""Where a merge goes on disk: files of weights and of curvature, and the journal of the units that are in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from ...checkpoints.sidecars import sidecars, stems
from ...curvature.curvature_card import OF_MERGES, write_curvature_card
from ...curvature.format import STEM, metadata
from ...errors import InputError, MachineError
from ...io.atomic_dir import AtomicDir
from ...io.reader import bytes_of
from ...io.writer import ShardWriter
from ..plan.plan import Plan
from .executor import MergedBlock
from .journal import Finished, Journal


class WeightFiles:
    """The unfinished files of a result, weights and curvature, wherever they are written from."""

    def __init__(self, plan: Plan, folder: Path, name: str, shard_size: int) -> None:
        folders = stems(plan.inputs.template)
        self._model = ShardWriter(folder, "model", plan.tensors, shard_size, {"format": "pt"}, folders)
        self.writers = [self._model]
        if plan.write_precision:
            likelihood = next((c.likelihood for c in plan.inputs.curvatures if c.likelihood), "empirical")
            header = metadata(plan.examples, likelihood, name)
            self.writers.append(ShardWriter(folder / STEM, STEM, plan.precision_tensors, shard_size, header))

    def place(self, tensor: str) -> tuple[str, int]:
        """The file of a tensor, and where in it the tensor begins."""
        return self._model.locate(tensor)

    def open(self, tensors: Iterable[str]) -> None:
        """Open the files of some tensors, which are there already: those that are written next."""
        for tensor in tensors:
            for writer in self.writers:
                if tensor in writer:
                    writer.write(tensor, 0, memoryview(b""))

    def write(self, block: MergedBlock) -> None:
        """Write a block, from any thread."""
        name, start = block.job.name, block.place[0]
        self._model.write(name, start, bytes_of(block.values.contiguous()))
        for bias, values in block.beside.items():
            self._model.write(bias, 0, bytes_of(values.contiguous()))
        if block.precision is not None:
            self.writers[1].write(name, start, bytes_of(block.precision.contiguous()))

    def close(self, *, sync: bool = False) -> None:
        for writer in self.writers:
            writer.close(sync=sync)


class Target:
    """The unfinished result of a merge. An error leaves it there to go on with, unless the input is to blame."""

    def __init__(self, plan: Plan, staging: AtomicDir, journal: Journal, shard_size: int) -> None:
        self._plan, self._staging, self._journal = plan, staging, journal
        self._finished = Finished()
        self.files = WeightFiles(plan, staging.folder, staging.out.name, shard_size)
        self._writers = self.files.writers
        self._outgoing = None
        if staging.upload is not None:
            from .outgoing import Outgoing

            # Curvature leaves in the end: its card is written from its files.
            self._outgoing = Outgoing(plan, staging, staging.upload, self._writers[0])

    def __enter__(self) -> Target:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._journal.close()
        self.files.close()
        if isinstance(error, InputError):  # going on could only fail again
            self._staging.keep = False

    def open(self, resume: bool) -> Finished:
        """Open the files and the journal, and say what an earlier run has finished."""
        found = self._journal.load() if resume else None
        self._staging.keep = found is not None
        if found is None and resume:
            self._staging.clear()
        small = sidecars(self._plan.inputs.template).nbytes + 1_000_000
        needed = sum(writer.nbytes for writer in self._writers)
        if self._outgoing is not None:
            found, needed = self._outgoing.checked(found), self._outgoing.space(needed)
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

    def put(self, block: MergedBlock) -> None:
        """Write a block and then its lines of the journal; may be called from several threads at once."""
        self.files.write(block)
        self.done([unit.number for unit in block.units])

    def done(self, numbers: Collection[int]) -> None:
        """Take units whose bytes are written into the journal."""
        self._journal.units(numbers)
        self._finished.units.update(numbers)
        if self._outgoing is not None:
            self._outgoing.done(numbers)

    def settle(self) -> None:
        """The statistics are known, so that what is finished stays as it is."""
        if self._outgoing is not None:
            self._outgoing.settle(self._finished)

    def finish(self) -> dict[str, int]:
        """Write the indexes and close the files; bytes of each file, by its name in the result."""
        for writer in self._writers:
            writer.finish()
        if len(self._writers) > 1:
            write_curvature_card(self._writers[1].folder, what=OF_MERGES)
        folders = ((writer.folder.relative_to(self._staging.folder), writer.sizes) for writer in self._writers)
        return {str(folder / name): nbytes for folder, sizes in folders for name, nbytes in sizes.items()}
