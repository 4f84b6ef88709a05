"""A merge, from its plan to the finished folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..cards.metadata import license_notes, read_all_metadata
from ..display import Displayed
from ..errors import InputError, MachineError
from ..io.atomic_dir import AtomicDir
from ..notes import Note
from ..progress import NoProgress, Progress
from ..recipe import Recipe, reduction_factor
from ..text import size
from .coefficients import coefficient_notes
from .damping import find_damping
from .executor import LocalExecutor
from .fingerprint import files_read, fingerprint_of, is_complete
from .input_state import State, changed, recipe_paths, state_of
from .jobs import MergeOptions
from .journal import Journal
from .output import Output
from .plan import Plan
from .reduce import Reduce
from .statistics import compute_statistics
from .step_size import check_step_size
from .write_cards import write_cards

if TYPE_CHECKING:
    from .adapter import AdapterOutput
    from .on_ray import RayCluster


@dataclass(repr=False)
class MergeResult(Displayed):
    """The result of a merge; sizes are in bytes."""

    output: Path
    merged: int
    """The number of tensors that went through the rule."""
    copied: int
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    notes: list[Note] = field(default_factory=list)
    already_done: bool = False
    lost: dict[str, float] = field(default_factory=dict)
    """For an adapter: the share of each tensor's change (squared Frobenius norm) that its rank cannot represent."""
    lost_share: float | None = None
    """For an adapter: the same over all tensors together."""

    def _line(self) -> list[str]:
        done = "complete already" if self.already_done else f"{size(self.bytes_written)} in {self.seconds:.1f} s"
        return [str(self.output), f"{self.merged} tensors merged", f"{self.copied} copied", done]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        lost = {} if self.lost_share is None else {"lost_share": self.lost_share, "lost": self.lost}
        return {
            "output": str(self.output),
            "merged_tensors": self.merged,
            "copied_tensors": self.copied,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "seconds": round(self.seconds, 3),
            "already_done": self.already_done,
            **lost,
            "notes": self.notes,
        }


def merge_to_folder(
    recipe: Recipe,
    plan: Plan,
    out: Path,
    *,
    threads: int = 1,
    device: str = "cpu",
    force: bool = False,
    resume: bool = False,
    allow_nonfinite: bool = False,
    accept_untrusted: bool = False,
    progress: Progress | None = None,
    cluster: RayCluster | None = None,
) -> MergeResult:
    """Merge as planned, on this machine or on a cluster, and write the folder ``out``: a model or an adapter.

    The weights are written to a temporary folder, with a journal of finished blocks. ``resume`` continues an unfinished
    merge with the same fingerprint: the recipe, and the state of every input file. The folder is renamed when complete.
    """
    progress = progress or NoProgress()
    executor = cluster or LocalExecutor(threads)
    factor = 1.0 / reduction_factor(recipe.reduction, plan.examples)
    options = MergeOptions(torch.device(device), allow_nonfinite, factor)
    files = files_read(plan)
    state = state_of(files)
    fingerprint = fingerprint_of(recipe, plan, state, allow_nonfinite)
    result = MergeResult(out, len(plan.merged_tensors), plan.copied_tensors, notes=plan.notes)
    if resume and is_complete(out, fingerprint):
        result.already_done = True
        return result

    timings = {"statistics": 0.0, "merge": 0.0, "total": 0.0}
    with AtomicDir(out, "merge", force=force, resume=resume, reads=[*recipe_paths(recipe), *files]) as folder:
        folder.keep = resume
        journal = journal_in(folder, fingerprint, resume)
        plan.note(folder.notes)
        if cluster is not None:
            cluster.begin(recipe, plan, folder, fingerprint, state, options)
        output: Output | AdapterOutput
        if recipe.output.format == "adapter":
            from .adapter import AdapterOutput

            output = AdapterOutput(recipe, plan, folder, journal, threads, options)
        else:
            output = Output(recipe, plan, folder, journal)
        check_merge(recipe, plan, executor.reduce, progress, accept_untrusted)

        with timed(timings, "total"), output:
            finished = output.open(resume)
            resumed = len(finished.blocks)
            statistics = finished.statistics
            if statistics is None:
                if plan.statistics_read:
                    progress.begin("computing statistics", plan.statistics_read)
                with timed(timings, "statistics"):
                    statistics = compute_statistics(plan, executor.reduce, progress.advance)
                journal.statistics(statistics)
                result.bytes_read += plan.statistics_read
            with timed(timings, "merge"):
                left = output.start(statistics, finished)
                blocks = sum(1 for _ in plan.blocks())
                done = plan.total_read * (blocks - len(left)) // max(1, blocks)
                progress.begin("merging", plan.total_read, done)
                executor.merge(plan, statistics, left, output, options, progress.advance)
                sizes = output.finish()
            result.bytes_read += plan.total_read - done
            check_unchanged(files, state, folder)

        result.output, result.bytes_written, result.seconds = folder.out, plan.total_written, timings["total"]
        if (report := output.report) is not None:
            result.bytes_written, result.lost, result.lost_share = sum(sizes.values()), report.lost, report.lost_share
            plan.note(report.notes())
        if cluster is not None:
            timings["start"] = cluster.seconds
        write_cards(
            recipe,
            plan,
            folder.folder,
            folder.out,
            fingerprint=fingerprint,
            sizes=sizes,
            timings=timings,
            resumed=resumed,
            adapter_base=report.base if report else None,
            adapter_facts=report.record() if report else None,
            adapter_text=report.card_text() if report else "",
        )
        if folder.upload is None:  # otherwise it is needed until everything is uploaded
            journal.remove()
    return result


def journal_in(folder: AtomicDir, fingerprint: str, resume: bool) -> Journal:
    """Return the journal of a temporary folder; raise when resuming a different merge."""
    journal = Journal(folder.folder, fingerprint)
    if resume and journal.belongs_to_another_merge():
        raise InputError(
            f"{folder.folder}: the unfinished merge there has another recipe, or its inputs have changed since. "
            "Merge without resume (--resume) to start over."
        )
    return journal


def check_merge(recipe: Recipe, plan: Plan, reduce: Reduce, progress: Progress, accept_untrusted: bool) -> None:
    """Compute the damping, check step size, coefficients and licenses, and add their notes to the plan."""
    if plan.damping_read:
        progress.begin("computing the damping", plan.merged_read)
    find_damping(plan, reduce, progress.advance)
    if "step-size" in plan.rule.checks:
        progress.begin("checking the step size", plan.merged_read)
    plan.note(check_step_size(plan, reduce, progress.advance, refuse=not accept_untrusted))
    plan.note(coefficient_notes(recipe, plan, reduce))
    plan.note(license_notes(read_all_metadata(plan.inputs.checkpoints), recipe.output.license))


def check_unchanged(files: list[Path], state: State, folder: AtomicDir) -> None:
    """Raise if an input has changed since its state was taken, and discard the result."""
    if path := changed(state, state_of(files)):
        folder.keep = False
        raise MachineError(
            f"{path}: changed during the merge, so that the result may be inconsistent. Nothing was written; merge "
            "again."
        )


@contextmanager
def timed(timings: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the ``with`` block takes."""
    start = time.perf_counter()
    yield
    timings[name] += time.perf_counter() - start
