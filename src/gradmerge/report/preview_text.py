"""What a preview found, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..compare.preview import Outcome, Preview
from ..compare.search import Suggestion
from ..compare.significance import lost_share
from ..recipe import Varying, in_words
from ..tasks.standard_errors import TIE
from ..text import plus_minus
from .calibration_text import calibration_words
from .formatting import in_plain_words, number

TRUST = (
    "Predictions come from curvature alone and are shown as ranks and as multiples of a reference merge, never as "
    "losses. How far to trust them: in an independent study (five sentiment models, three seeds) the weight with the "
    "smallest predicted loss of the worst task was the best of a grid every time, and the smallest sum chose weights "
    "that were too small; over 50 to 70 merges the predictions ranked true losses with Spearman's ρ of only 0.4 to 0.5 "
    "on average (0.9 on one task, 0 on another), and hardly ranked accuracy. A handful of labelled rows "
    "(`--data NAME=SRC`) overrides them."
)
#: What simple means, as `compare/significance.py` has it.
SIMPLEST = "fewest changed keys, then the method that needs least, then the fewest different weights"
#: With more tied settings than this, their ranges are told instead of their names.
NAMED = 4


def verdict(found: Preview, suggestion: Suggestion | None = None) -> list[str]:
    """What a user should know, in sentences."""
    best, leading = found.best(), found.leading()
    if best is None or leading is None:
        words = [
            "No setting is called the best: what a removal takes out and what is to stay pull against each other. "
            "The figures show both."
        ]
        return words if found.measured else [*words, TRUST]
    words = _measured_words(found, best, leading) if found.measured else _predicted_words(found, best)
    if found.criterion.shares:
        words.append("A share of 0 is as good as each task's own model, and 1 as bad as the base.")
    if suggestion is not None and suggestion.weights:
        words.append(f"Suggested weights: {by_task(suggestion.weights)}.")
    words += [] if found.measured else [TRUST]
    return [*words, *(calibration_words(found.calibrate_command) if _may_lose(found, best) else [])]


def _may_lose(found: Preview, row: Outcome) -> bool:
    """Whether a merge loses beside a task's own model by more than noise, or nothing measured says that it does not."""
    if not found.measured:
        return True
    shares = {task: lost_share(row, task) for task in found.tasks}
    known = {task: share for task, share in shares.items() if share is not None and math.isfinite(share)}
    if not set(found.models) <= set(known):
        return True
    return any(share > TIE * (getattr(share, "error", None) or 0.0) for share in known.values())


def _predicted_words(found: Preview, best: Outcome) -> list[str]:
    leading = found.leading() or best
    times = found.relative_score(leading)
    beside = f": {number(times)} times that of {reference_words(found)}" if times is not None else ""
    if leading is found.own:
        beside = ", and is the recipe's own merge"
    words = [f"Of {_count(found)}, **{_named(found, leading)}** has the smallest {found.criterion.name}{beside}."]
    if best is not leading:
        words.append(f"**{_named(found, best)}** is taken: it is the recipe's own merge, and within 1 % of that.")
    if best.setting.weights:
        close = found.as_good(best.setting.method)
        tried = f"of its {sum(row.setting.method == best.setting.method for row in found.rows)} settings"
        flat = range_words(found, close)
        are = "are" if len(close) > 1 else "is"
        several = f"{len(close)} {tried} {are} within 1 % of the smallest{f': weights {flat}' if flat else ''}."
        other = any(row is not leading for row in close)
        words.append(several if other else f"No other {tried} is within 1 % of it.")
    return words


def _measured_words(found: Preview, best: Outcome, leading: Outcome) -> list[str]:
    tied, own = found.all_tied(), found.own
    what = f"{'highest' if found.criterion.higher else 'smallest'} {in_plain_words(found.criterion.name)}"
    if len(tied) == 1:
        none = "; no other is within two standard errors of it on the same rows" if len(found.rows) > 1 else ""
        words = [f"Of {_count(found)}, **{_named(found, best)}** has the {what}: {_score(found, best)}{none}."]
    else:
        asked = sum(map(found.among_best, found.rows))
        more = " and the recipe's own merge" if len(tied) > asked else ""
        most = f"{what}, {_score(found, leading)} ({leading.setting.name})"
        words = [f"{asked} of {_settings(found)}{more} are **tied** with the {most}."]
        them = "them" if own is None or own.rank == 1 else "those that are not tied with the recipe's own merge"
        why = "it is the recipe's own merge" if best is own else f"it is the simplest of {them} ({SIMPLEST})"
        scored = "" if best is leading else f" It has {_score(found, best)}."
        words.append(f"**{_named(found, best)}** is taken, as {why}.{scored}")
        where = " on any task" if found.criterion.by_rank else ""
        words.append(
            f"On the same rows none differs by more than two standard errors{where}: {_tied_words(found, tied)}."
        )
    if found.reference is not best:
        words.append(_reference_words(found, best))
    return words


def _settings(found: Preview) -> str:
    return f"{len(found.rows)} setting{'s' if len(found.rows) > 1 else ''}"


def _count(found: Preview) -> str:
    return _settings(found) + (" and the recipe's own" if len(found.compared()) > len(found.rows) else "")


def _reference_words(found: Preview, best: Outcome) -> str:
    """How the recipe's own merge compares with what is taken."""
    reference, apart = found.reference, found.difference(found.reference, best)
    has = f"{capital(reference_words(found))} has {_score(found, reference)}"
    if reference.rank == 1 and not any(reference is row for row in found.rows):
        return f"{has}, and is tied with the best too."
    if apart is None:
        return f"{has}."
    return f"{has}, which is {number(abs(apart.value))}{plus_minus('', apart)} {'more' if apart.value > 0 else 'less'}."


def _tied_words(found: Preview, tied: Sequence[Outcome]) -> str:
    """By name, or the ranges of their weights, method by method."""
    if len(tied) <= NAMED:
        return ", ".join(row.setting.name for row in tied)
    parts = []
    for method in found.methods:
        rows = [row for row in tied if row.setting.method == method]
        ranges = range_words(found, rows)
        every = f" ({len(rows)} settings)" if len(rows) > 1 else ""
        parts += [f"{method}{f' {ranges}' if ranges else ''}{every}"] if rows else []
    return "; ".join(parts)


def _score(found: Preview, row: Outcome) -> str:
    value = found.shown_score(row)
    return plus_minus(number(None if value is None else float(value)), value)


def _named(found: Preview, row: Outcome) -> str:
    """Method and weights; of lists over the layers another sentence has the numbers."""
    setting = row.setting
    if any(isinstance(weight, tuple) for weight in setting.weights):
        return f"{setting.method} with weights that differ between layers"
    several = "s" if len(set(setting.weights)) > 1 else ""
    weights = f" with weight{several} {weights_words(found, row)}" if setting.weights else ""
    changes = setting.changes_in_words
    return f"{setting.method}{weights}{f', {changes}' if changes else ''}"


def weights_words(found: Preview, row: Outcome) -> str:
    """`0.3`, or `a 0.3, b 0.5`."""
    return by_task(found.weights(row)) if len(set(row.setting.weights)) != 1 else row.setting.weights_in_words


def by_task(weights: Mapping[str, Varying]) -> str:
    return ", ".join(f"{task} {in_words(weight)}" for task, weight in weights.items())


def reference_words(found: Preview) -> str:
    setting = found.reference.setting
    own = "the recipe's own merge" if setting.method == found.recipe.method else "the reference"
    return f"{own} ({setting.name})"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def range_words(found: Preview, rows: Sequence[Outcome]) -> str:
    """What some settings have: `0.3–0.6`, or weights by task where they do not differ by layer, and other keys."""
    spans = {task: _span([low, high]) for task, (low, high) in found.spans(rows).items()}
    parts = [f"{task} {span}" for task, span in spans.items()]
    if len(spans) == len(found.models) and len(set(spans.values())) == 1:
        parts = [spans[found.models[0]]]
    changes = [dict(row.setting.changes) for row in rows]
    for key in dict.fromkeys(key for one in changes for key in one):
        parts.append(f"{key.removeprefix('options.')} {_span([one[key] for one in changes if key in one])}")
    return ", ".join(parts)


def _span(values: Sequence[Any]) -> str:
    """`0.3–0.6`, or the values one by one where they are no numbers."""
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return " or ".join(dict.fromkeys(map(in_words, values)))
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"
