"""Evaluate a model from Python.

Heavy modules are imported in the functions: the command line reads the signature of :func:`evaluate` without PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..arguments import checked
from ..errors import InputError
from ..progress import Progress, shown

if TYPE_CHECKING:
    from ..tasks import LoadOptions


@checked()
def evaluate(
    model: str | Path,
    source: str | Path | None = None,
    *,
    head: str | Path | None = None,
    metrics: Sequence[str] | str | None = None,
    max_new_tokens: int | None = None,
    lm_eval: Sequence[str] | str | None = None,
    lm_eval_tasks: str | Path | None = None,
    card: bool = False,
    progress: bool | Progress = True,
    processes: bool = False,
    **loading: Unpack[LoadOptions],
) -> dict[str, Any]:
    """Evaluate a model on data, by the text that it generates, or on tasks of the lm-evaluation-harness.

    Args:
        model: A folder, a Hub id (`org/name@revision`) or a PEFT adapter folder.
        source: A file or folder of data, or `org/name:split` of the Hub, as in `gradmerge evaluate --data`.
        head: Evaluate with the head of this model instead of the model's own, such as for a merge of encoders whose
            tasks have different heads.
        metrics: Also generate an answer to every row of the data, greedily, and score it: `exact-match`, `rouge`,
            `bleu`, `chrf`. All but the first need ``pip install 'gradmerge[metrics]'``.
        max_new_tokens: With ``metrics``: the maximum number of tokens of an answer. Default: 64, or what the model has
            positions for.
        lm_eval: Tasks of the lm-evaluation-harness, such as `arc_easy,hellaswag`, with or without data; ``limit``,
            ``batch_size`` and ``device`` hold too.
        lm_eval_tasks: A folder with task files for ``lm_eval``. It runs Python functions that they
            name: use only files that you trust.
        card: Also write the metrics into the model card and the record of a folder that gradmerge wrote.
        progress: Show a progress bar; False for none; or an object that gets the progress in examples.
        processes: Divide the rows over the processes that torchrun or `accelerate launch` has started. All of them
            must call this with the same arguments, and get the same numbers. The harness runs in the first only.
        loading: The options of :class:`gradmerge.LoadOptions`, with all keys of ``model_args``.

    Returns:
        On data, the task and its metrics by name: accuracy and F1, errors of a regression, or loss and perplexity.
        ``gradmerge.tasks.MEANINGS`` describes each. `standard_errors` has their standard errors, `columns` and
        `device` what was read and where, and `lm_eval` the metrics of every task of the harness. `notes` has what a
        user should know.

    >>> evaluate("./yelp", "reviews.jsonl", columns={"text": "review", "label": "stars"})  # doctest: +SKIP
    {'task': 'classify', 'accuracy': 0.971, …}
    >>> evaluate("./chat", "dialogues.jsonl", metrics="rouge")["rougeL"]  # doctest: +SKIP
    0.412
    """
    from .. import tasks
    from ..distributed import SINGLE, join
    from ..tasks.generation import Generation
    from ..tasks.lm_eval import LMEval, language_model
    from .measured_card import MeasuredCard

    options = tasks.complete(loading, evaluate, None)
    group = join() if processes else SINGLE
    measured_card = MeasuredCard(model) if card and group.is_first else None
    if source is None:
        if lm_eval is None:
            raise InputError("there is nothing to evaluate on. Give data, or tasks of the harness (lm_eval)")
        for name, value in (("metrics", metrics), ("head", head)):
            if value is not None:
                raise InputError(f"{name}: needs data")
    if max_new_tokens is not None and metrics is None:
        raise InputError("max_new_tokens: goes with metrics, such as metrics='exact-match'")
    generation = None if metrics is None else Generation(metrics, max_new_tokens)
    if lm_eval_tasks is not None and lm_eval is None:
        raise InputError("lm_eval_tasks: needs lm_eval, which names tasks of the folder")
    harness = LMEval(lm_eval, lm_eval_tasks) if lm_eval is not None and group.is_first else None
    found: dict[str, Any] = {}
    facts: dict[str, Any] = {"notes": []}
    loaded = None
    if source is not None:
        loaded = tasks.load_task(model, source, head=None if head is None else str(head), **options)
        group.check_equal(loaded.shared_facts())
        with shown(progress if group.is_first else False, "examples") as bar:
            bar.begin("evaluating", len(group.share(loaded.examples)) * (1 if generation is None else 2))
            found = tasks.evaluate(loaded, advance=bar.advance, generation=generation, processes=group)
        columns = {role: list(names) for role, names in loaded.columns.items()}
        facts = {"columns": columns, "device": str(loaded.device), "notes": loaded.notes}
    if harness is not None:
        module, tokenizer = language_model(str(model), options, loaded)
        found["lm_eval"] = harness.evaluate(module, tokenizer, options["limit"], options["batch_size"])
    if lm_eval is not None:
        found = group.all_gather(found)[0]
        if group.world_size > 1:
            facts["notes"].append("lm_eval ran in the first process only")
    if measured_card is not None:
        measured_card.add(None if source is None else str(source), found)
    return found | facts
