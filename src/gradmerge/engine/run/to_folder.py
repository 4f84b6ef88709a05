"""The whole of a merge, from its plan to the finished folder."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..._version import __version__
from ...cards.metadata import RECORD, license_notes, read_all_metadata
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.layers.stack import StackedCheckpoint
from ...checkpoints.sidecars import copy_sidecars, sidecars
from ...checkpoints.views import beneath
from ...display import Displayed
from ...errors import InputError, MachineError
from ...io.atomic_dir import AtomicDir
from ...io.reader import FLOATS, local_path
from ...io.small_files import MAX_TOKENIZER, read_json
from ...notes import Note
from ...progress import NoProgress, Progress
from ...recipe import Recipe, reduction_factor
from ...text import size
from ...urls import is_url
from ..checks.coefficients import coefficient_notes
from ..checks.damping import find_damping
from ..checks.step_size import judge_removal
from ..input_state import State, changed, recipe_paths, state_of
from ..plan.penalties import PENALTY
from ..plan.plan import Plan
from .executor import run
from .journal import Journal
from .output import Target
from .spreading import Spread
from .statistics import Counting, Statistics, ThresholdSearches, begin_search, find_statistics
from .write_cards import write_cards

if TYPE_CHECKING:
    from ..ray.cluster import RayCluster


@dataclass(repr=False)
class MergeResult(Displayed):
    """What a merge did; sizes are in bytes."""

    output: Path
    merged: int
    """Number of tensors that went through the rule."""
    copied: int
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    notes: list[Note] = field(default_factory=list)
    already_done: bool = False
    lost: dict[str, float] = field(default_factory=dict)
    """Of an adapter: the share of each tensor's change, as squared Frobenius norm, that its rank does not hold."""
    lost_share: float | None = None
    """Of an adapter: the same over all tensors together."""

    def _line(self) -> list[str]:
        done = "complete already" if self.already_done else f"{size(self.bytes_written)} in {self.seconds:.1f} s"
        return [str(self.output), f"{self.merged} tensors merged", f"{self.copied} copied", done]


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
    """Run the plan of a recipe, here or on a cluster, and write the folder ``out``, in these steps:

    1. Everything that the bytes of the result depend on goes into a fingerprint. With ``resume``, a folder that has it
       is complete already, and an unfinished one is gone on with.
    2. A folder beside OUT is staged. The journal in it names every unit (a block of one tensor) that is written.
    3. A removal finds its damping where the recipe leaves it open. One whose step is too long to be trusted is refused.
    4. A rule that needs statistics (thresholds, angles) gets them. Where a sample tells the thresholds, the merge
       begins with this guess and counts on the way whether it is right; if so, that was the only pass over the inputs.
       Tensors for which it was wrong are merged again.
    5. Every unit that is left goes through the rule, to the files, and into the journal.
    6. If no input has changed meanwhile, what goes with the weights is written: indexes, small files such as the
       tokenizer's, the record gradmerge.json, and the model card. Then the folder gets its name.
    """
    progress = progress or NoProgress()
    template = plan.inputs.template
    files = files_read(plan)
    state = state_of(files)
    fingerprint = fingerprint_of(recipe, plan, state, allow_nonfinite)
    result = MergeResult(out, len(plan.merged), len(plan.jobs) - len(plan.merged), notes=plan.notes)
    if resume and is_complete(out, fingerprint):
        result.already_done = True
        return result

    reads = [*recipe_paths(recipe), *files]
    with AtomicDir(out, "merge", force=force, resume=resume, reads=reads) as staging:
        staging.keep = resume
        journal = journal_in(staging, fingerprint, resume)
        plan.note(staging.notes)
        if cluster is not None:
            cluster.begin(recipe, plan, staging, fingerprint, state, not allow_nonfinite)
        spread = None if cluster is None else cluster.spread
        prepare(recipe, plan, threads, progress, accept_untrusted, spread)
        plan.note(sidecars(template).note(template.label))

        timings = {"statistics": 0.0, "merge": 0.0, "total": 0.0}
        with timed(timings, "total"), Target(plan, staging, journal, recipe.output.shard_size) as target:
            finished = target.open(resume)
            resumed = len(finished.units)
            units = list(plan.units())

            def merge_units(statistics: Statistics, search: ThresholdSearches | None = None) -> None:
                """Merge the units that are left; ``search`` is told what is counted on the way."""
                left = [unit for unit in units if unit.number not in finished.units]
                if not left:
                    return
                done = plan.total_read * (len(units) - len(left)) // len(units)
                progress.begin("merging", plan.total_read, done)
                result.bytes_read += plan.total_read - done
                with timed(timings, "merge"):
                    if cluster is not None:
                        cluster.merge(plan, target, left, statistics, search, progress.advance)
                        return
                    counting = None if search is None else Counting(search.looks_for)
                    run(
                        plan,
                        statistics,
                        target.put,
                        units=left,
                        threads=threads,
                        device=device,
                        allow_nonfinite=allow_nonfinite,
                        precision_factor=1.0 / reduction_factor(recipe.reduction, plan.examples),
                        advance=progress.advance,
                        watch=None if counting is None else counting.count,
                    )
                    if search is not None and counting is not None:
                        search.add(counting.counts)

            def find(search: ThresholdSearches | None) -> Statistics:
                """The statistics; those that ``search`` has guessed as they are."""
                nbytes = plan.statistics_read if search is None else sum(map(plan.bytes_read, search.left))
                if nbytes:
                    progress.begin("finding statistics", nbytes)
                    result.bytes_read += nbytes
                with timed(timings, "statistics"):
                    return find_statistics(plan, threads, progress.advance, search, spread)

            search = None
            if finished.statistics is None and finished.guess is None:
                with timed(timings, "statistics"):
                    search = begin_search(plan, threads, spread)
            if search is not None and search.guessed:
                finished.guess = find(search)
                journal.guess(finished.guess)
                try:
                    merge_units(finished.guess, search)
                    search.end_pass()
                except InputError:  # a wrong guess may be the cause: try with the right statistics
                    search = None
            if finished.statistics is None:
                statistics = find(search)
                again = finished.know(statistics, units)
                resumed = min(resumed, len(finished.units))
                journal.statistics(statistics, again)
            assert finished.statistics is not None
            target.settle()
            merge_units(finished.statistics)

            if path := changed(state, state_of(files)):
                staging.keep = False
                raise MachineError(
                    f"{path}: changed during the merge, so that the result may be a mixture. Nothing was written; "
                    "merge again."
                )
            sizes = target.finish()
            copy_sidecars(template, staging.folder, _written_type(recipe, plan))
            if plan.inputs.result_files is not None:
                plan.inputs.result_files.write(staging.folder)
        result.output, result.bytes_written, result.seconds = staging.out, plan.total_written, timings["total"]
        if cluster is not None:
            timings["start"] = cluster.seconds
        write_cards(
            recipe,
            plan,
            staging.folder,
            staging.out,
            fingerprint=fingerprint,
            sizes=sizes,
            timings=timings,
            resumed=resumed,
        )
        if staging.upload is None:  # else it is needed until all has been sent
            journal.remove()
    return result


def journal_in(staging: AtomicDir, fingerprint: str, resume: bool) -> Journal:
    """The journal of a staged folder; refused if it is to be gone on with, and is of another merge."""
    journal = Journal(staging.folder, fingerprint)
    if resume and journal.belongs_to_another_merge():
        raise InputError(
            f"{staging.folder}: the unfinished merge there is of another recipe, or its inputs have changed since. "
            "Run without --resume to start over."
        )
    return journal


def prepare(
    recipe: Recipe,
    plan: Plan,
    threads: int,
    progress: Progress,
    accept_untrusted: bool,
    spread: Spread | None = None,
) -> None:
    """What is found before any tensor is merged: the damping, and whether weights and steps can be trusted."""
    if plan.damping_read:
        progress.begin("finding the damping", plan.damping_read)
    find_damping(plan, threads, progress.advance, spread)
    plan.note(judge_removal(plan, threads, progress, refuse=not accept_untrusted, spread=spread))
    plan.note(coefficient_notes(recipe, plan, threads))
    plan.note(license_notes(read_all_metadata(plan.inputs.checkpoints), recipe.output.license))


def _written_type(recipe: Recipe, plan: Plan) -> str:
    """The type of the result for its config: `auto` if that of the template is right."""
    if recipe.output.dtype != "widest":
        return recipe.output.dtype
    types = {job.info.dtype for job in plan.merged}
    same = types == {plan.inputs.template.tensors[job.name].dtype for job in plan.merged}
    return "auto" if same or len(types) != 1 else FLOATS[types.pop()]


@contextmanager
def timed(timings: dict[str, float], what: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    timings[what] += time.perf_counter() - begun


def files_read(plan: Plan) -> list[Path]:
    """Every file that the result depends on: weights, curvature, configs, and what is copied along."""
    files = [*plan.inputs.files(), *sidecars(plan.inputs.template).copied.values()]
    files += plan.inputs.result_files.reads if plan.inputs.result_files else []
    folders = {c.folder for checkpoint in plan.inputs.checkpoints for c in _with_bases(checkpoint) if c.folder}
    configs = [folder / name for folder in folders for name in ("config.json", "adapter_config.json", PENALTY)]
    return files + [path for path in configs if path.is_file()]


def _with_bases(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """A checkpoint, what it is a view of or an adapter on top of, and what layers are taken from."""
    for below in beneath(checkpoint):
        yield below
        for part in below.parts if isinstance(below, StackedCheckpoint) else ():
            yield from _with_bases(part)


def fingerprint_of(recipe: Recipe, plan: Plan, files: State, allow_nonfinite: bool) -> str:
    """What the bytes of the result depend on: the recipe, and the inputs by path, size, times of change and inode."""
    made = {name: str(folder) for name, folder in recipe.made.items()}
    named = {name: read_json(Path(folder) / RECORD, MAX_TOKENIZER)["fingerprint"] for name, folder in made.items()}
    content = {
        "version": __version__,
        "recipe": recipe.to_dict(),
        "code": recipe.rule.digest,
        "named": named,
        "files": [entry for entry in files if not any(_within(entry[0], folder) for folder in made.values())],
        "block": plan.block,
        "allow_nonfinite": allow_nonfinite,
        "kinds": [[type(layer).__name__ for layer in beneath(c)] for c in plan.inputs.checkpoints],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _within(path: object, folder: str) -> bool:
    return Path(str(path)).is_relative_to(folder)


def is_complete(out: Path, fingerprint: str) -> bool:
    """Whether a folder is what this merge would write: by its record, and the sizes of the files that it names."""
    try:
        out = local_path(str(out), None) if is_url(out) else out
        record = read_json(out / RECORD, MAX_TOKENIZER)
        sizes = record["output"]["sizes"].items()
        return bool(record["fingerprint"] == fingerprint) and all(
            (out / name).stat().st_size == nbytes for name, nbytes in sizes
        )
    except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
