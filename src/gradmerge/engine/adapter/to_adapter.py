"""A merge that is written as one LoRA adapter of its base."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from ...checkpoints.checkpoint import Checkpoint, is_same
from ...checkpoints.lora import AdapterCheckpoint
from ...errors import InputError
from ...io.atomic_dir import AtomicDir
from ...io.reader import TensorInfo
from ...progress import NoProgress, Progress
from ...recipe import Recipe
from ..input_state import recipe_paths, state_of
from ..plan.jobs import Job, LayerJob
from ..plan.plan import Plan
from ..run.executor import LocalExecutor
from ..run.fingerprint import files_read, fingerprint_of, is_complete
from ..run.journal import Finished
from ..run.merge import MergeResult, check_merge, check_unchanged, journal_in, timed
from ..run.statistics import compute_statistics
from ..run.write_cards import write_cards
from ..thread_pool import run_parallel
from .build import Changes
from .parts import FOLDER, join_parts
from .peft_config import lay_out


def merge_to_adapter(
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
) -> MergeResult:
    """Run the plan of a recipe and write what it changes of the base as a PEFT LoRA adapter, in these steps:

    1. As for a model: a fingerprint of all inputs, a staged folder with a journal, damping, trust, statistics.
    2. Tensor by tensor, one on each thread, the change is found and goes to a file of its own. Where the method is a
       weighted sum and the models are adapters of the base, the factors are put side by side, and no weight is read.
       Elsewhere the tensor goes through the rule, and its difference from the base is factored to the recipe's rank.
    3. What LoRA cannot hold, such as norms, goes in whole with its module. PEFT saves modules, not tensors: the other
       tensors of such a module, and the other names of a tied one, go in as well.
    4. One file is made of the parts, with the adapter's config, the record and the card, which say what was lost.
    """
    progress = progress or NoProgress()
    base = _base_of(recipe, plan)
    files = files_read(plan)
    state = state_of(files)
    fingerprint = fingerprint_of(recipe, plan, state, allow_nonfinite)
    result = MergeResult(out, len(plan.merged_tensors), 0, notes=plan.notes)
    if resume and is_complete(out, fingerprint):
        result.already_done = True
        return result

    stored = {name: info for job in plan.jobs for name, info in job.tensors.items()}
    # In float64, so that the difference from the base is not lost in the rounding of what it is added to.
    plan.jobs = [job if job.rule is None else in_float64(job) for job in plan.jobs]
    reduce = LocalExecutor(threads).reduce
    with AtomicDir(out, "merge", force=force, resume=resume, reads=[*recipe_paths(recipe), *files]) as at:
        at.keep = resume
        journal = journal_in(at, fingerprint, resume)
        timings = {"statistics": 0.0, "merge": 0.0, "total": 0.0}
        begun = time.perf_counter()
        finder = Changes(recipe, plan, base, stored, at.folder / FOLDER, device, allow_nonfinite)
        plan.note(at.notes)
        check_merge(recipe, plan, reduce, progress, accept_untrusted)
        finished = journal.load() if resume else None
        at.keep = finished is not None
        if finished is None:
            at.clear()
        journal.open(fresh=finished is None)
        finished = finished or Finished()
        try:
            at.keep = True
            if finished.statistics is None:
                if plan.statistics_read:
                    progress.begin("finding statistics", plan.statistics_read)
                    result.bytes_read += plan.statistics_read
                with timed(timings, "statistics"):
                    statistics = compute_statistics(plan, reduce, progress.advance)
                finished.statistics = statistics
                journal.statistics(statistics)
            finder.statistics = finished.statistics
            lock = threading.Lock()

            def find(job: Job) -> None:
                journal.blocks(finder.find(job))
                with lock:
                    progress.advance(plan.bytes_read(job))

            progress.begin("merging", plan.total_read)
            with timed(timings, "merge"):
                run_parallel(plan.merged, lambda: find, threads)
                adapter = lay_out(finder)
        except InputError:
            at.keep = False
            raise
        finally:
            journal.close()
        check_unchanged(files, state, at)
        sizes = join_parts(at.folder, adapter.entries)
        (at.folder / "adapter_config.json").write_text(json.dumps(adapter.config, indent=2) + "\n", "utf-8")
        shutil.rmtree(at.folder / FOLDER)
        timings["total"] = time.perf_counter() - begun
        result.output, result.bytes_written, result.seconds = at.out, sum(sizes.values()), timings["total"]
        result.bytes_read += finder.bytes_read
        result.lost, result.lost_share = adapter.lost, adapter.lost_share
        result.copied = plan.copied_tensors
        plan.note(adapter.notes())
        write_cards(
            recipe,
            plan,
            at.folder,
            at.out,
            fingerprint=fingerprint,
            sizes=sizes,
            timings=timings,
            resumed=len(finished.blocks),
            adapter_base=base,
            adapter_facts={"format": "adapter", **adapter.facts()},
            adapter_text=adapter.text(),
        )
        if at.upload is None:
            journal.remove()
    return result


def in_float64(job: Job) -> Job:
    """Return a job whose result is in float64."""
    wide = replace(job, info=TensorInfo("F64", job.info.shape), compute=torch.float64)
    if isinstance(wide, LayerJob) and wide.bias is not None:
        name, info = wide.bias
        return replace(wide, bias=(name, TensorInfo("F64", info.shape)))
    return wide


def _base_of(recipe: Recipe, plan: Plan) -> Checkpoint:
    """The model that the adapter will go on: the recipe's base, or the one that all of the adapters have."""
    if recipe.output.curvature:
        raise InputError("output.curvature: an adapter has no curvature of its own; write a model for that")
    if plan.inputs.base is not None:
        base = plan.inputs.base
    else:
        if recipe.exclude or recipe.include != ["*"]:
            raise InputError("output.format: with include or exclude, name the base that the other tensors come from")
        bases = [c.base for c in plan.inputs.tuned if isinstance(c, AdapterCheckpoint)]
        if len(bases) < len(plan.inputs.tuned) or not all(is_same(bases[0], other) for other in bases):
            raise InputError("output.format: an adapter goes on a base: name it in the recipe, as base")
        base = bases[0]
    if isinstance(base, AdapterCheckpoint):
        raise InputError(
            f"output.format: the base is itself an adapter on a model, {base.label}, and an adapter names a model. "
            "Merge it into its base first."
        )
    return base
