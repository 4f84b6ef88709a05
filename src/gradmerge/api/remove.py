"""Remove what a model has learned from data: for a module in memory, or from folder to folder.

Heavy modules are imported in the functions: the command line reads the signature of :func:`remove` without PyTorch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..arguments import checked
from ..errors import InputError
from ..progress import Progress, shown
from ..report.page import write_report
from ..text import listed
from .refine import new_folder

if TYPE_CHECKING:
    from torch import nn

    from ..curvature.losses import ExampleLoss
    from ..refinement.influence import Dataset, RemovalResult
    from ..tasks import LoadOptions


@checked()
def remove(
    base: nn.Module | str | Path,
    out: str | Path | None = None,
    *,
    forget: Iterable[Any] | str | Path | None = None,
    retain: Iterable[Any] | str | Path | None = None,
    retain_size: int | None = None,
    budget: float | str = 0.02,
    steps: int = 1,
    unseen: Iterable[Any] | str | Path | None = None,
    until: float | None = None,
    max_kronecker_dim: int | None = None,
    output: str | ExampleLoss | None = None,
    force: bool = False,
    progress: bool | Progress = True,
    command: str | None = None,
    **loading: Unpack[LoadOptions],
) -> RemovalResult:
    """Remove what a model has learned from data, and keep what it has learned from other data.

    It takes one step θ + s (S + λ)⁻¹ g. Here g is the gradient on the forget set, S the curvature on the retain set,
    and s the longest step within the budget. To subtract the changes of fine-tuned models instead, merge them with
    the method `removal` (:func:`gradmerge.merge`).

    For a module, ``forget``, ``retain`` and ``unseen`` are batches, as of :func:`gradmerge.estimate_curvature`.

    Args:
        base: A module, which is changed in place, except for parameters with ``requires_grad=False``. Or the folder or
            Hub id of a model, or the folder of an adapter; then ``out`` is written.
        out: The new folder, for a model on disk.
        forget: The forget set, all rows of it: a file or dataset, as for `gradmerge evaluate --data`.
        retain: The retain set, or a sample of it, in the same form. 10 % of the rows are held out to
            measure the budget. The curvature uses at most 1,000 of the others.
        retain_size: Total number of retained examples; by default, the number of rows of ``retain``.
        budget: Allowed relative increase of the mean loss on the held-out rows, such as 2% or 0.02.
        steps: The maximum number of influence steps. More than one requires ``unseen`` or ``until``.
        unseen: Rows of the same kind as ``forget`` that the model has not seen. No step raises the mean loss on
            ``forget`` above the loss of ``base`` on these rows.
        until: The same limit as a number instead of ``unseen``: the mean loss of an example in nats.
        max_kronecker_dim: Layers with more inputs or outputs have a diagonal in S; 0: all layers. 16384 by default.
        output: For a module: the meaning of its output, as of :func:`gradmerge.estimate_curvature`.
        force: Replace the output if gradmerge wrote it, or if it is empty.
        progress: Show a progress bar; False for none; or an object that receives the progress, in batches.
        command: The command that repeats this, for the report.
        loading: On disk: how to load the model and the data, see :class:`gradmerge.LoadOptions`.

    Returns:
        The losses before and after, and all step lengths that were tried.

    >>> remove(module, forget=toxic_batches, retain=other_batches).used  # doctest: +SKIP
    >>> remove("./gpt2", "./gpt2-clean", forget="toxic.jsonl", retain="other.jsonl", budget="2%")  # doctest: +SKIP
    """
    from torch import nn

    from ..curvature.kernels import MAX_KRONECKER_DIM
    from ..curvature.losses import loss_named
    from ..refinement.influence import Dataset
    from ..refinement.rows import as_batches
    from ..tasks import complete

    if forget is None or retain is None:
        raise InputError("give forget and retain: the rows to forget, and rows to keep")
    given = {"forget": forget, "retain": retain, "unseen": unseen}
    rows = {name: value for name, value in given.items() if value is not None}
    module = base if isinstance(base, nn.Module) else None
    for name, value in rows.items():
        if isinstance(value, str | Path) is (module is not None):
            expected = "a path or name, for a model on disk" if module is None else "batches, for a module"
            raise InputError(f"{name} is {type(value).__name__}, but must be {expected}")
    wrong = {"output": output} if module is None else {"out": out, **loading}
    if extra := [name for name, value in wrong.items() if value is not None]:
        raise InputError(f"{extra[0]} is an option for a {'module' if module is None else 'model on disk'}")
    if steps < 1:
        raise InputError(f"steps {steps}: at least one step is needed")
    if unseen is not None and until is not None:
        raise InputError("give unseen or until, not both: each sets the loss at which removal stops")
    if steps > 1 and unseen is None and until is None:
        raise InputError(
            f"steps {steps}: more than one step needs a loss at which removal stops, or the model forgets too much. "
            "Give unseen (rows of the same kind that the model has not seen) or until (a mean loss)"
        )
    if until is not None and not (math.isfinite(until) and until > 0):
        raise InputError(f"until {until}: must be a mean loss in nats, more than 0")
    dim = MAX_KRONECKER_DIM if max_kronecker_dim is None else max_kronecker_dim
    if dim < 0:
        raise InputError(f"max_kronecker_dim {dim}: a number of inputs or outputs, or 0 for diagonals only")
    settings: dict[str, Any] = {"retain_size": retain_size, "budget": read_budget(budget), "steps": steps}
    settings |= {"until": until, "max_kronecker_dim": dim}
    begun = time.perf_counter()
    with shown(progress, "batches") as settings["progress"]:
        if module is not None:
            loss = loss_named(output)
            batches = {n: Dataset(as_batches(n, value), loss) for n, value in rows.items()}
            result = _remove_rows(module, batches, **settings)
            result.seconds = time.perf_counter() - begun
            return result
        if out is None:
            raise InputError("out is None, but must be the folder to write, for a model on disk")
        sources = {name: str(value) for name, value in rows.items()}
        options = complete(loading, remove)
        return _remove_on_disk(str(base), Path(out), sources, options, settings, command, force)


def read_budget(budget: float | str) -> float:
    """The relative increase that a number or text such as 2% or 0.02 stands for."""
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


def _remove_rows(
    model: nn.Module, rows: Mapping[str, Dataset], *, retain_size: int | None, **settings: Any
) -> RemovalResult:
    """Check the rows, hold out some of the retain set, and take the steps."""
    from ..refinement.influence import Dataset, remove_influence
    from ..refinement.rows import count_common_rows, count_rows, hold_out

    forget, retain = rows["forget"], rows["retain"]
    counts = {f"{name}_rows": count_rows(dataset.batches) for name, dataset in rows.items()}
    if retain_size is not None and retain_size < counts["retain_rows"]:
        raise InputError(f"retain_size {retain_size}: retain has {counts['retain_rows']} rows, which is more")
    for name in rows.keys() - {"forget"}:
        if common := count_common_rows(forget.batches, rows[name].batches):
            raise InputError(
                f"{common} of the {counts['forget_rows']} rows to forget are also in {name}, with the same label. "
                "Remove them from one of the two"
            )
    fit, held_out = (Dataset(batches, retain.loss) for batches in hold_out("retain", retain.batches))
    size = retain_size or counts["retain_rows"]
    result = remove_influence(model, forget, fit, held_out, retain_size=size, unseen=rows.get("unseen"), **settings)
    counts["retain_rows"] = count_rows(fit.batches)
    result.rows = counts | {"held_out_rows": count_rows(held_out.batches), "retain_size": size}
    return result


def _remove_on_disk(
    base: str,
    out: Path,
    sources: Mapping[str, str],
    options: LoadOptions,
    settings: Mapping[str, Any],
    command: str | None,
    force: bool,
) -> RemovalResult:
    from ..cards.card import evaluation
    from ..cards.provenance import input_entry
    from ..checkpoints.sidecars import code_notes
    from ..refinement.influence import Dataset
    from ..refinement.model_io import open_model_files, write_folder
    from ..report.refinement import removal_card, removal_page
    from ..tasks import tokenizer_of, with_data
    from ..tasks.data import dataset_metadata
    from ..tasks.model_args import BASIC_KEYS, ModelArgs
    from ..tasks.model_files import folder_of
    from ..tasks.models import device_of

    begun = time.perf_counter()
    with new_folder(out, "removal", [base, tokenizer_of(options)], list(sources.values()), force) as staging:
        if (folder_of(base) / "modules.json").is_file():
            raise InputError(
                f"{base}: a sentence-transformers folder. Kronecker curvature requires that every layer runs once per "
                "example, but a pair of texts is two runs. Use models, fine-tuned models, instead."
            )
        if options["dtype"] not in ("auto", "float32"):
            raise InputError(f"dtype {options['dtype']}: must be float32, the type of the computation")
        args = ModelArgs.parse(options["model_args"], BASIC_KEYS)
        opened = open_model_files(base, options["task"], args.attn_implementation)
        with contextlib.closing(opened.checkpoint):
            if opened.missing:
                raise InputError(f"{base}: these weights are not in its files:\n{listed(opened.missing)}")
            files = opened.trainable(device_of(options["device"]))
            tasks = {name: with_data(files.module, files.info, source, **options) for name, source in sources.items()}
            rows = {n: Dataset(list(task.batches()), task.loss) for n, task in tasks.items()}
            result = _remove_rows(files.module, rows, round_weights=files.round_weights, **settings)
            notes = [note for task in tasks.values() for note in task.notes]
            result.notes = list(dict.fromkeys([*notes, *code_notes(files.checkpoint), *result.notes]))
            result.seconds = time.perf_counter() - begun
            numbers = {
                "task": files.info.task,
                "loss_per_example": result.after.retain,
                "examples": result.rows["held_out_rows"],
                "standard_errors": {"loss_per_example": result.standard_errors["after"]["retain"]},
            }
            described = "held-out rows of the retain set, which chose the step length"
            facts = {**sources, "max_kronecker_dim": settings["max_kronecker_dim"], **result.facts()}
            write_folder(
                staging,
                files,
                {name: p for name, p in files.module.named_parameters() if p.requires_grad},
                action="removal",
                card=removal_card(result),
                facts={"removal": facts},
                inputs=[input_entry("start", base, files.checkpoint.files())],
                measured=[evaluation(*dataset_metadata(sources["retain"]), numbers, described)],
                seconds=result.seconds,
                notes=result.notes,
            )
            write_report(staging.folder, removal_page(result, base, sources, [command] if command else []))
    result.output = out
    return result
