"""The unfinished result of a merge: files of weights and of curvature, and the journal of the blocks in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from ...checkpoints.sidecars import copy_sidecars, sidecars, stems
from ...curvature.curvature_card import OF_MERGES, write_curvature_card
from ...curvature.format import STEM, metadata
from ...errors import InputError, MachineError
from ...io.atomic_dir import AtomicDir
from ...io.reader import FLOATS, bytes_of
from ...io.writer import ShardWriter
from ...recipe import Recipe
from ..plan.jobs import Block, MergedBlock
from ..plan.plan import Plan
from .journal import Finished, Journal
from .statistics import Statistics


class WeightFiles:
    """The files of a result, weights and curvature, to which any process may write blocks."""

    def __init__(self, plan: Plan, folder: Path, name: str, shard_size: int) -> None:
        folders = stems(plan.inputs.template)
        self._model = ShardWriter(folder, "model", plan.tensors, shard_size, {"format": "pt"}, folders)
        self.writers = [self._model]
        if plan.write_precision:
            likelihood = next((c.likelihood for c in plan.inputs.curvatures if c.likelihood), "empirical")
            header = metadata(plan.examples, likelihood, name)
            self.writers.append(ShardWriter(folder / STEM, STEM, plan.precision_tensors, shard_size, header))

    def locate(self, tensor: str) -> tuple[str, int]:
        """Return the file of a tensor, and where in it the tensor begins."""
        return self._model.locate(tensor)

    def open(self, tensors: Iterable[str]) -> None:
        """Open the existing files of some tensors, for writing."""
        for tensor in tensors:
            for writer in self.writers:
                if tensor in writer:
                    writer.write(tensor, 0, memoryview(b""))

    def write(self, merged: MergedBlock) -> None:
        """Write a block; may be called from several threads at once."""
        for name, values in merged.tensors.items():
            self._model.write(name, merged.start, bytes_of(values.contiguous()))
        if merged.precision is not None:
            self.writers[1].write(merged.job.name, merged.start, bytes_of(merged.precision.contiguous()))

    def close(self, *, sync: bool = False) -> None:
        for writer in self.writers:
            writer.close(sync=sync)


class Output:
    """The unfinished result of a merge. An error keeps it for a later run to resume, unless the input is to blame."""

    report: None = None
    """An adapter has a report of what it lacks of the merge."""

    def __init__(self, recipe: Recipe, plan: Plan, folder: AtomicDir, journal: Journal) -> None:
        self._recipe, self._plan, self._folder, self._journal = recipe, plan, folder, journal
        self._finished = Finished()
        self.files = WeightFiles(plan, folder.folder, folder.out.name, recipe.output.shard_size)
        self._writers = self.files.writers
        self._outgoing = None
        if folder.upload is not None:
            from .outgoing import Outgoing

            # Curvature is uploaded at the end: its card is written from its files.
            self._outgoing = Outgoing(plan, folder, folder.upload, self._writers[0])

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._journal.close()
        self.files.close()
        if isinstance(error, InputError):  # a resumed run would fail again
            self._folder.keep = False

    def open(self, resume: bool) -> Finished:
        """Open the files and the journal, and return what an earlier run finished."""
        finished = self._journal.load() if resume else None
        self._folder.keep = finished is not None
        if finished is None and resume:
            self._folder.clear()
        small_files = sidecars(self._plan.inputs.template).nbytes + 1_000_000
        needed = sum(writer.nbytes for writer in self._writers)
        if self._outgoing is not None:
            finished, needed = self._outgoing.checked(finished), self._outgoing.space(needed)
        self._folder.require_space(needed + small_files)
        for writer in self._writers:
            writer.folder.mkdir(exist_ok=True)
            if not writer.open():
                finished = None
        # Set before the journal exists, so that Ctrl-C keeps the folder as soon as it can be resumed.
        self._folder.keep = True
        try:
            self._journal.open(fresh=finished is None)
        except MachineError:
            self._folder.keep = finished is not None
            raise
        self._finished = finished or Finished()
        if self._outgoing is not None:
            self._outgoing.start(self._finished)
        return self._finished

    def put(self, merged: MergedBlock) -> None:
        """Write a block, then its line of the journal; may be called from several threads at once."""
        self.files.write(merged)
        self.done([merged.block.number])

    def done(self, numbers: Collection[int]) -> None:
        """Record in the journal that blocks are written."""
        self._journal.blocks(numbers)
        self._finished.blocks.update(numbers)
        if self._outgoing is not None:
            self._outgoing.done(numbers)

    def start(self, statistics: Statistics) -> list[Block]:
        """Return the blocks that are left to merge."""
        return [block for block in self._plan.blocks() if block.number not in self._finished.blocks]

    def finish(self) -> dict[str, int]:
        """Complete the weight files, copy the small files, and return the bytes of the former by name."""
        for writer in self._writers:
            writer.finish()
        if len(self._writers) > 1:
            write_curvature_card(self._writers[1].folder, what=OF_MERGES)
        template, folder = self._plan.inputs.template, self._folder.folder
        self._plan.note(sidecars(template).note(template.label))
        copy_sidecars(template, folder, config_dtype(self._recipe, self._plan))
        if self._plan.inputs.result_files is not None:
            self._plan.inputs.result_files.write(folder)
        folders = ((writer.folder.relative_to(folder), writer.sizes) for writer in self._writers)
        return {str(path / name): nbytes for path, sizes in folders for name, nbytes in sizes.items()}


def config_dtype(recipe: Recipe, plan: Plan) -> str:
    """Return the dtype for the result's config; `auto` if that of the template is right."""
    if recipe.output.dtype != "widest":
        return recipe.output.dtype
    merged, template = plan.merged_tensors, plan.inputs.template
    types = {info.dtype for info in merged.values()}
    unchanged = types == {template.tensors[name].dtype for name in merged}
    return "auto" if unchanged or len(types) != 1 else FLOATS[types.pop()]
