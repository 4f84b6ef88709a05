"""How good a model is, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from .. import tasks
from ..arguments import checked
from ..distributed import SINGLE, join
from ..errors import InputError
from ..progress import Progress, shown
from ..tasks import Generation, LoadedTask, LoadOptions
from ..tasks.lm_eval import Harness, language_model
from .publishing import MeasuredCard


@checked()
def evaluate(
    model: str | Path,
    source: str | Path | None = None,
    *,
    head: str | Path | None = None,
    generation: Generation | None = None,
    lm_eval: Sequence[str] | str | None = None,
    lm_eval_tasks: str | Path | None = None,
    card: bool = False,
    progress: bool | Progress = True,
    processes: bool = False,
    **loading: Unpack[LoadOptions],
) -> dict[str, Any]:
    """How good a model is: on data, by what it writes, or on tasks of the lm-evaluation-harness.

    Args:
        model: A folder, a Hub id (`org/name@revision`) or a PEFT adapter folder.
        source: A file or folder of data, or `org/name:split` of the Hub, as in `gradmerge evaluate --data`.
        head: Another model, whose head replaces that of the model: for a merge of encoders whose tasks have heads of
            their own.
        generation: Have the model write an answer to every row of the data too, and how answers are scored.
        lm_eval: Tasks of the lm-evaluation-harness, a list or `"arc_easy,hellaswag"`; with or without data.
        lm_eval_tasks: A folder with task files of the harness.
        card: Also put the numbers into the model card, and the record, of a folder that gradmerge wrote.
        progress: A bar on long work; False for none; or what is told how far it is, in examples.
        processes: Divide the rows over the processes that torchrun or `accelerate launch` has started, all of which
            must call this alike and get the same numbers. The harness runs in the first alone.
        loading: How both are loaded: the keywords of :class:`gradmerge.LoadOptions`, with all keys of ``model_args``.

    Returns:
        On data, the task and its numbers by name: accuracy and F1, errors of a regression, or loss and perplexity.
        ``gradmerge.tasks.MEANINGS`` says what each is: its unit, and whether a mean. `standard_errors` has how sure
        each is, and `lm_eval` the numbers of every task of the harness.

    >>> evaluate("./yelp", "reviews.jsonl", columns={"text": "review", "label": "stars"})  # doctest: +SKIP
    {'task': 'classify', 'accuracy': 0.971, …}
    >>> evaluate("./chat", "dialogues.jsonl", generation=Generation(["rouge"]))["rougeL"]  # doctest: +SKIP
    0.412
    """
    options = tasks.complete(loading, evaluate, None)
    head = None if head is None else str(head)
    return evaluated(model, source, generation, lm_eval, lm_eval_tasks, options, progress, card, processes, head)[0]


def evaluated(
    model: str | Path,
    source: str | Path | None,
    generation: Generation | None,
    lm_eval: Sequence[str] | str | None,
    lm_eval_tasks: str | Path | None,
    options: LoadOptions,
    progress: bool | Progress,
    card: bool,
    processes: bool = False,
    head: str | None = None,
) -> tuple[dict[str, Any], LoadedTask | None]:
    """The numbers of a model, and what it was evaluated on if that is data."""
    group = join() if processes else SINGLE
    measured = MeasuredCard(model) if card and group.is_first else None
    if generation is not None and source is None:
        raise InputError("generation: answers are compared with data; give some (--data SRC)")
    if lm_eval_tasks is not None and lm_eval is None:
        raise InputError("lm_eval_tasks: needs lm_eval (--lm-eval TASK), which names tasks of the folder")
    if source is None and lm_eval is None:
        raise InputError("nothing to evaluate on: give data (--data SRC), or lm_eval (--lm-eval TASK)")
    if head is not None and source is None:
        raise InputError("head: is for an evaluation on data")
    limit, batch_size = options["limit"], options["batch_size"]
    harness = None if lm_eval is None or not group.is_first else Harness(lm_eval, lm_eval_tasks, limit, batch_size)
    found: dict[str, Any] = {}
    loaded = None
    if source is not None:
        loaded = tasks.load_task(model, source, head=head, **options)
        group.check_equal(loaded.shared_facts())
        with shown(progress if group.is_first else False, "examples") as bar:
            bar.begin("evaluating", len(group.share(loaded.examples)) * (1 if generation is None else 2))
            found = tasks.evaluate(loaded, advance=bar.advance, generation=generation, processes=group)
    if harness is not None:
        module, tokenizer, _ = language_model(str(model), options, loaded)
        found["lm_eval"] = {task: one.summary() for task, one in harness.run(module, tokenizer).items()}
    if lm_eval is not None:
        found = group.all_gather(found)[0]
    if measured is not None:
        measured.add(None if source is None else str(source), found)
    return found, loaded
