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
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..checkpoints.lora import AdapterCheckpoint
from ..checkpoints.model import Checkpoint
from ..checkpoints.sidecars import copy_sidecars, sidecars
from ..curvature.files import STEM, metadata
from ..engine import BLOCK, Plan, Statistics, Unit, Watch, begin_search, measure, run
from ..engine.journal import Finished, Journal
from ..engine.memory import keep_freed_memory
from ..engine.opening import open_plan
from ..engine.progress import NoProgress, Progress
from ..engine.trust import judge_removal
from ..engine.workers import one_thread_each
from ..errors import InputError, MachineError
from ..recipe import Recipe, load_recipe, make_recipe
from ..report.card import model_card
from ..storage.bytesof import bytes_of
from ..storage.smallfile import MAX_TOKENIZER, read_json
from ..storage.staging import Staging
from ..storage.tensorwriter import TensorWriter
from ..text import to_json
from .reads import State, changed, recipe_paths, state_of
from .record import merge_record

RECORD = "gradmerge.json"


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
    accept_untrusted: bool = False,
    durable: bool = False,
    progress: Progress | None = None,
    block: int = BLOCK,
) -> MergeResult:
    """Merge checkpoints as a recipe says and write the result to the folder ``out``.

    Everything is streamed: memory depends on the number of models and threads, not on their size. The folder appears
    under its name when it is complete; until then the work is in ``OUT.gradmerge-partial``, and ``resume`` goes on from there.
    The bytes of the weights depend on the inputs and the recipe alone. Models whose configs make another function of the
    weights are refused, but for differences in the keys ``allow_config``; a removal whose step cannot be trusted is refused unless
    ``accept_untrusted``. With ``durable`` the folder is on the disk before it gets its name.
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
        progress = progress or NoProgress()
        files = _files(plan)
        state = state_of(files)
        fingerprint = _fingerprint(recipe, plan, state, allow_nonfinite)
        if resume and _is_complete(out, fingerprint):
            copied = len(plan.jobs) - len(plan.merged)
            return MergeResult(out, len(plan.merged), copied, 0, 0, 0.0, plan.notes, already_done=True)
        reads = [*recipe_paths(recipe), *files]
        with Staging(out, "merge", force=force, resume=resume, reads=reads, durable=durable) as staging:
            staging.keep = resume
            if resume and Journal(staging.folder, fingerprint).belongs_to_another_merge():
                raise InputError(
                    f"{staging.folder}: the unfinished merge there is of another recipe, or its inputs have changed since. "
                    "Run without --resume to start over."
                )
            plan.notes += staging.notes
            plan.notes += judge_removal(plan, threads, progress, refuse=not accept_untrusted)
            plan.notes += sidecars(plan.inputs.template).note(plan.inputs.template.label)
            with _Output(recipe, plan, staging, fingerprint, resume) as output:
                output.merge(threads, device, allow_nonfinite, progress)
                if path := changed(state, state_of(files)):
                    staging.keep = False
                    raise MachineError(
                        f"{path}: changed during the merge, so that the result may be a mixture. Nothing was written; merge again."
                    )
                return output.finish()


def _files(plan: Plan) -> list[Path]:
    """Every file that the result depends on: weights, curvature, configs, and what is copied along."""
    files = [*plan.inputs.files(), *sidecars(plan.inputs.template).copied.values()]
    folders = {c.folder for checkpoint in plan.inputs.checkpoints for c in _with_bases(checkpoint)} - {None}
    configs = [folder / name for folder in folders if folder for name in ("config.json", "adapter_config.json")]
    return files + [path for path in configs if path.is_file()]


def _with_bases(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """A checkpoint, and what an adapter goes on top of."""
    yield checkpoint
    if isinstance(checkpoint, AdapterCheckpoint):
        yield from _with_bases(checkpoint.base)


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


def _fingerprint(recipe: Recipe, plan: Plan, files: State, allow_nonfinite: bool) -> str:
    """What the bytes of the result depend on: the recipe, and the inputs by path, size, times of change and inode."""
    content = {
        "version": __version__,
        "recipe": recipe.model_dump(mode="json"),
        "files": files,
        "block": plan.block,
        "allow_nonfinite": allow_nonfinite,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_complete(out: Path, fingerprint: str) -> bool:
    """Whether a folder is what this merge would write: by its record, and the sizes of the files that it names."""
    try:
        record = read_json(out / RECORD, MAX_TOKENIZER)
        sizes = record["output"]["sizes"].items()
        return bool(record["fingerprint"] == fingerprint) and all(
            (out / name).stat().st_size == nbytes for name, nbytes in sizes
        )
    except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


class _Output:
    """The result of a merge on disk: weights, curvature, small files, record and card, under a journal."""

    def __init__(self, recipe: Recipe, plan: Plan, staging: Staging, fingerprint: str, resume: bool) -> None:
        self.recipe, self.plan, self.staging, self.fingerprint = recipe, plan, staging, fingerprint
        self.journal = Journal(staging.folder, fingerprint)
        self.resume = resume
        self._sources = plan.inputs.sources
        self._started = time.perf_counter()
        shard_size = recipe.output.shard_size
        modules = plan.inputs.template.modules
        self.writer = TensorWriter(staging.folder, "model", plan.tensors, shard_size, {"format": "pt"}, modules)
        self.precision: TensorWriter | None = None
        if plan.write_precision:
            likelihood = next((c.likelihood for c in plan.inputs.curvatures if c.likelihood), "empirical")
            header = metadata(plan.examples, likelihood, staging.out.name)
            self.precision = TensorWriter(staging.folder / STEM, STEM, plan.precision_tensors, shard_size, header)
        self._finished = Finished()
        self._timings = {"statistics": 0.0, "merge": 0.0}
        self._bytes_read = 0
        self._resumed = 0

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Keep unfinished work for --resume, unless going on could only fail again."""
        self.journal.close()
        self._close()
        if isinstance(error, InputError):
            self.staging.keep = False

    def _close(self) -> None:
        self.writer.close()
        if self.precision is not None:
            self.precision.close()

    def merge(self, threads: int, device: str, allow_nonfinite: bool, progress: Progress) -> None:
        """Run the plan. Where a sample tells the statistics, the merge begins with that guess and checks it as it goes."""
        plan = self.plan
        keep_freed_memory()
        self._finished = finished = self._open()
        self._resumed = len(finished.units)

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
            self._resumed = min(self._resumed, len(finished.units))
            self.journal.statistics(statistics)
        assert finished.statistics is not None
        merge_rest(finished.statistics)

    def _open(self) -> Finished:
        """Open the files and the journal, and say what an earlier run has finished."""
        finished = self.journal.load() if self.resume else None
        self.staging.keep = finished is not None
        if finished is None and self.resume:
            self.staging.clear()
        small = sidecars(self.plan.inputs.template).nbytes
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
        self.staging.keep = True
        return finished or Finished()

    def _sizes(self) -> dict[str, int]:
        """Bytes of every file of weights and curvature, by its name in the result."""
        precision = self.precision.sizes if self.precision is not None else {}
        return self.writer.sizes | {f"{STEM}/{name}": nbytes for name, nbytes in precision.items()}

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

    def finish(self) -> MergeResult:
        """Write what goes with the weights: index, small files, record and card."""
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
            self._sizes(),
            self._finished.units,
            self._timings | {"total": seconds},
            self._resumed,
        )
        (folder / RECORD).write_text(to_json(record) + "\n", "utf-8")
        card = model_card(self.recipe, self.staging.out.name, (folder / "config.json").is_file())
        (folder / "README.md").write_text(card, "utf-8")
        self.journal.remove()
        return result
