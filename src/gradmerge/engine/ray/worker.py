"""A worker's side of a merge on a cluster: it opens the plan itself, and writes its share of the files."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import GradmergeError, InputError, MachineError
from ...io.atomic_dir import MARK
from ...io.small_files import read_json
from ...recipe import make_recipe
from ..input_state import State, state_of
from ..plan.build import open_plan
from ..plan.jobs import MergeOptions
from ..plan.plan import Block
from ..run.executor import merge_blocks
from ..run.fingerprint import files_read, fingerprint_of
from ..run.output import WeightFiles
from ..run.reduce import BlockFunction, reduce_blocks
from ..run.statistics import Statistics
from ..thread_pool import allow_many_files

#: Seconds within which a folder that the driver has just made is to be seen: file systems of networks take a moment.
SEEN_WITHIN = 10.0


@dataclass(frozen=True)
class Order:
    """A merge as a worker is told of it."""

    recipe: dict[str, Any]
    folder: str
    """Where relative paths of the recipe start."""
    made: dict[str, str]
    """Results of named recipes."""
    allowed: dict[str, Any]
    """Options of :func:`gradmerge.engine.plan.build.open_plan`."""
    block: int
    allow_nonfinite: bool
    precision_factor: float
    fingerprint: str
    state: State
    """The driver's view of every file that is read."""
    staged: str
    """The folder that the driver has made, with the files that are written."""
    out: str
    shard_size: int
    run: str
    """Stands in the mark of the staged folder as long as this driver is at work there."""


Run = tuple[str, int, int]
"""The name of a tensor, its first entry and one past the last."""


class OpenOrder:
    """A merge that a worker has open."""

    def __init__(self, order: Order, here: bool) -> None:
        """``here``: on the driver's own machine."""
        allow_many_files()
        self._order, self._sync = order, not here
        recipe = make_recipe(order.recipe, folder=Path(order.folder), allow_code=True)
        recipe = recipe.with_made({name: Path(place) for name, place in order.made.items()})
        self.plan = open_plan(recipe, **order.allowed)
        self.plan.block = order.block
        try:
            _check_same(order.state, state_of(files_read(self.plan)))
            if fingerprint_of(recipe, self.plan, order.state, order.allow_nonfinite) != order.fingerprint:
                raise InputError("the recipe and its models are read differently there. Are all packages the same?")
            self._files = WeightFiles(self.plan, Path(order.staged), order.out, order.shard_size)
            self._check_staged()
        except BaseException:
            self.close()
            raise

    def _check_staged(self) -> None:
        """Stop unless the staged folder is the one that the driver has made, and still the driver's."""
        until = time.monotonic() + SEEN_WITHIN
        while _mark(self._order.staged) != self._order.run:
            if time.monotonic() > until:
                raise InputError(
                    f"{self._order.staged}: is not there as the merge has made it, so that the place of the result is "
                    "not shared with this machine. Choose an OUT on a file system that all of them have, under the "
                    "same path."
                )
            time.sleep(0.2)

    def do(
        self,
        function: BlockFunction | None,
        runs: Sequence[Run],
        statistics: Statistics | None,
        damping: float | None,
        threads: int,
    ) -> tuple[Any, int]:
        """Return the sum of a function over some blocks (without one, merge them), and how many bytes were read."""
        read: list[int] = []
        plan = self.plan
        plan.inputs.mean_curvature = damping
        jobs = plan.by_name
        blocks = [Block(number, jobs[name], start, stop) for number, (name, start, stop) in enumerate(runs)]
        if function is not None:
            return reduce_blocks(plan, function, blocks, threads, read.append), sum(read)
        # Files first, then the mark: whoever makes the folder anew sets his own mark before he makes any file.
        self._files.open(dict.fromkeys(name for name, _, _ in runs))
        if _mark(self._order.staged) != self._order.run:
            raise MachineError(f"{self._order.staged}: another merge has taken this folder over")
        assert statistics is not None
        try:
            merge_blocks(
                plan,
                statistics,
                self._files.write,
                blocks=blocks,
                threads=threads,
                options=MergeOptions(
                    allow_nonfinite=self._order.allow_nonfinite, precision_factor=self._order.precision_factor
                ),
                advance=read.append,
            )
        finally:
            # A machine that fails takes what it has not yet sent to the disk with it.
            self._files.close(sync=self._sync)
        return None, sum(read)

    def close(self) -> None:
        self.plan.inputs.close()


def _mark(folder: str) -> str:
    try:
        return str(read_json(Path(folder) / MARK, 1000)["run"])
    except (InputError, KeyError):
        return ""


def _check_same(there: State, here: State) -> None:
    """Stop if a file is another one than the driver's, by size and time of change; inodes may differ."""
    own = {entry[0]: entry[1:3] for entry in here}
    for path, *rest in there:
        if path not in own or not own[path]:
            raise InputError(f"{path}: is not there")
        if own[path] != rest[:2]:
            raise InputError(f"{path}: is another file than the driver's, by its size or time of change")


def opened(order: Order, here: bool) -> tuple[OpenOrder | None, int, str]:
    """A merge that is open, or the status and message of why it is not."""
    made, status, message = _guarded(lambda: OpenOrder(order, here))
    if status == 2:
        message += "\n  Every worker reads the inputs, and writes OUT, under the same paths as the driver."
    return made, status, message


def done(order: OpenOrder, sent: tuple[BlockFunction | None, Any], *share: Any) -> tuple[Any, int, str]:
    """What is found in a share of the work, or the status and message of why nothing is."""
    part, known = sent
    return _guarded(lambda: order.do(part, share[0], known, *share[1:]))


def _guarded(work: Callable[[], Any]) -> tuple[Any, int, str]:
    """What it gives, or why it fails as plain text: errors of libraries need not be known to the driver."""
    try:
        return work(), 0, ""
    except GradmergeError as error:
        return None, error.status, str(error)
    except MemoryError:
        return None, 1, "out of memory. Try fewer --workers or --threads."
    except OSError as error:
        return None, 1, f"{error.filename or 'file'}: {error.strerror or error}"
    except Exception as error:
        return None, 1, f"internal error: {type(error).__name__}: {error}\n{traceback.format_exc()}"
