"""The results of previews and diagnoses in sentences, and what to do next: a command to paste.

Advice never contradicts a measurement, and a difference within two standard errors is a tie.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cards.provenance import model_references
from ..compare.diagnose import FINE_TUNED, UNDER_PENALTY, WITHOUT_PENALTY, Diagnosis
from ..compare.ranking import Outcome, Preview, headline, higher_is_better, lost_share, with_error
from ..compare.settings import BASE, changes_text, task_names
from ..recipe import Recipe, in_words
from ..refinement.inputs import model_reference, recorded_models
from ..tasks.metrics import TIE, Difference, difference
from ..text import counted, one_line, plus_minus
from ..urls import redact
from .page import number, plain_words

#: Placeholders of commands for a merged model, for rows and for a recipe that are not known.
OUT, ROWS, RECIPE = "OUT", "ROWS", "RECIPE"
TRUST = (
    "Predictions use only curvature. They rank merges and layers, and are not losses in nats. In a study of five "
    "sentiment models they ranked 50 to 70 merges by true loss with Spearman's ρ of 0.4 to 0.5 on average (0.9 on one "
    "task, 0 on another), and hardly ranked accuracy. A few labeled rows (`--data NAME=SRC`) are more reliable."
)
#: The penalty P that a model is checked for.
PENALTIES = {"recipe": "in the recipe", "recorded": "recorded beside the model", "H_0": "H_0"}
#: Another merge is worth trying if its worst task is predicted to lose less than this share of the own merge's.
WORTH_TRYING = 0.9


def next_commands(
    recipe: Recipe,
    data: Mapping[str, str],
    *,
    merged: str | None = None,
    columns: Mapping[str, str] | None = None,
    changes: Sequence[str] | Mapping[str, Any] | None = None,
    out: str = OUT,
) -> dict[str, str]:
    """Return the beginnings of `gradmerge merge` and `gradmerge preview`, and `gradmerge calibrate`, as shell commands.

    Recipes whose merge cannot be calibrated have no `calibrate`: a removal, or models of other layers or another
    vocabulary than the merge. Commands that a report cannot show have no entry either.

    Args:
        recipe: The recipe.
        data: Task (as `diagnose` and `preview` name it, or `base`) → data source.
        merged: The merged model, if it is written.
        columns: Which column of the data is what.
        changes: The keys that were set in the recipe.
        out: Without ``merged``: the folder that the merge will be written to, by default the placeholder ``OUT``.
    """
    file = RECIPE if recipe.file is None else os.path.relpath(recipe.file)
    given = [f"{key}={value}" for key, value in changes.items()] if isinstance(changes, Mapping) else changes or ()
    settings = [word for text in given for word in ("--set", text)]
    named = ["--columns", ",".join(f"{key}={column}" for key, column in columns.items())] if columns else []
    sources = [word for name, source in data.items() for word in ("--data", f"{name}={source}")]
    commands = {
        "merge": ["gradmerge", "merge", file, *settings],
        "preview": ["gradmerge", "preview", file, *settings, *sources, *(named if data else [])],
    }
    if calibrate := _calibrate(recipe, data, merged, out):
        commands["calibrate"] = [*calibrate, *named, "-o", "calibrated"]
    texts = {name: redact(shlex.join(words)) for name, words in commands.items()}
    # Reports mark code with backticks and bold with asterisks.
    return {k: text for k, text in texts.items() if "`" not in text and "**" not in text and one_line(text) == text}


def _calibrate(recipe: Recipe, data: Mapping[str, str], merged: str | None, out: str) -> list[str]:
    """Return the words of `gradmerge calibrate`; empty if the merge cannot be calibrated."""
    models, tasks = model_references(recipe, Path.cwd()), task_names(recipe)
    if recipe.method == "removal" or recipe.tokenizer is not None or len(models) != len(tasks):
        return []
    known = models
    if merged is not None:
        known = recorded_models(Path(merged)) if Path(merged).is_dir() else {}
    words, teachers = ["gradmerge", "calibrate", merged or out], []
    for task, (name, model) in zip(tasks, models.items(), strict=True):
        words += ["--data", f"{name}={data.get(task, ROWS)}"]
        if name not in known:
            teachers.append((name, model))
    if BASE in data and recipe.base is not None:
        words += ["--data", f"{BASE}={data[BASE]}"]
        teachers.append((BASE, model_reference(recipe.base.model, recipe.folder, Path.cwd())))
    return [*words, *(word for name, model in teachers for word in ("--teacher", f"{name}={model}"))]


def preview_verdict(preview: Preview) -> list[str]:
    """Return the result of a preview in sentences."""
    best, leading = preview.best(), preview.leading()
    trust = [] if preview.measured else [TRUST]
    if best is None or leading is None:
        if all(row.score is None for row in preview.rows):
            return ["No setting is best, because none has a score.", *trust]
        why = "No setting is best: a removal trades what is forgotten against what is kept. The figures show both."
        return [why, *trust]
    words = _measured_best(preview, best, leading) if preview.measured else _predicted_best(preview, best, leading)
    if preview.criterion.shares:
        words.append("A share of 0 is as good as each task's own model, and 1 is as bad as the base.")
    words += trust
    if "merge" in preview.commands:
        words.append(f"To merge it: `{preview.commands['merge']}`")
    return [*words, *(_calibration_advice(preview.commands) if _may_lose(preview, best) else [])]


def _calibration_advice(commands: Mapping[str, str]) -> list[str]:
    """Return the advice to calibrate; empty if the merge cannot be calibrated."""
    command = commands.get("calibrate")
    if not command:
        return []
    words = shlex.split(command)
    unknown = ["OUT with the folder of the merge"] if OUT in words else []
    if any(word.endswith(f"={ROWS}") for word in words):
        unknown.append("ROWS with a file of unlabeled rows of the task")
    replace = f" Replace {' and '.join(unknown)}." if unknown else ""
    what = "Calibration brings the merge closer to its fine-tuned models. It needs a few hundred rows of each task"
    return [f"{what}, without labels.{replace} To calibrate: `{command}`"]


def _may_lose(preview: Preview, row: Outcome) -> bool:
    """Return whether a merge loses on a task compared with the task's own model, or this was not measured."""
    shares = [lost_share(row, task) for task in preview.tasks] if preview.measured else []
    known = [share for share in shares if share is not None and math.isfinite(share)]
    if len(known) < len(preview.tasks) or not set(preview.models) <= set(preview.tasks):
        return True
    return any(share > TIE * (getattr(share, "error", None) or 0.0) for share in known)


def _predicted_best(preview: Preview, best: Outcome, leading: Outcome) -> list[str]:
    beside = f": {_score(preview, leading)} times that of {reference_text(preview)}"
    if leading is preview.own:
        beside = ". It is the recipe's own merge"
    settings = counted(preview.rows, "setting")
    words = [f"Of {settings}, **{_named(preview, leading)}** has the smallest {preview.criterion.name}{beside}."]
    if best is not leading:
        words.append(f"Take **{_named(preview, best)}**: it is the recipe's own merge, and within 1 % of the smallest.")
    return words


def _measured_best(preview: Preview, best: Outcome, leading: Outcome) -> list[str]:
    tied, settings = preview.all_tied(), counted(preview.rows, "setting")
    what = f"{'highest' if preview.criterion.higher else 'smallest'} {plain_words(preview.criterion.name)}"
    if len(tied) == 1:
        others = "; no other is within two standard errors of it on the same rows" if len(preview.rows) > 1 else ""
        words = [f"Of {settings}, **{_named(preview, best)}** has the {what}: {_score(preview, best)}{others}."]
    else:
        top = f"{what}, {_score(preview, leading)} ({leading.setting.name})"
        words = [f"{len(tied)} of {settings} are **tied** with the {top}: within two standard errors on the same rows."]
        simplest = "them" if preview.own is None else "those that are better than the recipe's own merge"
        why = "it is the recipe's own merge" if best is preview.own else f"it is the simplest of {simplest}"
        scored = "" if best is leading else f" Its score is {_score(preview, best)}."
        words.append(f"Take **{_named(preview, best)}**: {why}.{scored}")
    if preview.reference is not best:
        words.append(_reference_result(preview, best))
    return words


def _reference_result(preview: Preview, best: Outcome) -> str:
    """Compare the recipe's own merge with the setting to use, in a sentence."""
    apart, text = preview.difference(preview.reference, best), reference_text(preview)
    has = f"{text[:1].upper() + text[1:]} has {_score(preview, preview.reference)}"
    if apart is None or apart.tied:
        return f"{has}{'' if apart is None else ', which is tied with it'}."
    return f"{has}, which is {number(abs(apart.value))}{plus_minus('', apart)} {'more' if apart.value > 0 else 'less'}."


def _score(preview: Preview, row: Outcome) -> str:
    value = preview.shown_score(row)
    return plus_minus(number(None if value is None else float(value)), value)


def _named(preview: Preview, row: Outcome) -> str:
    """Method, weights and changes."""
    several = "s" if len(set(row.setting.weights)) > 1 else ""
    weights = f" with weight{several} {weights_text(preview, row)}" if row.setting.weights else ""
    changes = changes_text(row.setting.changes)
    return f"{row.setting.method}{weights}{f', {changes}' if changes else ''}"


def weights_text(preview: Preview, row: Outcome) -> str:
    """`0.3`, or `a 0.3, b 0.5`."""
    if len(set(row.setting.weights)) == 1:
        return row.setting.weights_text
    return ", ".join(f"{task} {in_words(weight)}" for task, weight in preview.weights(row).items())


def reference_text(preview: Preview) -> str:
    what = "the reference" if preview.own is None else "the recipe's own merge"
    return f"{what} ({preview.reference.setting.name})"


def ranges_text(preview: Preview, rows: Sequence[Outcome]) -> str:
    """Return the range of weights of some settings, `0.3–0.6` or by task, or else their number."""
    if len(rows) > 1 and any(row.setting.changes for row in rows):
        return counted(rows, "setting")
    spans = {task: f"{a:g}" if a == b else f"{a:g}–{b:g}" for task, (a, b) in preview.spans(rows).items()}
    if len(spans) == len(preview.models) and len(set(spans.values())) == 1:
        return spans[preview.models[0]]
    return ", ".join(f"{task} {span}" for task, span in spans.items()) or "yes"


def diagnosis_verdict(diagnosis: Diagnosis) -> list[str]:
    """Return the result of a diagnosis in sentences."""
    models = f"{counted(diagnosis.tuned, 'model')} ({', '.join(diagnosis.tuned)})"
    words = [f"{diagnosis.own} merges {models} into {diagnosis.base_name}."]
    words += _measured_results(diagnosis) if diagnosis.outcomes else _predicted_results(diagnosis)
    layers = costliest_layers(diagnosis, 3)
    if layers:
        listed = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in layers)
        words.append(f"Most of the predicted cost is in {listed}.")
    words += [*_interference_results(diagnosis), *_penalty_results(diagnosis)]
    if diagnosis.recipe.rule.removes:
        return [
            *words,
            f"To try several strengths, on rows of the forget set and the retain set: {_preview(diagnosis)}",
        ]
    words += (
        _predicted_advice(diagnosis) if diagnosis.measured is None else _measured_advice(diagnosis, diagnosis.measured)
    )
    loses = not set(diagnosis.tuned) <= set(diagnosis.examples) or any(
        _loss(diagnosis, task) for task in diagnosis.examples
    )
    return [*words, *(_calibration_advice(diagnosis.commands) if loses else [])]


def _preview(diagnosis: Diagnosis, *options: str) -> str:
    """Return the command that compares settings of the recipe."""
    command = diagnosis.commands.get("preview", f"gradmerge preview {RECIPE}")
    return f"`{' '.join([command, *options, '-o', 'preview'])}`"


def _compare_with(diagnosis: Diagnosis, method: str) -> str:
    """Return the command that compares the recipe's method with another, over the weights."""
    own = [diagnosis.recipe.method] if diagnosis.recipe.rule.fallback is None else []
    return _preview(diagnosis, "--methods", ",".join(dict.fromkeys([*own, method])))


def costliest_layers(diagnosis: Diagnosis, count: int = 5) -> list[tuple[str, float]]:
    """Return the layer groups with the largest shares of the predicted excess loss. All tasks count equally."""
    excess = diagnosis.prediction.excess
    wholes = {task: excess(diagnosis.own, task) for task in diagnosis.prediction.tasks}
    wholes = {task: whole for task, whole in wholes.items() if whole > 0}
    shares = {
        group: sum(excess(diagnosis.own, task, group) / whole / len(wholes) for task, whole in wholes.items())
        for group in (diagnosis.prediction.groups if wholes else ())
    }
    return sorted(shares.items(), key=lambda item: -item[1])[:count]


def _predicted_results(diagnosis: Diagnosis) -> list[str]:
    times = {task: diagnosis.relative(diagnosis.own, task) for task in diagnosis.prediction.tasks}
    parts = [f"{value:.2g}× for {task}" for task, value in times.items() if value is not None]
    if diagnosis.reference == diagnosis.own or not parts:
        return []
    return [f"Its predicted loss, relative to {diagnosis.reference} at the same weights, is {', '.join(parts)}."]


def _measured_results(diagnosis: Diagnosis) -> list[str]:
    words = []
    for task in diagnosis.examples:
        name, apart = headline(diagnosis.metrics(diagnosis.own, task)), _beside_tuned(diagnosis, task)
        merged, tuned = (with_error(diagnosis.metrics(model, task), name) for model in (diagnosis.own, FINE_TUNED))
        if merged is None or tuned is None:
            continue
        on = f"On {task} ({counted(range(diagnosis.examples[task]), 'row')})"
        other = f"the {'base' if task == BASE else 'fine-tuned model'} has {tuned:.4g}"
        tie = " (tied)" if apart is not None and apart.tied else ""
        words.append(f"{on} its {plain_words(name)} is {merged:.4g}; {other}{tie}.")
    return words


def _beside_tuned(diagnosis: Diagnosis, task: str) -> Difference | None:
    """Return the difference of a task's first metric between the merge and the task's own model, on the same rows."""
    name = headline(diagnosis.metrics(diagnosis.own, task))
    one, other = (diagnosis.outcomes[model].rows.get(task, {}) for model in (diagnosis.own, FINE_TUNED))
    return difference(one[name], other[name]) if name in one and name in other else None


def _loss(diagnosis: Diagnosis, task: str) -> float:
    """Return how much worse the merge is than the task's own model, in standard errors; 0 if they are tied."""
    apart = _beside_tuned(diagnosis, task)
    if apart is None or apart.tied:
        return 0.0
    sign = -1.0 if higher_is_better(headline(diagnosis.metrics(diagnosis.own, task))) else 1.0
    return max(0.0, sign * apart.value / apart.error) if apart.error else math.inf


def _interference_results(diagnosis: Diagnosis) -> list[str]:
    shares = {pair: diagnosis.prediction.between(*pair).share for pair in itertools.combinations(diagnosis.tuned, 2)}
    if not shares:
        return []
    (one, other), worst = max(shares.items(), key=lambda item: item[1])
    share = f"{100 * worst:.0f} % of shared weights in opposite directions"
    if worst <= 0.5:
        return [f"Any two tasks move at most {share} (chance: 50 %)."]
    if {one, other} <= set(diagnosis.examples) and not _loss(diagnosis, one) and not _loss(diagnosis, other):
        return [f"{one} and {other} move {share}, but neither measured worse than its fine-tuned model."]
    return [f"{one} and {other} move {share}: expect a trade-off between them."]


def _penalty_results(diagnosis: Diagnosis) -> list[str]:
    if "penalty" not in diagnosis.recipe.rule.inputs:
        return []
    words = []
    for low, high, result in (
        (0.0, UNDER_PENALTY, "trained under the penalty {}, as the merge assumes."),
        (UNDER_PENALTY, WITHOUT_PENALTY, "trained under a similar penalty to {}, or not to convergence."),
        (WITHOUT_PENALTY, math.inf, "not trained under the penalty {}" + _without_penalty(diagnosis)),
    ):
        fitting = {
            t: check
            for t, check in diagnosis.penalty_checks.items()
            if check.ratio is not None and low <= check.ratio < high
        }
        if fitting:
            names = ", ".join(f"{task} (ratio {_ratio(check.ratio or 0)})" for task, check in fitting.items())
            were = "were" if len(fitting) > 1 else "was"
            kinds = " and ".join(dict.fromkeys(PENALTIES[check.penalty] for check in fitting.values()))
            words.append(f"Penalty check (ratio near 0: yes; 1 or more: no): {names} {were} {result.format(kinds)}")
    return words


def _ratio(ratio: float) -> str:
    return number(ratio, 2) if ratio <= 100 else "over 100"


def _without_penalty(diagnosis: Diagnosis) -> str:
    """Return the advice for models that were trained without the penalty."""
    none = "`base.penalty: none`"
    if diagnosis.without_penalty:
        return f"; the merge with {none} is among those that were measured."
    return f". To compare with {none}, on data: {_preview(diagnosis, '--set', 'base.penalty=none')}"


def _comparison(compared: Preview, row: Outcome, other: Outcome) -> str:
    """`average accuracy 0.84 ± 0.016 against 0.81 ± 0.018, difference 0.03 ± 0.01`."""
    apart = compared.difference(row, other)
    one, two = compared.shown_score(row), compared.shown_score(other)
    scores = f"{plain_words(compared.criterion.name)} {one:.4g} against {two:.4g}"
    return scores if apart is None else f"{scores}, difference {plus_minus(number(apart.value, 2), apart)}"


def _measured_advice(diagnosis: Diagnosis, compared: Preview) -> list[str]:
    own, best = compared.reference, compared.best()
    where = (
        ""
        if len(diagnosis.examples) == len(diagnosis.prediction.tasks)
        else f" on the data of {', '.join(diagnosis.examples)}"
    )
    name = next((name for name, row in diagnosis.merges.items() if row is best), diagnosis.own)
    if best is not None and name != diagnosis.own:
        what = f"**{name} measured better** than {diagnosis.own}{where}: {_comparison(compared, best, own)}."
        if name == diagnosis.without_penalty:
            command = diagnosis.commands.get("merge", f"gradmerge merge {RECIPE}")
            return [f"{what} To merge without the penalty: `{command} --set base.penalty=none -o merged`"]
        return [f"{what} To compare other weights: {_compare_with(diagnosis, name)}"]
    words = f"No other merge measured better than {diagnosis.own}{where} by more than two standard errors."
    losses = {task: _loss(diagnosis, task) for task in diagnosis.examples}
    if losses.get(BASE) and losses[BASE] == max(losses.values()):
        return [words, _smaller_weights(diagnosis, "the base's own data has the clearest loss")]
    return [words, f"To try other weights; more rows separate more settings: {_preview(diagnosis)}"]


def _predicted_advice(diagnosis: Diagnosis) -> list[str]:
    best, tasks = _predicted_winner(diagnosis), diagnosis.prediction.tasks
    if best != diagnosis.own:
        return [f"To try {best}, whose worst task is predicted to lose less: {_compare_with(diagnosis, best)}"]
    if max(tasks, key=lambda task: diagnosis.relative(diagnosis.own, task) or 0.0) == BASE:
        return [_smaller_weights(diagnosis, "the base's own data is predicted to lose most")]
    return [f"To try other weights, better with a few labeled rows of each task: {_preview(diagnosis)}"]


def _smaller_weights(diagnosis: Diagnosis, why: str) -> str:
    return f"To try smaller weights, because {why}: {_preview(diagnosis, '--suggest')}"


def _worst(diagnosis: Diagnosis, candidate: str) -> float:
    """Return the largest predicted loss of a task, as a multiple of the reference's."""
    return max(diagnosis.relative(candidate, task) or 0.0 for task in diagnosis.prediction.tasks)


def _predicted_winner(diagnosis: Diagnosis) -> str:
    """Return the merge whose worst task is predicted to lose clearly less, or else the diagnosed merge."""
    best = min(diagnosis.candidates, key=lambda candidate: _worst(diagnosis, candidate))
    return best if _worst(diagnosis, best) < WORTH_TRYING * _worst(diagnosis, diagnosis.own) else diagnosis.own
