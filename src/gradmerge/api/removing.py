"""Taking what a model has learned out of it: in memory, or disk to disk."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from ..arguments import check_known, checked
from ..curvature.batches import examples_in
from ..curvature.kronecker import MAX_KRONECKER_DIM as WIDEST
from ..curvature.losses import ExampleLoss, loss_named
from ..engine.evaluations import evaluation
from ..engine.reads import changed, model_paths, state_of
from ..engine.to_folder import MergeResult
from ..errors import InputError, MachineError
from ..progress import Progress, shown
from ..refinement.influence import InfluenceRemoval, remove_influence
from ..refinement.overlap import in_both
from ..refinement.owners import DataOwner
from ..refinement.points import Point, copied, trained
from ..refinement.saving import Start, notes_of_folder, opened_start, write_folder
from ..refinement.splitting import HELD, RowBatches, as_batches, split_batches, split_rows
from ..report.page import write_report
from ..report.removal_page import removal_card, removal_page
from ..storage.staging import Staging
from ..tasks import LoadOptions, complete, tokenizer_of
from ..tasks.data_names import named_data
from ..tasks.data_sources import data_paths
from .merging import merge

#: Ways to remove, and the rules of those that need tuned models.
METHODS = {"influence": "", "removal": "removal", "negation": "task-arithmetic"}
#: How many influence steps are taken where nothing else is said.
ROUNDS = 8
#: Parts of the way that are tried where the weights are stored in narrow types; 0 is the model as it was.
PARTS = (1.0, 0.9, 0.75, 0.5, 0.25, 0.0)


@overload
def remove(base: nn.Module, *, forget: Iterable[Any], keep: Iterable[Any], **options: Any) -> InfluenceRemoval: ...
@overload
def remove(
    base: str | Path, out: str | Path, *, forget: str | Path, keep: str | Path, **options: Any
) -> InfluenceRemoval: ...
@overload
def remove(
    base: str | Path, out: str | Path, *, models: Sequence[str | Path] | Mapping[str, float], **options: Any
) -> MergeResult: ...
@checked()
def remove(
    base: nn.Module | str | Path,
    out: str | Path | None = None,
    *,
    forget: Iterable[Any] | str | Path | None = None,
    keep: Iterable[Any] | str | Path | None = None,
    keep_size: int | None = None,
    budget: float | str = 0.02,
    rounds: int = ROUNDS,
    widest: int = WIDEST,
    models: Sequence[str | Path] | Mapping[str, float] | None = None,
    method: str | None = None,
    seed: int = 0,
    output: str | ExampleLoss | None = None,
    force: bool = False,
    progress: bool | Progress = True,
    command: str | None = None,
    **loading: Any,
) -> InfluenceRemoval | MergeResult:
    """Take what a model has learned from some rows out of it, while what it does on others stays.

    With ``forget`` and ``keep`` no tuned model is needed: influence steps θ + s (S + λ)⁻¹ g, where g is the gradient of
    what is to be forgotten, S the Kronecker curvature of what is kept, and s the longest step within the budget. With
    ``models``, what tuned models have learned is subtracted, as by :func:`gradmerge.merge`.

    Args:
        base: A module, which is changed in place (parameters with ``requires_grad=False`` stay). Or the folder or Hub
            id of a model, or an adapter's folder; then ``out`` is written.
        out: For a model on disk: the new folder.
        forget: The examples to take out: for a module batches, as of :func:`gradmerge.estimate_curvature`; for a model
            on disk a file or data set, as `gradmerge remove --forget` takes it. All of them are needed, not a sample.
        keep: Examples that stay, likewise. A tenth is held back to measure the budget on, all others repair, and
            curvature is taken of 1,000 of these at most, which the seed draws.
        keep_size: How many examples stay in all; the curvature is scaled to it. By default those given.
        budget: How much the mean loss of a kept example may rise, relative to before: 0.02, or "2%".
        rounds: How many steps, each with its part of the budget, and repairs in between; 1 is one plain step.
        widest: Layers with more inputs or outputs than this have a diagonal in S; at 0 all have.
        models: Models that were tuned from the base on what is to go, in place of ``forget`` and ``keep``; with their
            strengths, or a list for strength 1.
        method: ``influence`` with ``forget`` and ``keep``; ``removal`` (the default) or ``negation`` with ``models``.
        seed: Of the rows that are held back, of the sample for curvature, and of labels that are drawn for it.
        output: For a module: what its output means, as of :func:`gradmerge.estimate_curvature`.
        force: Replace ``out`` if gradmerge wrote it, or it is empty.
        progress: A bar on long work; False for none; or what is told how far it is, in rounds.
        command: What a user would type to repeat this, for the report.
        loading: On disk: how the model and its data are loaded, as :class:`gradmerge.LoadOptions` says.

    Returns:
        What was done: losses before and after, and every length that was tried. With ``models`` what the merge wrote.

    >>> remove(module, forget=toxic_batches, keep=kept_batches).used  # doctest: +SKIP
    >>> remove("./gpt2", "./gpt2-clean", forget="toxic.jsonl", keep="kept.jsonl", budget="2%")  # doctest: +SKIP
    """
    options = complete(cast(LoadOptions, loading), remove)
    method = method or ("influence" if models is None else "removal")
    check_known(f"method {method!r}", method, METHODS)
    if method != "influence":
        if isinstance(base, nn.Module) or out is None or not models or forget is not None or keep is not None:
            raise InputError(f"{method} takes the folders of a base, of out and of models, and neither forget nor keep")
        alone = {"keep_size": keep_size, "budget": budget != 0.02, "rounds": rounds != ROUNDS}
        alone["widest"] = widest != WIDEST
        for name, value in alone.items():
            if value:
                raise InputError(f"{name} is an option of influence, not of {method}")
        sign = -1.0 if method == "negation" else 1.0
        strengths = dict(models) if isinstance(models, Mapping) else {str(one): 1.0 for one in models}
        tuned = [{"model": name, "weight": sign * strength} for name, strength in strengths.items()]
        recipe = {"method": METHODS[method], "base": str(base), "models": tuned}
        device = "cpu" if options["device"] == "auto" else options["device"]
        return merge(recipe, out, device=device, force=force, progress=progress)
    if models is not None:
        raise InputError("influence needs no tuned models: give forget and keep, or another method")
    if forget is None or keep is None:
        raise InputError("influence takes forget and keep: examples that are to go, and examples that stay")
    asked = _Asked(keep_size, read_budget(budget), rounds, widest, seed)
    if rounds < 1:
        raise InputError(f"rounds {rounds}: at least one is needed")
    if widest < 0:
        raise InputError(f"widest {widest}: a number of inputs or outputs, or 0 for diagonals alone")
    for name, given in (("forget", forget), ("keep", keep)):
        if isinstance(base, nn.Module) is isinstance(given, str | os.PathLike):
            expected = "batches, for a module" if isinstance(base, nn.Module) else "a path or name, for a model on disk"
            raise InputError(f"{name} is {type(given).__name__}, but must be {expected}")
    with shown(progress, "rounds") as told:
        if isinstance(base, nn.Module):
            if out is not None or loading:
                option = "out" if out is not None else min(loading)
                raise InputError(f"{option} is an option for a model on disk, not for a module")
            both = cast(Iterable[Any], forget), cast(Iterable[Any], keep)
            return _in_memory(base, *both, loss_named(output), asked, told)
        if output is not None:
            raise InputError("output is an option for a module, not for a model on disk")
        if out is None:
            raise InputError("out is None, but must be the folder to write, for a model on disk")
        given = str(base), Path(out), str(forget), str(keep), options
        return _on_disk(*given, asked, told, command, force=force)


def read_budget(budget: float | str) -> float:
    """A share, from a number or from text such as 2% or 0.02."""
    text = str(budget).strip()
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = math.nan
    if not (math.isfinite(share) and share > 0):
        raise InputError(f"budget {text}: must be more than 0, such as 2% or 0.02")
    if isinstance(budget, str) and share >= 1 and not text.endswith("%"):
        raise InputError(f"budget {text}: write {text}% or {100 * share:g}%, whichever is meant")
    return share


def _in_memory(
    model: nn.Module,
    forget: Iterable[Any],
    keep: Iterable[Any],
    output: ExampleLoss | None,
    asked: _Asked,
    progress: Progress,
) -> InfluenceRemoval:
    begun = time.perf_counter()
    goes, stays = as_batches("forget", forget), as_batches("keep", keep)
    rows = sum(map(examples_in, stays))
    kept, held = split_batches("keep", stays, asked.seed) if rows >= HELD else (stays, [])
    done = asked.run(model, goes, kept, held, (output, output), progress)
    done.seconds = time.perf_counter() - begun
    return done


def _on_disk(
    base: str,
    out: Path,
    forget: str,
    keep: str,
    options: LoadOptions,
    asked: _Asked,
    progress: Progress,
    command: str | None,
    force: bool,
) -> InfluenceRemoval:
    begun = time.perf_counter()
    models = [path for reference in (base, tokenizer_of(options)) for path in model_paths(reference)]
    data = [path for source in (forget, keep) for path in data_paths(source)]
    staged = Staging(out, "removal", reads=[*models, *data], force=force)
    with staged as staging, opened_start(base, options) as start:
        files = state_of(models) + state_of(data, deep=True)
        goes, stays = start.with_data(forget), start.with_data(keep)
        rows: tuple[Sequence[int], Sequence[int]] = range(stays.examples), []
        if stays.examples >= HELD:
            rows = split_rows("keep", stays.examples, asked.seed)
        kept, held = (RowBatches(stays, some) for some in rows)
        every, outputs = RowBatches(goes, range(goes.examples)), (goes.output, stays.output)
        done = asked.run(start.model, every, kept, held, outputs, progress, start.round_weights)
        if path := changed(files, state_of(models) + state_of(data, deep=True)):
            raise MachineError(f"{path}: changed while it was being used, so that nothing was written. Begin again.")
        done.output, done.seconds = out, time.perf_counter() - begun
        notes = [*staging.notes, *goes.notes, *stays.notes, *notes_of_folder(start), *done.notes]
        done.notes = list(dict.fromkeys(notes))
        write_folder(
            staging,
            start,
            [name for name, parameter in start.model.named_parameters() if parameter.requires_grad],
            what="removal",
            facts={"forget": forget, "keep": keep, "seed": asked.seed, "widest": asked.widest, **done.facts()},
            card=removal_card(done, forget, keep),
            measured=_measured(start, done, keep),
            seconds=done.seconds,
            notes=done.notes,
        )
        write_report(staging.folder, removal_page(done, base, forget, keep, [command] if command else []))
    return done


def _measured(start: Start, done: InfluenceRemoval, keep: str) -> list[dict[str, Any]]:
    """The loss of kept examples after the removal, where rows were held back for it."""
    if not done.rows["held_rows"]:
        return []
    numbers = {"task": start.info.task, "loss_per_example": done.after.kept, "examples": done.rows["held_rows"]}
    numbers["standard_errors"] = {"loss_per_example": done.standard_errors["after"]["kept"]}
    return [
        evaluation(
            *named_data(keep), numbers, "examples to keep, held back: by them the lengths of the steps were chosen"
        )
    ]


@dataclass(frozen=True)
class _Asked:
    """What is asked of a removal, in memory and on disk alike."""

    keep_size: int | None
    budget: float
    rounds: int
    widest: int
    seed: int

    def run(
        self,
        model: nn.Module,
        forget: Sequence[Any],
        kept: Sequence[Any],
        held: Sequence[Any],
        outputs: tuple[ExampleLoss | None, ExampleLoss | None],
        progress: Progress,
        settle: Callable[[], None] | None = None,
    ) -> InfluenceRemoval:
        """Check the rows, and take the steps; ``settle`` rounds the weights as they will be written."""
        goes = DataOwner("forget", forget, [], output=outputs[0], seed=self.seed)
        # Labels drawn from the model: for more than two classes, all of them would cost more than they tell.
        how: Any = {"seed": self.seed, "few_classes": 2, "widest": self.widest}
        stays = DataOwner("keep", kept, held, output=outputs[1], **how)
        rows, rounds = stays.rows + stays.held, self.rounds if stays.held else 1
        if self.keep_size is not None and self.keep_size < rows:
            raise InputError(f"--keep-size {self.keep_size}: {rows} examples were given that stay, which is more")
        if both := in_both(forget, (*kept, *held)):
            raise InputError(
                f"{both} of the {goes.rows} examples to forget {'is' if both == 1 else 'are'} also among those to "
                "keep, with the same label; leave them out of one of the two"
            )
        stays.examples = self.keep_size or rows
        start = copied(trained(model)) if settle is not None else {}

        def row_losses() -> dict[str, Tensor]:
            kept = stays.row_losses(model, held=stays.held > 0)
            return {"kept": kept, "forget": goes.row_losses(model, held=False)}

        before = row_losses()
        progress.begin("removing", rounds)
        done = remove_influence(
            model,
            goes,
            stays,
            budget=self.budget if stays.held else None,
            rounds=rounds,
            told=lambda _: progress.advance(1),
        )
        done.rows = {"forget_rows": goes.rows, "keep_rows": stays.rows, "held_rows": stays.held}
        done.rows["keep_size"] = stays.examples
        if not stays.held:
            done.notes.append(
                f"Of {rows} examples to keep none can be held back to measure the budget on, which takes {HELD}: one "
                "step of the Newton length was taken, and losses of kept examples are those of its own."
            )
        if settle is not None:
            self._settle(done, goes, stays, start, settle)
        done.tell_errors(before, row_losses())
        if done.after.forget <= done.before.forget:
            done.notes.append(
                "The model knows what is to be forgotten no worse than before: no step within the budget made it "
                "forget. Take one step alone (--rounds 1), or a larger budget."
            )
        return done

    def _settle(
        self,
        done: InfluenceRemoval,
        goes: DataOwner,
        stays: DataOwner,
        start: Point,
        settle: Callable[[], None],
    ) -> None:
        """Round the weights; where that would break the budget, as much of the way as keeps it."""
        end = copied(trained(done.model))
        whole = done.after.s
        for part in PARTS:
            with torch.no_grad():
                for name, parameter in trained(done.model).items():
                    parameter.copy_(torch.lerp(start[name], end[name], part))
            settle()
            done.measure(goes, stays)
            if done.budget is None or done.used <= done.budget:
                break
        if part < 1:
            done.after.s = part * whole
            done.notes.append(
                f"Rounded to the types that the model is stored in, the steps would have broken the budget: {part:g} "
                "of their sum was taken."
            )
