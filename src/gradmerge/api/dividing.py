"""Owners of rows, divided over the processes of one run; and an estimate that saves its sums now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from .._version import __version__
from ..curvature.batches import Placed
from ..curvature.curvature import Curvature
from ..curvature.estimate import estimate_curvature
from ..curvature.kronecker import KroneckerCurvature
from ..curvature.losses import ExampleLoss, TokenLoss, labels_of, loss_of
from ..curvature.together import Together, parts, without
from ..errors import InputError
from ..processes import Processes
from ..progress import Progress
from ..refinement.owners import DataOwner
from ..refinement.saving import Start
from ..refinement.splitting import RowBatches, as_batches, rows_in, share_of_rows, split_batches, split_rows
from ..refinement.teaching import TaughtLoss, Teacher, teacher_on_disk
from ..tasks import LoadedTask, measure
from ..tasks.metrics import Metrics
from .saved_sums import SavedSums


def what_all_see(loaded: LoadedTask) -> dict[str, Any]:
    """What must be the same in all processes, or their sums would mean nothing."""
    there = [
        p.detach()
        for p in loaded.model.parameters()
        if p.numel() and p.device.type != "meta" and not hasattr(p, "to_local")
    ]
    weights = sum(float(p.flatten()[0]) for p in there)
    return {"version of gradmerge": __version__, "number of rows": loaded.examples, "weights": repr(weights)}


def share_of(loaded: LoadedTask, group: Processes) -> Placed:
    """The batches of this process's rows."""
    mine = group.share(loaded.examples)
    places = range(mine.start, mine.stop, max(1, loaded.batch_size))
    return Placed(lambda: zip(places, loaded.batches(start=mine.start, end=mine.stop), strict=True))


def estimate_saving(
    loaded: LoadedTask,
    likelihood: str,
    start: tuple[Curvature | KroneckerCurvature, list[list[int]]] | None,
    saved: SavedSums | None,
    every: float,
    progress: Progress,
    group: Processes,
    **options: Any,
) -> Curvature | KroneckerCurvature:
    """The curvature of all rows, each process taking its share of those that ``start`` does not have.

    ``saved`` and ``start`` are the first process's. It saves the sums of all processes about ``every`` so many seconds.
    """
    sums, before = start if start is not None else (None, [])
    before = group.gather(before)[0]
    left = without(before, loaded.examples)
    number = sum(map(len, left))
    progress.begin("estimating", loaded.examples, loaded.examples - number)
    mine = parts([(stretch.start, stretch.stop) for stretch in left], group.share(number))
    done: list[list[int]] = []
    end, last, attempts = 0, time.monotonic(), 0

    def batches() -> Iterator[tuple[int, Any]]:
        nonlocal end, attempts
        attempts += 1
        if attempts > 1 and saved is not None:
            saved.remove()  # a formula turned out wrong, maybe already for the rows that are saved
        done.clear()
        for stretch in mine:
            done.append([stretch.start, stretch.start])
            end = stretch.start
            for batch in loaded.batches(start=stretch.start, end=stretch.stop):
                first, end = end, min(end + loaded.batch_size, stretch.stop)
                yield first, batch

    def each_batch(so_far: Any) -> None:
        progress.advance(end - done[-1][1])
        done[-1][1] = end

    def facts() -> list[list[int]]:
        nonlocal last
        last = time.monotonic()
        return done

    def save(so_far: Curvature | KroneckerCurvature, rows: list[list[list[int]]]) -> None:
        assert saved is not None
        saved.write(so_far, [*before, *(stretch for one in rows for stretch in one)])

    found: Curvature | KroneckerCurvature = estimate_curvature(
        loaded.model,
        Placed(batches),
        likelihood,
        output=loaded.output,
        device=loaded.device,
        start=sums,
        each_batch=each_batch,
        together=Together(
            group, lambda: time.monotonic() - last >= every, save, facts, shared=options["keeping"].shared
        ),
        **options,
    )
    return found


def owners_in_memory(
    model: nn.Module,
    data: Mapping[str, Any],
    *,
    valid: Mapping[str, Any],
    examples: Mapping[str, int],
    output: ExampleLoss | None,
    seed: int,
    progress: Progress,
    teachers: Mapping[str, Any],
    teaching: float,
) -> list[DataOwner]:
    """The owners of batches."""
    owners = []
    for name, given in data.items():
        if isinstance(given, str | Path):
            raise InputError(f"{name}: is {type(given).__name__}, but must be batches in memory, for a module")
        batches = as_batches(name, given)
        if name in valid:
            kept, held = batches, as_batches(f"valid {name}", valid[name])
        else:
            kept, held = split_batches(name, batches, seed)
        more: Any = {"output": output, "seed": seed, "advance": progress.advance}
        if name in teachers:
            loss = TaughtLoss(output or loss_of(model, labels_of(batches[0])), teaching)
            teacher = Teacher(name, teachers[name], loss)
            teacher.check(model, batches[0])
            if not isinstance(loss.given, TokenLoss):
                progress.begin(f"teacher of {name}", rows_in(kept) + rows_in(held))
            more["teacher"] = teacher
        owners.append(DataOwner(name, kept, held, examples=examples.get(name), **more))
    return owners


def owners_on_disk(
    start: Start,
    data: Mapping[str, str],
    valid: Mapping[str, str],
    examples: Mapping[str, int],
    seed: int,
    progress: Progress,
    group: Processes,
    teachers: Mapping[str, str] = MappingProxyType({}),
    teaching: float = 1.0,
) -> tuple[list[DataOwner], dict[str, RowBatches], list[str]]:
    """The owners, the rows held back of each, and notes on how rows were read; processes share the rows out."""
    owners, back, notes = [], {}, []
    for name, source in data.items():
        loaded = start.with_data(source)
        group.agree(what_all_see(loaded))
        if name in valid:
            apart = start.with_data(valid[name])
            kept, held = RowBatches(loaded, range(loaded.examples)), RowBatches(apart, range(apart.examples))
        else:
            apart = loaded
            rows, rows_held = split_rows(name, loaded.examples, seed)
            kept, held = RowBatches(loaded, rows), RowBatches(loaded, rows_held)
        stands_for = examples.get(name)
        more: Any = {"seed": seed, "advance": progress.advance, "processes": group}
        if name in teachers:
            more["teacher"] = teacher_on_disk(start, name, teachers[name], TaughtLoss(loaded.output, teaching))
            more["teacher"].check(start.model, kept[0])
            if not isinstance(loaded.output, TokenLoss):
                progress.begin(f"teacher of {name}", kept.count_rows + held.count_rows)
        owners.append(DataOwner(name, kept, held, examples=stands_for, output=loaded.output, **more))
        back[name] = held
        told = loaded.notes if apart is loaded else loaded.notes + apart.notes
        notes += [f"{name}: {text}" for text in told if text not in start.notes]
    return owners, back, notes


def metrics_of(
    model: nn.Module, owners: Sequence[DataOwner], back: Mapping[str, RowBatches], group: Processes
) -> dict[str, Metrics]:
    """Task → metrics on its rows held back, of which each process runs a share."""
    found = {}
    for owner in owners:
        first = group.share(owner.held).start
        batches = share_of_rows(back[owner.name], group)
        found[owner.name] = measure(model, batches, owner.loss_of_rows(model), None, group, first)
    return found
