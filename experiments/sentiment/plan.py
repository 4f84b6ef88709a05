"""What a run would fetch and train."""

from __future__ import annotations

from pathlib import Path

from ..common.plan import Data, Model, Plan, Step, rows_of, total
from . import grid
from .data import BASE, HUB, SETS, SPLITS, TASKS
from .settings import ALL_DATA, JOINT, Settings


def plan(settings: Settings, model: str | None, source: Path | str) -> Plan:
    """``source`` of the data is a folder, "hub" or "made up"."""
    on_hub = source == "hub"
    if on_hub:
        data = [
            Data(
                place=hub.place,
                columns=(*hub.text, "label"),
                splits=tuple(dict.fromkeys(("train", *filter(None, [hub.dev]), hub.test))),
                use=f"its first {hub.first:,} rows are trained on" if hub.first else "",
            )
            for hub in (HUB[name] for name in SETS)
        ]
    else:
        data = [Data(f"{source}: {name}", ("text", "label"), SPLITS, local=True) for name in SETS]

    def rows(name: str) -> int | None:
        if settings.train_rows is not None:
            return settings.train_rows
        if not on_hub:
            return None
        known = HUB[name].first or rows_of(HUB[name].place)
        # Development rows, where the set has none of its own, come out of the training rows.
        return known - settings.dev_rows if known and not (HUB[name].first or HUB[name].dev) else known

    start = model or ("random weights" if settings.pretraining is None else "the model pre-trained here")
    counts = {name: rows(name) for name in SETS}
    counts |= {ALL_DATA: total([counts[name] for name in SETS]), JOINT: total([counts[name] for name in TASKS])}
    trained = [
        Step(name, start if name in (BASE, ALL_DATA) else BASE, counts[name], settings.training(name))
        for name in (*SETS, ALL_DATA, JOINT)
    ]
    if settings.pretraining is not None:
        data += [
            Data(f"{source}: {name}", ("text",), ("train",), local=True)
            for name in settings.pretraining.texts
            if name not in SETS
        ]
        once = [
            Step("pre-training, once for all seeds", "random weights", None, settings.pretraining.training),
            Step(f"{BASE}, to compare with", "random weights", counts[BASE], settings.training(BASE)),
        ]
        trained = once + trained
    if settings.grid:
        trained += [Step(f"{task} under H_0 / N", BASE, counts[task], settings.training(task)) for task in TASKS]
    most = settings.curvature_examples
    then = [
        *(["rows and steps may be a few less: copies of development rows are left out of training sets"] * on_hub),
        f"curvature and Gram matrices of {len(SETS)} models, on {'all' if most is None else f'at most {most:,}'} rows",
        f"merges by every method, two of them at {len(settings.weights)} weights, and gradients at the merged models",
        *([f"the table of Hessians in full: {len(grid.cells())} merges"] if settings.grid else []),
    ]
    return Plan([Model(model, "what is fine-tuned")] if model else [], data, trained, then)
