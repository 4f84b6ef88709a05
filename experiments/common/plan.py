"""What a run would fetch and train, said without doing any of it: `--dry-run`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from . import hub
from .training import Training


@dataclass(frozen=True)
class Data:
    """A data set, on the Hub or in a folder."""

    place: str
    columns: Sequence[str]
    splits: Sequence[str]
    use: str = ""
    local: bool = False


@dataclass(frozen=True)
class Model:
    """A model that others trained, and what it is for."""

    place: str
    use: str


@dataclass(frozen=True)
class Step:
    """A training of every seed; ``rows`` is None where nobody knows before the data are there."""

    name: str
    start: str
    rows: int | None
    training: Training

    @property
    def steps(self) -> int | None:
        """Updates, as the Trainer counts them: a batch that is not full is a step, and so is a group of batches."""
        if self.rows is None:
            return None
        batches = math.ceil(self.rows / self.training.batch_size)
        per_epoch = max(1, math.ceil(batches / self.training.accumulate))
        return math.ceil(per_epoch * self.training.epochs)


@dataclass(frozen=True)
class Plan:
    """Everything that costs something."""

    models: Sequence[Model] = ()
    data: Sequence[Data] = ()
    trained: Sequence[Step] = ()
    then: Sequence[str] = ()
    """What happens to the trained models."""


def rows_of(place: str, split: str = "train") -> int | None:
    """Rows of a split, where they are known."""
    known = hub.data_set(place)
    return known.rows.get(split) if known else None


def total(rows: Sequence[int | None]) -> int | None:
    known = [count for count in rows if count is not None]
    return sum(known) if len(known) == len(rows) else None


def as_text(plan: Plan, seeds: Sequence[int]) -> str:
    lines = ["Models:", *(_listed(_model(model) for model in plan.models))]
    lines += ["Data:", *_listed(_data(one) for one in plan.data)]
    many = f"{len(seeds)} seeds ({', '.join(map(str, seeds))})" if len(seeds) > 1 else f"seed {seeds[0]}"
    lines += [f"Trainings, for {many}:", *_listed(_step(step) for step in plan.trained)]
    updates = total([step.steps for step in plan.trained])
    if updates is not None:
        lines.append(f"  {len(plan.trained)} trainings, {updates:,} steps a seed, {updates * len(seeds):,} in all")
    lines += ["Then:", *_listed(plan.then)]
    return "\n".join([*lines, "Nothing was fetched or written."])


def _listed(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines] or ["  none"]


def _about(known: hub.Known | None) -> str:
    if known is None:
        return "not looked up"
    said = [known.size or "size not known", known.page, known.note]
    return "; ".join(part for part in said if part)


def _model(model: Model) -> str:
    known = hub.MODELS.get(model.place)
    return f"{model.place}: {model.use} ({_about(known)})"


def _data(one: Data) -> str:
    known = None if one.local else hub.data_set(one.place)
    config = known.configuration if known else ""
    rows = [f"{split} ({known.rows[split]:,} rows)" if known and split in known.rows else split for split in one.splits]
    place = "/".join(one.place.split("/")[:2]) if known else one.place
    parts = [
        place + (f", configuration {config}" if config else ""),
        f"columns {', '.join(one.columns)}",
        f"splits {', '.join(rows)}",
        *filter(None, [one.use]),
    ]
    return "; ".join(parts) + (" (local)" if one.local else f" ({_about(known)})")


def _step(step: Step) -> str:
    how = step.training
    rows = "rows as the data have them" if step.rows is None else f"{step.rows:,} rows"
    parts = [rows, f"batches of {how.batch_size * how.accumulate}", f"{how.epochs:g} epoch{'s' * (how.epochs != 1)}"]
    parts += [] if step.steps is None else [f"{step.steps:,} steps"]
    parts.append(f"learning rate {how.learning_rate:g} of {how.optimizer}")
    parts += [f"penalty of strength {how.strength:g}"] if how.strength else []
    return f"{step.name}, from {step.start}: {', '.join(parts)}"
