"""Measured metrics of a model in its card: the `model-index` of the front matter, and a table with errors and rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError
from ..markdown import as_card, as_code, split_card
from ..text import one_line

#: Where the table goes.
_BEGIN, _END = "<!-- gradmerge: evaluations -->", "<!-- end of evaluations -->"
PLACE = f"{_BEGIN}\n{_END}\n"
_PLACE = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.S)
#: Tasks as the Hub calls them.
TASKS = {
    "classify": "text-classification",
    "causal-lm": "text-generation",
    "seq2seq": "text-generation",
    "image": "image-classification",
    "embedding": "sentence-similarity",
}
#: Metrics that the Hub has another identifier for.
METRICS = {
    "macro_f1": "f1",
    "micro_f1": "f1",
    "pearson_r": "pearsonr",
    "spearman_r": "spearmanr",
    "r2": "r_squared",
    "loss_per_example": "loss",
    "loss_per_token": "loss",
    "token_accuracy": "accuracy",
    "rouge1": "rouge",
    "rouge2": "rouge",
    "rougeL": "rouge",
}
#: Counts, which are no metrics.
COUNTS = ("tokens", "examples")


def evaluation(source: str, dataset: Mapping[str, str], numbers: Mapping[str, Any], how: str = "") -> dict[str, Any]:
    """An entry of a record: what was measured, on what, with errors and the number of rows.

    Args:
        source: The data, without the path to them.
        dataset: `type` (the id of the Hub, or a name), `name`, and `split` and `config` where there are some.
        numbers: As `gradmerge evaluate` has them.
        how: What else should be known of the rows.
    """
    values = {name: v for name, v in numbers.items() if name not in COUNTS and _is_number(v)}
    errors = {name: v for name, v in (numbers.get("standard_errors") or {}).items() if name in values and _is_number(v)}
    return {
        "data": source,
        "dataset": dict(dataset),
        "task": str(numbers.get("task", "")),
        "rows": numbers.get("examples"),
        "metrics": values,
        "standard_errors": errors,
        **({"how": how} if how else {}),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def with_evaluations(card: str, name: str, evaluations: Sequence[Mapping[str, Any]], where: str = "README.md") -> str:
    """A card with these measurements; what else it says, also measurements on other data, stays as it is."""
    front, body = split_card(card, where)
    front["model-index"] = _index(front, name, evaluations, where)
    section = f"{_BEGIN}\n\n## Evaluation\n\n{_table(evaluations)}\n\n{_END}"
    place = _PLACE.search(body)
    body = f"{body.rstrip()}\n\n{section}" if place is None else body[: place.start()] + section + body[place.end() :]
    return as_card(front, body)


def _index(
    front: Mapping[str, Any], name: str, evaluations: Sequence[Mapping[str, Any]], where: str
) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    new = [_result(one, front.get("pipeline_tag")) for one in evaluations]
    try:
        [stated] = front.get("model-index") or [{"name": name, "results": []}]
        title = str(stated["name"])
        kept = [one for one in stated["results"] if not any(one["dataset"] == other["dataset"] for other in new)]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{where}: its model-index is not one model with its results; mend it, or remove it"
        ) from error
    return [{"name": title, "results": [*kept, *new]}]


def _result(one: Mapping[str, Any], tag: Any) -> dict[str, Any]:
    metrics = [
        {"type": METRICS.get(metric, metric), "name": metric, "value": float(f"{value:.6g}")}
        for metric, value in one["metrics"].items()
    ]
    task = tag if isinstance(tag, str) else TASKS.get(one["task"], one["task"] or "other")
    return {"task": {"type": task}, "dataset": dict(one["dataset"]), "metrics": metrics}


def _table(evaluations: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| data | rows | metric | value | standard error |", "|---|---:|---|---:|---:|"]
    for one in evaluations:
        for metric, value in one["metrics"].items():
            error = one["standard_errors"].get(metric)
            rows = "" if one["rows"] is None else f"{one['rows']:,}"
            told = "" if error is None else f"{error:.2g}"
            lines.append(f"| {as_code(one['data'])} | {rows} | {as_code(metric)} | {value:.5g} | {told} |")
    notes = [f"{as_code(one['data'])}: {one_line(one['how'])}." for one in evaluations if one.get("how")]
    return "\n".join([*lines, *("\n" + note for note in notes)])
