"""The workers of a merge on a Ray cluster. Each opens the merge once and keeps it open."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..errors import InputError, MachineError
from ..io.atomic_dir import MARK
from ..io.small_files import read_json
from ..recipe import make_recipe
from .build_plan import open_plan
from .executor import merge_blocks
from .fingerprint import files_read, fingerprint_of
from .input_state import State, state_of
from .jobs import Block, MergeOptions
from .journal import boot_id
from .output import WeightFiles
from .reduce import Advance, BlockFunction, reduce_blocks
from .statistics import Statistics
from .thread_pool import allow_many_files

#: Seconds until a worker must see the folder of the driver. Network file systems take a moment.
FOLDER_DELAY = 10.0

Range = tuple[str, int, int]
"""The name of a tensor, its first entry and one past the last."""


@dataclass(frozen=True)
class MergeTask:
    """A merge as the driver describes it to the workers."""

    recipe: dict[str, Any]
    recipe_folder: str
    """Where relative paths of the recipe start."""
    made: dict[str, str]
    """Results of named recipes."""
    plan_options: dict[str, Any]
    """Options of :func:`gradmerge.engine.build_plan.open_plan`."""
    block: int
    options: MergeOptions
    fingerprint: str
    state: State
    """Size and modification time of every input, as the driver sees them."""
    folder: str
    """The unfinished folder, in which the driver has created the files."""
    name: str
    """The name of the result."""
    shard_size: int
    threads: int
    run: str
    """The id of the driver's run, which is in the mark of the unfinished folder."""
    boot: str
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Return the versions that must be the same everywhere."""
    return {"gradmerge": __version__, "torch": torch.__version__}


class OpenMerge:
    """The plan and the output files of a merge in a worker process."""

    current: OpenMerge | None = None

    def __init__(self, task: MergeTask) -> None:
        self.task = task
        for package, version in versions().items():
            if version != task.versions[package]:
                required = task.versions[package]
                raise _unlike(f"{package} is {version}, but {required} on the driver. Install the same everywhere.")
        allow_many_files()
        recipe = make_recipe(task.recipe, folder=Path(task.recipe_folder), allow_code=True)
        recipe = recipe.with_made({name: Path(folder) for name, folder in task.made.items()})
        try:
            self.plan = open_plan(recipe, **task.plan_options)
        except InputError as error:
            raise _unlike(str(error)) from error
        self.plan.block = task.block
        state = state_of(files_read(self.plan))
        _check_same_state(task.state, state)
        if fingerprint_of(recipe, self.plan, task.state, task.options.allow_nonfinite) != task.fingerprint:
            raise _unlike("the recipe and its models are read differently. Install the same packages everywhere.")
        self.files = WeightFiles(self.plan, Path(task.folder), task.name, task.shard_size)
        self.check_folder()

    def check_folder(self) -> None:
        """Raise unless the unfinished folder is the one of this run."""
        deadline = time.monotonic() + FOLDER_DELAY
        while _run_of(self.task.folder) != self.task.run:
            if time.monotonic() > deadline:
                raise _unlike(
                    f"{self.task.folder}: is not the folder of this merge. Choose an output on a file system that all "
                    "machines share under the same path, and do not start two merges to it."
                )
            time.sleep(0.2)

    def write(self, blocks: Sequence[Block], statistics: Statistics, advance: Advance) -> None:
        """Merge blocks and write them to the output."""
        # Open the files before checking the folder: a new driver changes the mark before it creates its files.
        self.files.open(dict.fromkeys(block.job.name for block in blocks))
        self.check_folder()
        threads, options = self.task.threads, self.task.options
        try:
            merge_blocks(
                self.plan,
                statistics,
                self.files.write,
                blocks=blocks,
                threads=threads,
                options=options,
                advance=advance,
            )
        finally:
            # If this machine crashes, the journal, which the driver writes, must not name blocks that are lost.
            self.files.close(sync=not self.task.boot or self.task.boot != boot_id())

    @classmethod
    def of(cls, task: MergeTask) -> OpenMerge:
        """Return the merge that this process has open, or open it."""
        if cls.current is None or cls.current.task.run != task.run:
            if cls.current is not None:
                cls.current.plan.inputs.close()
                cls.current = None
            cls.current = cls(task)
        return cls.current


class MergeWorker:
    """A process of the cluster. Ray starts it again if it dies."""

    def open(self, task: MergeTask) -> None:
        """Open a merge, and raise if this machine differs from the driver's."""
        with translated_errors():
            OpenMerge.of(task)

    def run(
        self,
        task: MergeTask,
        function: BlockFunction | None,
        ranges: Sequence[Range],
        statistics: Statistics | None,
        damping: float | None,
    ) -> tuple[Any, int]:
        """Reduce ``function`` over ranges of tensors, or without a function, merge them and write them to the output.

        Returns:
            The sum of the function's results (None for a merge), and the number of bytes read.
        """
        read: list[int] = []
        with translated_errors():
            merge = OpenMerge.of(task)
            merge.plan.inputs.mean_curvature = damping
            jobs = merge.plan.by_name
            blocks = [Block(number, jobs[name], start, stop) for number, (name, start, stop) in enumerate(ranges)]
            if function is not None:
                return reduce_blocks(merge.plan, function, blocks, task.threads, read.append), sum(read)
            assert statistics is not None
            merge.write(blocks, statistics, read.append)
            return None, sum(read)


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Raise errors of the machine as MachineError, with its name."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{error.filename or 'file'} on {platform.node()}: {error.strerror or error}") from error
    except MemoryError as error:
        raise MachineError(f"{platform.node()}: out of memory. Use fewer workers or threads.") from error


def sign_folder(folder: Path, run: str) -> None:
    """Write the id of a run into the mark of its unfinished folder."""
    try:
        mark = read_json(folder / MARK, 1000)
        (folder / MARK).write_text(json.dumps({**mark, "run": run}))
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written: {error.strerror}") from error


def _run_of(folder: str) -> str:
    try:
        return str(read_json(Path(folder) / MARK, 1000)["run"])
    except (InputError, KeyError):
        return ""


def _check_same_state(driver: State, here: State) -> None:
    """Raise if a file differs from the driver's in size or modification time. Inodes may differ."""
    states = {entry[0]: entry[1:3] for entry in here}
    for path, *state in driver:
        if not states.get(path):
            raise _unlike(f"{path}: does not exist")
        if states[path] != state[:2]:
            raise _unlike(f"{path}: differs from the driver's file in size or modification time")


def _unlike(message: str) -> InputError:
    advice = "All workers read the inputs and write the output under the same paths as the driver."
    return InputError(f"worker on {platform.node()}: {message}\n  {advice}")
