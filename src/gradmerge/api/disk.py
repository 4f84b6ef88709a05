"""Merging from disk to disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .._version import __version__
from ..checkpoints.sidecars import copy_sidecars, sidecars
from ..curvature.files import STEM, metadata
from ..engine import BLOCK, Inputs, Plan, Statistics, Unit, Watch, begin_search, measure, run
from ..engine.journal import Finished, Journal
from ..engine.memory import keep_freed_memory
from ..engine.opening import open_plan
from ..engine.trust import trust_notes
from ..engine.workers import one_thread_each
from ..errors import InputError
from ..recipe import Recipe, load_recipe, make_recipe
from ..report.card import model_card
from ..storage.bytesof import bytes_of
from ..storage.staging import Staging
from ..storage.tensorwriter import TensorWriter
from .record import merge_record

RECORD = "gradmerge.json"


class Progress(Protocol):
    """Told what is being done and how far it is, in bytes."""

    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, nbytes: int) -> None: ...


class NoProgress:
    def begin(self, what: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass


@dataclass
class MergeResult:
    """What a merge did."""

    output: Path
    merged: int
    """Number of tensors that went through the rule."""
    copied: int
    bytes_read: int
    bytes_written: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    already_done: bool = False


def default_threads() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, 4)  # more wait for one another at the interpreter's lock


def as_recipe(recipe: str | Path | Recipe | Mapping[str, Any]) -> Recipe:
    """A recipe from a file, a mapping, or itself."""
    if isinstance(recipe, Recipe):
        return recipe
    return make_recipe(recipe) if isinstance(recipe, Mapping) else load_recipe(recipe)


@contextlib.contextmanager
def planned(
    recipe: str | Path | Recipe | Mapping[str, Any], *, allow_pickle: bool = False, allow_config: Sequence[str] = ()
) -> Iterator[Plan]:
    """The plan of a recipe, with its inputs open."""
    plan = open_plan(as_recipe(recipe), allow_pickle=allow_pickle, allow_config=allow_config)
    try:
        yield plan
    finally:
        plan.inputs.close()


def merge(
    recipe: str | Path | Recipe | Mapping[str, Any],
    out: str | Path,
    *,
    threads: int | None = None,
    device: str = "cpu",
    force: bool = False,
    resume: bool = False,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
    block: int = BLOCK,
) -> MergeResult:
    """Merge checkpoints as a recipe says and write the result to the folder ``out``.

    Everything is streamed: memory depends on the number of models and threads, not on their size. The folder appears
    under its name when it is complete; until then the work is in ``OUT.gradmerge-partial``, and ``resume`` goes on from there.
    The bytes of the weights depend on the inputs and the recipe alone. Models whose configs make another function of the
    weights are refused, but for differences in the keys ``allow_config``.
    """
    recipe = as_recipe(recipe)
    out = Path(out)
    if out.suffix == ".safetensors":
        raise InputError(f"{out}: the result is a folder; give a name without .safetensors")
    threads = threads or default_threads()
    _check_device(device)
    _allow_many_files()
    with planned(recipe, allow_pickle=allow_pickle, allow_config=allow_config) as plan:
        plan.block = block
        fingerprint = _fingerprint(recipe, plan, allow_nonfinite)
        if resume and _is_complete(out, fingerprint):
            return MergeResult(
                out,
                len(plan.merged),
                len(plan.jobs) - len(plan.merged),
                0,
                0,
                0.0,
                plan.notes,
                already_done=True,
            )
        plan.notes += trust_notes(plan)
        staging = Staging(
            out,
            force=force,
            keep=resume,
            inputs=[*plan.inputs.files(), *_folders(plan.inputs), *([recipe.file] if recipe.file else [])],
        )
        if resume and Journal(staging.folder, fingerprint).belongs_to_another_merge():
            staging.leave()
            raise InputError(
                f"{staging.folder}: the unfinished merge there is of another recipe, or its inputs have changed since. "
                "Run without --resume to start over."
            )
        with _Output(recipe, plan, staging, fingerprint, resume) as output:
            return output.merge(threads, device, allow_nonfinite, progress or NoProgress())


def _folders(inputs: Inputs) -> list[Path]:
    return [c.folder for c in inputs.checkpoints if c.folder is not None]


def _allow_many_files() -> None:
    """Every shard stays open; large models have more of them than a process may open by default."""
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"device {device!r}: not a device such as cpu, cuda or cuda:1") from None
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {device!r}: this machine has no such CUDA device that PyTorch can use; take cpu")
    if kind not in ("cpu", "cuda"):
        raise InputError(f"device {device!r}: merges run on cpu or cuda")


def _fingerprint(recipe: Recipe, plan: Plan, allow_nonfinite: bool) -> str:
    """What the bytes of the result depend on: the recipe, and the inputs by path, size and time of change."""
    files = []
    for path in plan.inputs.files():
        status = path.stat()
        files.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
    content = {
        "version": __version__,
        "recipe": recipe.model_dump(mode="json"),
        "files": files,
        "block": plan.block,
        "allow_nonfinite": allow_nonfinite,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_complete(out: Path, fingerprint: str) -> bool:
    try:
        return bool(json.loads((out / RECORD).read_text("utf-8"))["fingerprint"] == fingerprint)
    except (OSError, ValueError, KeyError, TypeError):
        return False


class _Output:
    """The result of a merge on disk: weights, curvature, small files, record and card, under a journal."""

    def __init__(self, recipe: Recipe, plan: Plan, staging: Staging, fingerprint: str, resume: bool) -> None:
        self.recipe, self.plan, self.staging, self.fingerprint = recipe, plan, staging, fingerprint
        self.journal = Journal(staging.folder, fingerprint)
        self.resume = resume
        self._sources = plan.inputs.sources
        self._started = time.perf_counter()
        self._working = False
        shard_size = recipe.output.shard_size
        self.writer = TensorWriter(staging.folder, "model", plan.tensors, shard_size, {"format": "pt"})
        self.precision: TensorWriter | None = None
        if plan.write_precision:
            likelihood = next((c.likelihood for c in plan.inputs.curvatures if c.likelihood), "empirical")
            header = metadata(plan.examples, likelihood, staging.out.name)
            self.precision = TensorWriter(staging.folder / STEM, STEM, plan.precision_tensors, shard_size, header)
        self._finished = Finished()
        self._timings = {"statistics": 0.0, "merge": 0.0}
        self._bytes_read = 0

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Keep unfinished work for --resume, unless going on could only fail again."""
        if kind is None:
            return
        self.journal.close()
        self._close()
        if not self._working or isinstance(error, InputError):
            self.staging.discard()
        else:
            self.staging.leave()

    def _close(self) -> None:
        self.writer.close()
        if self.precision is not None:
            self.precision.close()

    def merge(self, threads: int, device: str, allow_nonfinite: bool, progress: Progress) -> MergeResult:
        """Run the plan. Where a sample tells the statistics, the merge begins with that guess and checks it as it goes."""
        plan = self.plan
        keep_freed_memory()
        self._finished = finished = self._open()
        resumed = len(finished.units)

        def merge_rest(statistics: dict[str, Any], watch: Watch | None = None) -> None:
            units = list(plan.units())
            left = [unit for unit in units if unit.number not in finished.units]
            if not left:
                return
            total = plan.total_read
            done = total * (len(units) - len(left)) // len(units)
            progress.begin("merging", total, done)
            self._bytes_read += total - done
            with self._timed("merge"):
                run(
                    plan,
                    Statistics.from_json(statistics),
                    self,
                    units=left,
                    threads=threads,
                    device=device,
                    allow_nonfinite=allow_nonfinite,
                    precision_factor=float(plan.examples) if self.recipe.reduction == "mean" else 1.0,
                    advance=progress.advance,
                    watch=watch,
                )

        search = None
        if finished.statistics is None and finished.guess is None:
            with self._timed("statistics"), one_thread_each():
                search = begin_search(plan)
        if search is not None and search.guess is not None:
            finished.guess = Statistics({"": search.guess}).to_json()
            self.journal.guess(finished.guess)
            try:
                merge_rest(finished.guess, search.count)
                search.end_pass()
            except InputError:  # which a wrong guess may have caused, and the right statistics would not
                search = None
        if finished.statistics is None:
            if plan.statistics_read and (search is None or search.thresholds is None):
                progress.begin("measuring", plan.statistics_read)
                self._bytes_read += plan.statistics_read
            with self._timed("statistics"), one_thread_each():
                statistics = measure(plan, threads, progress.advance, search).to_json()
            finished.know(statistics)
            resumed = min(resumed, len(finished.units))
            self.journal.statistics(statistics)
        assert finished.statistics is not None
        merge_rest(finished.statistics)
        return self._finish(resumed)

    def _open(self) -> Finished:
        """Open the files and the journal, and say what an earlier run has finished."""
        finished = self.journal.load() if self.resume else None
        if finished is not None:
            self._working = True
        elif self.resume:
            self.staging.clear()
        small = sum(path.stat().st_size for path in sidecars(self.plan.inputs.template))
        self.staging.require_space(
            self.writer.nbytes + (self.precision.nbytes if self.precision else 0) + small + 1_000_000
        )
        all_there = self.writer.open()
        if self.precision is not None:
            self.precision.folder.mkdir(exist_ok=True)
            all_there &= self.precision.open()
        if not all_there:
            finished = None
        self.journal.open(fresh=finished is None)
        self._working = True
        return finished or Finished()

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._timings[what] += time.perf_counter() - begun

    # What `run` calls, from several threads at once.

    def write(self, name: str, start: int, block: Tensor) -> None:
        self.writer.write(name, start, bytes_of(block.contiguous()))

    def write_precision(self, name: str, start: int, block: Tensor) -> None:
        assert self.precision is not None
        self.precision.write(name, start, bytes_of(block.contiguous()))

    def done(self, unit: Unit, digests: dict[int, int]) -> None:
        record = [digests.get(id(source), -1) for source in self._sources]
        self.journal.unit(unit.number, record)
        self._finished.units[unit.number] = record

    def _finish(self, resumed: int) -> MergeResult:
        plan, folder = self.plan, self.staging.folder
        self.writer.finish()
        if self.precision is not None:
            self.precision.finish()
        copy_sidecars(plan.inputs.template, folder, self.recipe.output.dtype)
        seconds = time.perf_counter() - self._started
        result = MergeResult(
            self.staging.out,
            len(plan.merged),
            len(plan.jobs) - len(plan.merged),
            self._bytes_read,
            plan.total_written,
            seconds,
            plan.notes,
        )
        record = merge_record(
            self.recipe,
            plan,
            self.fingerprint,
            self.writer.filenames,
            self._finished.units,
            self._timings | {"total": seconds},
            resumed,
        )
        (folder / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", "utf-8")
        card = model_card(self.recipe, self.staging.out.name, (folder / "config.json").is_file())
        (folder / "README.md").write_text(card, "utf-8")
        self.journal.remove()
        self.staging.finish()
        return result
