"""A merge, from its plan to the finished folder."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..cards.metadata import license_notes, read_all_metadata
from ..display import Displayed
from ..errors import MachineError
from ..io.atomic_dir import AtomicDir
from ..notes import Note
from ..progress import NoProgress, Progress
from ..recipe import Recipe, reduction_factor
from ..text import size
from .checks import check_step_size, checks_steps, coefficient_notes
from .executor import Executor, LocalExecutor
from .input_state import State, changed, files_read, fingerprint_of, is_complete, recipe_paths, state_of
from .jobs import MergeOptions
from .journal import NAME
from .output import Output
from .plan import Plan
from .statistics import compute_mean_curvature, compute_statistics
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
    executor: Executor = cluster or LocalExecutor(threads)
    factor = 1.0 / reduction_factor(recipe.reduction, plan.examples)
    options = MergeOptions(torch.device(device), allow_nonfinite, factor)
    files = files_read(plan)
    state = state_of(files)
    fingerprint = fingerprint_of(recipe, plan, state, allow_nonfinite)
    result = MergeResult(out, len(plan.merged_tensors), plan.copied_tensors, notes=plan.notes)
    if resume and is_complete(out, fingerprint):
        result.already_done = True
        return result

    with AtomicDir(out, "merge", force=force, resume=resume, reads=[*recipe_paths(recipe), *files]) as folder:
        folder.keep = resume
        output: Output | AdapterOutput
        if recipe.output.format == "adapter":
            from .adapter import AdapterOutput

            output = AdapterOutput(recipe, plan, folder, threads, options)
        else:
            output = Output(recipe, plan, folder, fingerprint, resume)
        if cluster is not None:
            cluster.begin(recipe, plan, folder, fingerprint, state, options)
        check_merge(recipe, plan, executor, progress, accept_untrusted)

        start = time.perf_counter()
        with output:
            left = output.open()
            if plan.statistics_read:
                progress.begin("computing statistics", plan.statistics_read)
            statistics = compute_statistics(plan, executor, progress.advance)
            blocks = sum(1 for _ in plan.blocks())
            done = plan.total_read * (blocks - len(left)) // max(1, blocks)
            progress.begin("merging", plan.total_read, done)
            output.merge(executor, statistics, left, options, progress.advance)
            sizes = output.finish(statistics)
        result.bytes_read = plan.statistics_read + plan.total_read - done
        check_unchanged(files, state, folder)

        result.output, result.bytes_written = folder.out, plan.total_written
        result.seconds = time.perf_counter() - start
        if (report := output.report) is not None:
            result.bytes_written, result.lost, result.lost_share = sum(sizes.values()), report.lost, report.lost_share
            plan.note(report.notes())
        write_cards(
            recipe,
            plan,
            folder,
            fingerprint=fingerprint,
            sizes=sizes,
            seconds=result.seconds,
            resumed=len(output.finished),
            report=report,
        )
        (folder.folder / NAME).unlink(missing_ok=True)
    return result


def check_merge(recipe: Recipe, plan: Plan, executor: Executor, progress: Progress, accept_untrusted: bool) -> None:
    """Compute the damping, check step size, coefficients and licenses, and add their notes to the plan."""
    if plan.damping_read:
        progress.begin("computing the damping", plan.merged_read)
    compute_mean_curvature(plan, executor, progress.advance)
    if checks_steps(plan):
        progress.begin("checking the step size", plan.merged_read)
    plan.note(check_step_size(plan, executor, progress.advance, refuse=not accept_untrusted))
    plan.note(coefficient_notes(recipe, plan, executor))
    plan.note(license_notes(read_all_metadata(plan.inputs.checkpoints), recipe.output.license))


def check_unchanged(files: list[Path], state: State, folder: AtomicDir) -> None:
    """Raise if an input has changed since its state was taken, and discard the result."""
    if path := changed(state, state_of(files)):
        folder.keep = False
        raise MachineError(
            f"{path}: changed during the merge, so that the result may be inconsistent. Nothing was written; merge "
            "again."
        )
