"""The unfinished result of a merge: files of weights and of curvature, and the journal of the blocks in them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ..checkpoints.sidecars import copy_sidecars, sidecars
from ..curvature.curvature import MERGED_CURVATURE, write_curvature_card
from ..curvature.format import STEM, metadata
from ..errors import InputError
from ..io.atomic_dir import AtomicDir, require_space
from ..io.reader import FLOATS, bytes_of
from ..io.writer import ShardWriter
from ..recipe import Recipe
from .executor import Advance, Executor
from .jobs import Block, Job, MergedBlock, MergeOptions
from .journal import Journal
from .plan import Plan
from .statistics import Statistics


class WeightFiles:
    """The files of a result, weights and curvature, to which any process may write blocks."""

    def __init__(self, plan: Plan, folder: Path, name: str, shard_size: int) -> None:
        folders = plan.inputs.template.modules
        self.model = ShardWriter(folder, "model", plan.tensors, shard_size, {"format": "pt"}, folders)
        self.writers = [self.model]
        if plan.write_precision:
            likelihood = next((c.likelihood for c in plan.inputs.curvatures if c.likelihood), "empirical")
            header = metadata(plan.examples, likelihood, name)
            self.writers.append(ShardWriter(folder / STEM, STEM, plan.precision_tensors, shard_size, header))

    def files_of(self, job: Job) -> set[tuple[ShardWriter, str]]:
        """Return the files of a job: a layer may have its bias in another file than its weight."""
        names = [(writer, name) for writer in self.writers for name in job.tensors if name in writer]
        return {(writer, writer.locate(name)[0]) for writer, name in names}

    def write(self, merged: MergedBlock) -> None:
        """Write a block; may be called from several threads at once."""
        for name, values in merged.tensors.items():
            self.model.write(name, merged.start, bytes_of(values.contiguous()))
        if merged.precision is not None:
            self.writers[1].write(merged.job.name, merged.start, bytes_of(merged.precision.contiguous()))

    def close(self, *, sync: bool = False) -> None:
        for writer in self.writers:
            writer.close(sync=sync)


class Output:
    """The unfinished result of a merge. An error keeps it for a later run to resume, unless the input is to blame."""

    report: None = None
    """Only :class:`~gradmerge.engine.adapter.AdapterOutput` has a report."""

    def __init__(self, recipe: Recipe, plan: Plan, folder: AtomicDir, fingerprint: str, resume: bool) -> None:
        self._recipe, self._plan, self._folder = recipe, plan, folder
        self._upload = folder.upload
        self._journal = Journal(folder.folder, fingerprint)
        resumed = self._journal.load() if resume and folder.upload is None else None
        self.finished: set[int] = set() if resumed is None else resumed
        """The blocks that an earlier run finished."""
        self.files = WeightFiles(plan, folder.folder, folder.out.name, recipe.output.shard_size)
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
        needed += sidecars(self._plan.inputs.template).nbytes + 1_000_000
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

    def merge(
        self,
        executor: Executor,
        statistics: Statistics,
        blocks: list[Block],
        options: MergeOptions,
        advance: Advance,
    ) -> None:
        """Merge blocks, and write them."""
        executor.merge(self._plan, statistics, blocks, self, options, advance)

    def put(self, merged: MergedBlock) -> None:
        """Write a block, then its line of the journal; may be called from several threads at once."""
        self.files.write(merged)
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

    def finish(self, statistics: Statistics) -> dict[str, int]:
        """Complete the weight files, copy the small files, and return the size of each weight file."""
        for writer in self.files.writers:
            writer.finish()
        if len(self.files.writers) > 1:
            write_curvature_card(self.files.writers[1].folder, what=MERGED_CURVATURE)
        template, folder = self._plan.inputs.template, self._folder.folder
        self._plan.note(sidecars(template).note(template.label))
        copy_sidecars(template, folder, config_dtype(self._recipe, self._plan))
        if self._plan.inputs.result_files is not None:
            self._plan.inputs.result_files.write(folder)
        folders = ((writer.folder.relative_to(folder), writer.sizes) for writer in self.files.writers)
        return {str(path / name): nbytes for path, sizes in folders for name, nbytes in sizes.items()}


def config_dtype(recipe: Recipe, plan: Plan) -> str:
    """Return the dtype for the result's config; `auto` if that of the template is right."""
    if recipe.output.dtype != "widest":
        return recipe.output.dtype
    merged, template = plan.merged_tensors, plan.inputs.template
    types = {info.dtype for info in merged.values()}
    unchanged = types == {template.tensors[name].dtype for name in merged}
    return "auto" if unchanged or len(types) != 1 else FLOATS[types.pop()]
