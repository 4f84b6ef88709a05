"""How good a model is, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from .. import tasks
from ..arguments import checked
from ..progress import Progress, shown
from ..tasks import Loading
from .publishing import MeasuredCard


@checked()
def evaluate(
    model: str | Path,
    source: str | Path,
    *,
    card: bool = False,
    progress: bool | Progress = True,
    **loading: Unpack[Loading],
) -> dict[str, Any]:
    """The metrics of a model on data: accuracy and F1, errors of a regression, or loss and perplexity.

    Args:
        model: A folder, a Hub id (`org/name@revision`) or a PEFT adapter folder.
        source: A file or folder of data, or `org/name:split` of the Hub, as in `gradmerge evaluate --data`.
        card: Also put the numbers into the model card, and the record, of a folder that gradmerge wrote.
        progress: A bar on long work; False for none; or what is told how far it is, in examples.
        loading: How both are loaded, as :class:`gradmerge.Loading` says: ``task``, ``columns``, ``limit``,
            ``batch_size``, ``max_length``, ``device``, ``dtype``, ``attn``, ``tokenizer``.

    Returns:
        The task and its numbers by name. ``gradmerge.tasks.MEANINGS`` says what each is: its unit, and whether a mean.

    >>> evaluate("./yelp", "reviews.jsonl", columns={"text": "review", "label": "stars"})  # doctest: +SKIP
    {'task': 'classify', 'accuracy': 0.971, …}
    """
    measured = MeasuredCard(model) if card else None
    loaded = tasks.load_task(model, source, **tasks.complete(loading, evaluate))
    with shown(progress, "examples") as told:
        told.begin("evaluating", loaded.examples)
        numbers = tasks.evaluate(loaded, advance=told.advance)
    if measured is not None:
        measured.add(str(source), numbers)
    return numbers
