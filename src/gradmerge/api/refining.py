"""Refining a merge on a few rows of every task: in memory, or disk to disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack, cast

from torch import Tensor, nn

from .._version import __version__
from ..arguments import checked
from ..curvature.losses import ExampleLoss, loss_named
from ..engine.evaluations import evaluation
from ..engine.reads import changed, digest_of_state, model_paths, state_of
from ..errors import InputError, MachineError
from ..markdown import as_code, as_table
from ..processes import ALONE, Processes, current
from ..progress import Progress, shown
from ..refinement.guarded import check_request, refine_model
from ..refinement.held_to_base import penalty_of
from ..refinement.newton import Penalty
from ..refinement.owners import DataOwner, Owner
from ..refinement.points import trained
from ..refinement.resuming import SavedRounds, shared_progress
from ..refinement.rounds import Refinement
from ..refinement.saving import Start, notes_of_folder, opened_start, write_folder
from ..report.page import write_report
from ..report.refinement_page import refinement_page
from ..storage.staging import Staging
from ..tasks import Loading, complete
from ..tasks.data_names import dataset_type, named_data
from ..tasks.data_sources import data_paths
from ..tasks.uncertainty import difference
from ..text import nearest
from .dividing import metrics_of, owners_in_memory, owners_on_disk

#: How much of a row's loss is that to its teacher's answer, where nothing is said.
TEACHING = 0.5
#: What a reader of metrics should know.
CHOSEN_BY = "rows held back: no step was taken on them, but by them the steps were chosen"


@checked()
def refine(
    model: nn.Module | str | Path,
    data: Mapping[str, Any],
    *,
    out: str | Path | None = None,
    valid: Mapping[str, Any] | None = None,
    method: str = "newton",
    rounds: int = 2,
    examples: Mapping[str, int] | None = None,
    teachers: Mapping[str, nn.Module | str | Path] | None = None,
    teaching: float | None = None,
    penalty: Mapping[str, Tensor] | str | None = None,
    base: Mapping[str, Tensor] | str | Path | None = None,
    output: str | ExampleLoss | None = None,
    seed: int = 0,
    progress: bool | Progress = True,
    resume: bool = False,
    force: bool = False,
    durable: bool = False,
    command: str = "",
    processes: bool = False,
    **loading: Unpack[Loading],
) -> Refinement:
    """Refine a merged model on a few labelled rows of every task, towards the model trained on all of them.

    Steps are chosen by their loss on rows that are held back, a tenth of each task's where ``valid`` gives none, and
    the result is never worse on these than the start: in the sum over tasks of the mean loss of a row.

    Args:
        model: A module, which is refined **in place**; parameters with ``requires_grad=False`` stay as they are. Or the
            folder or Hub id of a model, or a LoRA adapter's, of which the adapter alone is refined: then ``out`` is
            written.
        data: Task → its rows. For a module: batches, mappings of keyword arguments with ``labels`` or tuples that end
            with them. For a model on disk: what `gradmerge refine --data` takes.
        out: For a model on disk: the new folder to write.
        valid: Task → rows to judge by, of every task or of some.
        method: ``newton``, steps by Kronecker curvature, or ``adamw``, passes at a learning rate that is searched for.
        rounds: How many rounds at most; for ``adamw`` passes. It ends earlier where the loss no longer falls.
        examples: Task → how many examples it stands for; by default as many as it has rows.
        teachers: Task → a model that knows it, as the one tuned on it that was merged; of every task or of some. Its
            answers count beside the labels. For a module: a module. On disk: a folder, Hub id or adapter.
        teaching: How much of a row's loss is that to the teacher's answer, in (0, 1], 0.5 by default; 1: labels are not
            learned from.
        penalty: P of a quadratic penalty ½‖θ − θ_0‖²_P, a diagonal. For a module: parameter → tensor. On disk: a
            curvature folder, ``identity:c`` or ``none``; by default what the merge's record names, if it does.
        base: θ_0 of the penalty. For a module: parameter → tensor. On disk: a model; by default the record's.
        output: For a module: ``classes``, ``labels``, ``squared``, ``next-token`` or ``tokens``, where the model and
            its labels do not tell.
        seed: Of the rows that are held back, the labels that curvature draws, and the order of adamw's batches.
        progress: A bar on long work; False for none; or what is told how far it is, in rows.
        resume: On disk: go on with a run that was stopped after a round.
        force: On disk: replace ``out`` if gradmerge wrote it, or it is empty.
        durable: On disk: have the folder on the disk before it gets its name.
        command: On disk: what the report says to repeat it with.
        processes: On disk: divide the rows over the processes that torchrun or `accelerate launch` has started, as of
            :func:`gradmerge.estimate_curvature`.
        loading: On disk: how the model and its data are loaded, as :class:`gradmerge.Loading` says.

    Returns:
        What was done, round by round, with the model as ``model``. If no step lowers the loss on the rows held back, by
        ``adamw`` by more than a standard error, it is as it was.

    >>> refine(module, {"yelp": yelp_batches, "sst2": sst2_batches}).rounds[-1].held  # doctest: +SKIP
    >>> refine("./merged", {"yelp": "yelp.jsonl"}, out="./refined")  # doctest: +SKIP
    """
    check_request(method, rounds)
    teachers = dict(teachers or {})
    _check_names(data, {"valid": valid or {}, "examples": examples or {}, "teacher": teachers})
    if teaching is not None and not teachers:
        raise InputError(f"--teaching {teaching:g}: there is no --teacher whose answers could count")
    teaching = TEACHING if teaching is None else teaching
    if not 0 < teaching <= 1:
        raise InputError(f"--teaching {teaching}: must be more than 0, and at most 1")
    for name, teacher in teachers.items():
        if isinstance(teacher, nn.Module) is not isinstance(model, nn.Module):
            raise InputError(f"{name}: its teacher must be a module for a module, and a path for a model on disk")
    if isinstance(model, nn.Module):
        given: dict[str, Any] = {"out": out, "resume": resume, "force": force, "durable": durable, "command": command}
        given |= {"processes": processes, **loading}
        for name, value in given.items():
            if value:
                raise InputError(f"{name} is an option for a model on disk, not for a module")
        loss = loss_named(output)
        held = _penalty_in_memory(model, penalty, base)
        with shown(progress, "rows") as told:
            rows: Any = {"valid": valid or {}, "examples": examples or {}, "output": loss, "seed": seed}
            owners = owners_in_memory(model, data, **rows, progress=told, teachers=teachers, teaching=teaching)
            begun = time.perf_counter()
            done = refine_model(model, owners, method, rounds, penalty=held, seed=seed, progress=told)
        done.teaching = teaching if teachers else 0.0
        done.seconds = time.perf_counter() - begun
        return done
    if output is not None:
        raise InputError("output is an option for a module, not for a model on disk")
    if out is None:
        raise InputError("out is None, but must be the folder to write, for a model on disk: out=…")
    for what, value in (("penalty", penalty), ("base", base)):
        if isinstance(value, Mapping):
            raise InputError(f"{what} is a path or a text for a model on disk, not a mapping of tensors")
    return _refine_folder(
        str(model),
        {name: str(source) for name, source in data.items()},
        Path(out),
        {name: str(source) for name, source in (valid or {}).items()},
        method=method,
        rounds=rounds,
        examples=dict(examples or {}),
        teachers={name: str(teacher) for name, teacher in teachers.items()},
        teaching=teaching,
        penalty=cast("str | None", penalty),
        base=None if base is None else str(base),
        seed=seed,
        progress=progress,
        resume=resume,
        force=force,
        durable=durable,
        command=command,
        group=current() if processes else ALONE,
        options=complete(loading, refine),
    )


def _check_names(data: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]) -> None:
    if not data:
        raise InputError("there is no data to refine on: give --data NAME=SRC for every task")
    for option, given in options.items():
        for name in given:
            if name not in data:
                raise InputError(f"--{option} {name}=…: there is no --data of that name{nearest(name, data)}")
    for name, count in options["examples"].items():
        if count < 1:
            raise InputError(f"--examples {name}={count}: a task stands for at least one example")


def _penalty_in_memory(model: nn.Module, penalty: Any, base: Any) -> Penalty | None:
    if penalty is None and base is None:
        return None
    if not isinstance(penalty, Mapping) or not isinstance(base, Mapping):
        raise InputError("penalty and base are mappings from parameters to tensors, for a module, and go together")
    parameters = trained(model)
    for what, given in (("penalty", penalty), ("base", base)):
        for name, value in given.items():
            if name in parameters and value.shape != parameters[name].shape:
                shapes = f"{list(value.shape)}, where the model has {list(parameters[name].shape)}"
                raise InputError(f"{what}: {name} is {shapes}")
    both = [name for name in parameters if name in penalty and name in base]
    if not both:
        raise InputError("penalty and base have no parameter of the model in common")
    here = {name: parameters[name].detach() for name in both}
    return Penalty({n: penalty[n].to(here[n]) for n in both}, {n: base[n].to(here[n]) for n in both})


def _refine_folder(
    reference: str,
    data: Mapping[str, str],
    out: Path,
    valid: Mapping[str, str],
    *,
    method: str,
    rounds: int,
    examples: Mapping[str, int],
    teachers: Mapping[str, str],
    teaching: float,
    penalty: str | None,
    base: str | None,
    seed: int,
    progress: bool | Progress,
    resume: bool,
    force: bool,
    durable: bool,
    command: str,
    group: Processes,
    options: Loading,
) -> Refinement:
    begun = time.perf_counter()
    named = (reference, base, penalty, options["tokenizer"], *teachers.values())
    models = [path for one in named for path in model_paths(one)]
    sources = [path for source in (*data.values(), *valid.values()) for path in data_paths(source)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(group.answering())
        staging = None
        if group.first:
            reads = [*models, *sources]
            staging = Staging(out, "refinement", reads=reads, force=force, resume=resume, durable=durable)
            stack.enter_context(staging)
        told = group.shared(stack.enter_context(shown(progress, "rows")))
        start = stack.enter_context(opened_start(reference, options))
        files = state_of(models) + state_of(sources, deep=True)
        held_to, penalty_facts, notes = penalty_of(start, penalty, base)
        taught: Any = {"teachers": dict(teachers), "teaching": teaching} if teachers else {}
        owners, back, read_notes = owners_on_disk(start, data, valid, examples, seed, told, group, **taught)
        request = {
            "version": __version__,
            "model": reference,
            "data": dict(data),
            "valid": dict(valid),
            "files": digest_of_state(files),
            "method": method,
            "examples": dict(examples),
            **penalty_facts,
            **taught,
            "seed": seed,
            **{name: dict(start.options)[name] for name in ("task", "limit", "max_length", "dtype", "batch_size")},
            "columns": dict(options["columns"] or {}),
        }
        saved = SavedRounds(staging, request) if staging is not None else None
        so_far = saved.read(start.model, method) if resume and saved is not None else None
        so_far = shared_progress(group, so_far, start.model) if resume else None
        resumed = len(so_far.done.rounds) - 1 if so_far is not None else 0
        before = metrics_of(start.model, owners, back, group)
        done = refine_model(
            start.model,
            owners,
            method,
            rounds,
            penalty=held_to,
            seed=seed,
            so_far=so_far,
            **({"told": saved.write} if saved is not None else {}),
            progress=told,
            processes=group,
        )
        done.teaching = teaching if teachers else 0.0
        moved = rounded_as_stored(start, owners, done)
        after = metrics_of(start.model, owners, back, group) if moved else before
        done.before, done.after = ({name: one.summary() for name, one in found.items()} for found in (before, after))
        for name in before:
            now, then = after[name].rows(), before[name].rows()
            done.gains[name] = {metric: difference(now[metric], then[metric]) for metric in now if metric in then}
        if path := changed(files, state_of(models) + state_of(sources, deep=True)):
            if staging is not None:
                staging.keep = False
            raise MachineError(f"{path}: changed while it was being used, so that nothing was written. Refine again.")
        group.wait()
        done.notes = [*start.notes, *notes, *read_notes, *done.notes, *notes_of_folder(start)]
        done.notes[:0] = staging.notes if staging is not None else []
        done.seconds = time.perf_counter() - begun
        more = {"penalty_of": penalty_facts, "seed": seed, "resumed": resumed, **taught}
        facts = facts_of(done, owners, data, valid, more)
        if staging is not None and saved is not None:
            card, measured = card_of(start, done, owners), _measured(start, done, owners, data, valid)
            write_result(staging, start, moved, done, facts, card, measured, [command] if command else [])
            saved.remove()
    done.output = out
    return done


def write_result(
    staging: Staging,
    start: Start,
    moved: list[str],
    done: Refinement,
    facts: dict[str, Any],
    card: str,
    measured: list[Any],
    commands: list[str],
) -> None:
    """A refined model's folder with its record, card and report."""
    more: Any = {"facts": facts, "card": card, "measured": measured, "seconds": done.seconds, "notes": done.notes}
    write_folder(staging, start, moved, what="refinement", **more)
    write_report(staging.folder, refinement_page(done, start.reference, facts, commands))


def rounded_as_stored(start: Start, owners: Sequence[Owner], done: Refinement) -> list[str]:
    """Round the model as it will be stored; the parameters that are written, none if rounding undoes the gain."""
    if not done.improved:
        return []
    start.round_weights()
    judged = sum(owner.losses(start.model, held=True)[0] for owner in owners)
    if judged >= done.rounds[0].judged:
        done.rounds, done.stopped = done.rounds[:1], "the gain is lost in the rounding to the model's own types"
        return []
    return list(trained(start.model))


def facts_of(
    done: Refinement,
    owners: Sequence[Owner],
    data: Mapping[str, str],
    valid: Mapping[str, str],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """What a record says of a refinement."""
    tasks = {
        owner.name: {
            "data": data[owner.name],
            "rows": owner.rows,
            "valid": valid.get(owner.name, "held back"),
            "held_rows": owner.held,
            "examples": owner.examples,
            "before": done.before[owner.name],
            "after": done.after[owner.name],
            "gained": {metric: asdict(gain) for metric, gain in done.gains[owner.name].items()},
        }
        for owner in owners
    }
    rounds = [asdict(one) | {"sum_of_held": one.judged} for one in done.rounds]
    facts = {"method": done.method, "tasks": tasks, "rounds": rounds, "stopped": done.stopped}
    return {**facts, "passes": dict(done.passes), **more, "unit": "loss: nats, the mean over rows held back"}


def _measured(
    start: Start, done: Refinement, owners: list[DataOwner], data: Mapping[str, str], valid: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The metrics after refinement: on rows that no step was taken on."""
    found = []
    for owner in owners:
        shown, dataset = named_data(valid.get(owner.name, data[owner.name]))
        if "split" not in dataset:  # a file, which may be called as that of another task
            dataset = {"type": dataset_type(owner.name), "name": f"{owner.name} ({shown})"}
        numbers = {"task": start.info.task, **done.after[owner.name]}
        found.append(evaluation(dataset["name"], dataset, numbers, CHOSEN_BY))
    return found


def card_of(start: Start, done: Refinement, owners: Sequence[Owner]) -> str:
    """The text of a refined model's card."""
    name = start.reference if not Path(start.reference).exists() else Path(start.reference).resolve().name
    columns = ["task", "rows", "held back", "loss before", "loss after"]
    first, last = done.rounds[0].held, done.rounds[-1].held
    rows = [[o.name, str(o.rows), str(o.held), f"{first[o.name]:.4g}", f"{last[o.name]:.4g}"] for o in owners]
    count = len(done.rounds) - 1
    what = "The adapter was" if start.adapter else "It was"
    taught = f"; of tasks with a teacher, {done.teaching:g} of them is to its answers" if done.teaching else ""
    return f"""Refined from {as_code(name)} by **{done.method}** with gradmerge {__version__}.

{what} refined in {count} round{"s" if count != 1 else ""} on labelled rows of every task. Losses are means over rows
held back, in nats{taught}.

{as_table(columns, rows)}

`gradmerge.json` in this repository holds every round.
"""
