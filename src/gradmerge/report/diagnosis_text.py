"""What a diagnosis found, in sentences. Where data says otherwise than curvature predicts, the data counts."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..compare.diagnosis import Diagnosis
from ..compare.penalty_check import FAR, NEAR
from ..compare.predict import BASE
from ..compare.preview import Outcome, Preview
from ..compare.scores import headline, higher_is_better, measured
from ..compare.significance import are_tied
from ..tasks.standard_errors import Difference, difference
from ..text import counted, plus_minus
from .calibration_text import calibration_words
from .formatting import in_plain_words, number

#: Where a model's P comes from, in words.
PENALTIES = {"recipe": "of the recipe", "recorded": "recorded beside it", "H_0": "H_0"}
#: How much less the worst task must be predicted to lose for another merge to be worth trying.
WORTH = 0.9
PREVIEW = "`gradmerge preview`"


def costliest(found: Diagnosis, count: int = 5) -> list[tuple[str, float]]:
    """Layer groups of the recipe's merge with their share of the predicted excess loss, all tasks weighing the same."""
    excess = found.prediction.excess
    wholes = {task: excess(found.own, task) for task in found.prediction.tasks}
    wholes = {task: whole for task, whole in wholes.items() if whole > 0}
    shares = {
        group: sum(excess(found.own, task, group) / whole / len(wholes) for task, whole in wholes.items())
        for group in (found.prediction.groups if wholes else ())
    }
    return sorted(shares.items(), key=lambda item: -item[1])[:count]


def verdict(found: Diagnosis) -> list[str]:
    """What a user should know, in sentences."""
    tuned = tuned_of(found)
    several = "s" if len(tuned) > 1 else ""
    words = [f"{found.own} merges {len(tuned)} model{several} ({', '.join(tuned)}) into {base_of(found)}."]
    words += _measured_words(found) if found.metrics else _predicted_words(found)
    layers = costliest(found, 3)
    if layers:
        listed = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in layers)
        words.append(f"Most of the predicted cost sits in {listed}.")
    words += [*_interference_words(found), *_gauge_words(found)]
    if found.recipe.method == "removal":
        return [*words, f"To try: {PREVIEW} over the strengths, with rows of what is to go and of what is to stay."]
    words += _advice(found) if found.measured is None else _measured_advice(found, found.measured)
    measured_all = set(tuned) <= set(found.examples)
    loses = not measured_all or any(_lost(found, task) for task in found.examples)
    return [*words, *(calibration_words(found.calibrate_command) if loses else [])]


def base_of(found: Diagnosis) -> str:
    return found.recipe.base.model if found.recipe.base is not None else "nothing"


def tuned_of(found: Diagnosis) -> list[str]:
    return [task for task in found.prediction.tasks if task != BASE]


def pairs(found: Diagnosis) -> Iterable[tuple[str, str]]:
    tuned = tuned_of(found)
    return ((one, other) for i, other in enumerate(tuned) for one in tuned[:i])


def ratio(value: float, whole: float) -> float | None:
    return value / whole if whole > 0 else None


def _predicted_words(found: Diagnosis) -> list[str]:
    reference = found.reference
    if reference == found.own:
        return []
    times = {task: found.relative(found.own, task) for task in found.prediction.tasks}
    parts = [f"{value:.2g}× for {task}" for task, value in times.items() if value is not None]
    return [f"Beside {reference} at the same weights, its predicted loss is {', '.join(parts)}."] if parts else []


def _measured_words(found: Diagnosis) -> list[str]:
    words = []
    for task, metrics in found.metrics[found.own].items():
        name, apart = headline(metrics), _beside_tuned(found, task)
        merged, tuned = (measured(found.metrics[model][task], name) for model in (found.own, "tuned"))
        if merged is None or tuned is None:
            continue
        on = f"On {task} ({counted(range(found.examples[task]), 'example')})"
        what = f"{on} its {in_plain_words(name)} is {merged:.4g}"
        other = f"{'the base' if task == BASE else 'the model tuned for it'} has {tuned:.4g}"
        beside = ", a tie on the same examples" if apart is not None and apart.tied else ""
        words.append(f"{what}; {other}{beside}.")
    return words


def _beside_tuned(found: Diagnosis, task: str) -> Difference | None:
    """How much larger a task's metric is for the merge than for the task's own model, on the same rows."""
    name = headline(found.metrics[found.own][task])
    one, other = (found.rows.get(model, {}).get(task, {}) for model in (found.own, "tuned"))
    return difference(one[name], other[name]) if name in one and name in other else None


def _lost(found: Diagnosis, task: str) -> float:
    """How much worse the merge is on a task than the task's own model, in standard errors; 0 where they are tied."""
    apart = _beside_tuned(found, task)
    if apart is None or apart.tied:
        return 0.0
    sign = -1.0 if higher_is_better(headline(found.metrics[found.own][task])) else 1.0
    return max(0.0, sign * apart.value / apart.error) if apart.error else math.inf


def _interference_words(found: Diagnosis) -> list[str]:
    shares = {pair: found.prediction.between(*pair).share for pair in pairs(found)}
    if not shares:
        return []
    (one, other), worst = max(shares.items(), key=lambda item: item[1])
    extent = f"{100 * worst:.0f} % of what they both care about"
    if worst > 0.5:
        apart = f"{one} and {other} pull apart on {extent}"
        if {one, other} <= set(found.examples) and not _lost(found, one) and not _lost(found, other):
            return [f"{apart}; but measured, neither loses beside the model tuned for it."]
        return [f"{apart}: expect a trade-off between them."]
    if worst < 0.005:
        return ["Where two tasks care about the same entries, they move them in the same direction."]
    return [f"No two tasks pull apart on more than {extent} (chance gives 50 %)."]


def _gauge_words(found: Diagnosis) -> list[str]:
    if "penalty" not in found.recipe.rule.inputs:  # it takes no penalty for granted
        return []
    known = {task: gauge for task, gauge in found.gauges.items() if gauge.gauge is not None}
    words = []
    for low, high, says in (
        (0.0, NEAR, "tuned under the penalty {}, as the merge assumes."),
        (NEAR, FAR, "tuned under something like the penalty {}, or not to the end."),
        (FAR, math.inf, "not tuned under the penalty {}" + _without_penalty_words(found)),
    ):
        fitting = {task: gauge for task, gauge in known.items() if low <= (gauge.gauge or 0.0) < high}
        if fitting:
            names = ", ".join(f"{task} ({_gauge(gauge.gauge)})" for task, gauge in fitting.items())
            were = "were" if len(fitting) > 1 else "was"
            kinds = " and ".join(dict.fromkeys(PENALTIES[gauge.penalty] for gauge in fitting.values()))
            words.append(f"By the gauge (0: tuned under it; about 1 or more: not), {names} {were} {says.format(kinds)}")
    return words


def _gauge(gauge: float | None) -> str:
    """Far above 1 the number says nothing more."""
    return "over 100" if (gauge or 0.0) > 100 else number(gauge, 2)


def _without_penalty_words(found: Diagnosis) -> str:
    """What follows from a gauge: what the merge without the penalty measured, where it was."""
    none = "`base.penalty: none`"
    if found.measured is None or not found.without_penalty:
        return f": {none} may suit better; {PREVIEW} with --set base.penalty=none and data tells."
    row = next(row for row in found.measured.rows if row.setting.method == found.without_penalty)
    how = _against(found.measured, row, found.measured.reference)
    if are_tied(row, found.measured.reference, found.measured.criterion):
        return f"; but measured with {none} the merge is tied with this one ({how}), which is no reason to change it."
    if _better(found.measured, row, found.measured.reference):
        return f": set {none}, with which the merge measured better ({how})."
    return f"; but measured with {none} the merge is worse ({how}): leave it as it is."


def _better(compared: Preview, row: Outcome, other: Outcome) -> bool:
    """Whether one merge measured better than another, by more than noise."""
    if row.score is None or other.score is None or are_tied(row, other, compared.criterion):
        return False
    return row.score > other.score if compared.criterion.higher else row.score < other.score


def _against(compared: Preview, row: Outcome, other: Outcome) -> str:
    """`average accuracy 0.84 ± 0.016 against 0.81 ± 0.018; difference 0.03 ± 0.01`."""
    apart = compared.difference(row, other)
    one, two = compared.shown_score(row), compared.shown_score(other)
    scores = f"{in_plain_words(compared.criterion.name)} {one:.4g} against {two:.4g}"
    return scores if apart is None else f"{scores}, difference {plus_minus(number(apart.value, 2), apart)}"


def _measured_advice(found: Diagnosis, compared: Preview) -> list[str]:
    """What to try where merges were measured: no prediction stands against that."""
    own = compared.reference
    others = [row for row in compared.rows if row is not own and row.setting.method != found.without_penalty]
    better = [row for row in others if _better(compared, row, own)]
    where = "" if len(found.examples) == len(found.prediction.tasks) else f" on the data of {', '.join(found.examples)}"
    predicted = _predicted_best(found)
    if better:
        best = min(
            better, key=lambda row: (row.rank, -(row.score or 0) if compared.criterion.higher else row.score or 0)
        )
        name = best.setting.method
        against = ""
        if predicted != name and _worst(found, name) > _worst(found, found.own):
            against = (
                f" Curvature predicts that its worst task loses more than with {found.own}; the measurement counts."
            )
        what = f"**{name} measured better** than {found.own}{where}: {_against(compared, best, own)}."
        return [f"{what}{against} To try: {name}, and {PREVIEW} over its weights."]
    words = f"Measured{where}, none of the other methods is better than {found.own} by more than two standard errors"
    tied = [row.setting.method for row in others if are_tied(row, own, compared.criterion)]
    words += f"; tied with it: {', '.join(tied)}." if tied else "."
    if predicted != found.own:
        row = next(row for row in others if row.setting.method == predicted)
        is_tied = "the two are tied" if predicted in tied else "it is worse"
        words += (
            f" Curvature predicts that the worst task of {predicted} loses less; measured, {is_tied} "
            f"({_against(compared, row, own)}), and the measurement counts."
        )
    losses = {task: _lost(found, task) for task in found.examples}
    if BASE in losses and losses[BASE] and losses[BASE] == max(losses.values()):
        why = "since the base's own data measured the clearest loss"
        return [words, f"To try: smaller weights, {why} (`gradmerge preview --suggest`)."]
    return [words, f"To try: {PREVIEW} over the weights, with rows of each task; more rows tell more settings apart."]


def _worst(found: Diagnosis, candidate: str) -> float:
    """The largest predicted loss of a task, as a multiple of the reference's."""
    return max(found.relative(candidate, task) or 0.0 for task in found.prediction.tasks)


def _predicted_best(found: Diagnosis) -> str:
    """The merge whose worst task is predicted to lose clearly less than the diagnosed one's, or that one."""
    best = min(found.candidates, key=lambda candidate: _worst(found, candidate))
    return best if _worst(found, best) < WORTH * _worst(found, found.own) else found.own


def _advice(found: Diagnosis) -> list[str]:
    """What to try, as far as curvature can say."""
    best, tasks = _predicted_best(found), found.prediction.tasks
    if best != found.own:
        return [f"To try: {best}, whose worst task is predicted to lose less ({PREVIEW} sweeps the weights)."]
    if max(tasks, key=lambda task: found.relative(found.own, task) or 0.0) == BASE:
        why = "since the base's own data is predicted to lose most"
        return [f"To try: smaller weights, {why} (`gradmerge preview --suggest`)."]
    return [f"To try: {PREVIEW} over the weights, with a few labelled rows of each task."]
