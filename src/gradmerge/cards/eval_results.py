"""Evaluation results in a card: `model-index` in its metadata, and a table with standard errors and number of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from ..errors import InputError
from ..text import first_line, one_line
from .markdown import as_code

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

_BEGIN, _END = "<!-- gradmerge: evaluations -->", "<!-- end of evaluations -->"
#: Marks where the table goes.
PLACEHOLDER = f"{_BEGIN}\n{_END}"
_SECTION = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.S)
#: Metrics that have another name on the Hub.
METRICS = {"macro_f1": "f1", "micro_f1": "f1", "pearson_r": "pearsonr", "spearman_r": "spearmanr", "r2": "r_squared"}


def evaluation(data: str, dataset: Mapping[str, str], numbers: Mapping[str, Any], how: str = "") -> dict[str, Any]:
    """Return an entry of `evaluations` in a record.

    Args:
        data: The data, without the path.
        dataset: `type` (Hub id or name), `name`, and `split` and `config` if there are any.
        numbers: The result of `gradmerge evaluate`.
        how: What else a reader should know about the rows.
    """
    metrics = {name: x for name, x in numbers.items() if name not in ("tokens", "examples") and _is_finite(x)}
    errors = numbers.get("standard_errors") or {}
    return {
        "data": data,
        "dataset": dict(dataset),
        "task": str(numbers.get("task", "")),
        "rows": numbers.get("examples"),
        "metrics": metrics,
        "standard_errors": {name: x for name, x in errors.items() if name in metrics and _is_finite(x)},
        **({"how": how} if how else {}),
    }


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def with_evaluations(card: str, name: str, evaluations: Sequence[Mapping[str, Any]], where: str = "README.md") -> str:
    """Return a card with these evaluations. Its other text, and results on other data, stay."""
    from huggingface_hub import ModelCard

    try:
        parsed = ModelCard(card if card.startswith("---") else f"---\n\n---\n\n{card}")
        data: Any = parsed.data
        earlier: list[EvalResult] = data.eval_results or []
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{where}: its front matter cannot be read: {first_line(error)}") from error
    new = [result for item in evaluations for result in _eval_results(item, data.pipeline_tag)]
    replaced = {(result.dataset_type, result.dataset_config, result.dataset_split) for result in new}
    kept = [x for x in earlier if (x.dataset_type, x.dataset_config, x.dataset_split) not in replaced]
    if kept or new:
        data.eval_results = kept + new
        data.model_name = data.model_name or one_line(name)
    section = f"{_BEGIN}\n\n## Evaluation\n\n{_table(evaluations)}\n\n{_END}"
    if _SECTION.search(parsed.text):
        parsed.text = _SECTION.sub(lambda _: section, parsed.text, count=1)
    else:
        parsed.text = f"{parsed.text.rstrip()}\n\n{section}\n"
    return str(parsed)


def _eval_results(evaluation: Mapping[str, Any], pipeline_tag: str | None) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    dataset = evaluation["dataset"]
    return [
        EvalResult(
            task_type=pipeline_tag or "other",
            dataset_type=dataset["type"],
            dataset_name=one_line(dataset["name"]),
            dataset_config=dataset.get("config"),
            dataset_split=dataset.get("split"),
            metric_type=METRICS.get(metric, metric),
            metric_name=metric,
            metric_value=float(f"{value:.6g}"),
        )
        for metric, value in evaluation["metrics"].items()
    ]


def _table(evaluations: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| data | rows | metric | value | standard error |", "|---|---:|---|---:|---:|"]
    for item in evaluations:
        rows = "" if item["rows"] is None else f"{item['rows']:,}"
        for metric, value in item["metrics"].items():
            error = item["standard_errors"].get(metric)
            error = "" if error is None else f"{error:.2g}"
            lines.append(f"| {as_code(item['data'])} | {rows} | {as_code(metric)} | {value:.5g} | {error} |")
    lines += [f"\n{as_code(item['data'])}: {one_line(item['how'])}." for item in evaluations if item.get("how")]
    return "\n".join(lines)
