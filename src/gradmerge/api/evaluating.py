"""How good a model is, from Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def evaluate(
    model: str,
    source: str,
    *,
    task: str = "auto",
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attn: str | None = None,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """The metrics of a model (folder, Hub id or adapter folder) on data: accuracy and F1, errors, or perplexity.

    ``source`` and the options are those of `gradmerge evaluate`. What each number is, its unit and whether it is a
    mean, says ``gradmerge.tasks.MEANINGS``.

    >>> evaluate("./yelp", "reviews.jsonl", columns={"text": "review", "label": "stars"})  # doctest: +SKIP
    {'task': 'classify', 'accuracy': 0.971, …}
    """
    from .. import tasks

    loaded = tasks.load_task(
        model,
        source,
        task=task,
        columns=columns,
        limit=limit,
        max_length=max_length,
        device=device,
        dtype=dtype,
        attn=attn,
        tokenizer=tokenizer,
    )
    return tasks.evaluate(loaded, batch_size)
