"""gradmerge.json: what a merge was made of, so that it can be made again and be checked."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._version import __version__
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.hub_metadata import short_names
from ..checkpoints.layers.stack import StackedCheckpoint
from ..io.reader import local_path
from ..recipe import Recipe, plain
from .plan.inputs import Inputs, Source
from .plan.penalties import used
from .plan.plan import Plan
from .plan.slices import layer_table


def merge_record(
    recipe: Recipe,
    plan: Plan,
    fingerprint: str,
    sizes: Mapping[str, int],
    timings: Mapping[str, float],
    resumed: int,
    out: Path,
) -> dict[str, Any]:
    """The record of a merge."""
    merged, rule = len(plan.merged), recipe.rule
    options = {name: plain(value) for name, value in plan.inputs.options.items()}
    return {
        "gradmerge": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": fingerprint,
        "recipe": recipe.to_dict() | ({} if recipe.slices else {"options": options}),
        **({"rule": {"file": rule.file, "sha256": rule.digest}} if rule.file else {}),
        **({"merges": {n: one.to_dict() for n, one in recipe.merges.items()}} if recipe.merges else {}),
        "models": recorded_models(recipe, out),
        **used(recipe, plan),
        **({"layers": layer_table(recipe)} if recipe.slices else {}),
        "inputs": [_input_record(plan, source) for source in _recorded(plan.inputs.sources)],
        "output": {
            "files": [name for name in sizes if not name.startswith("curvature/")],
            "sizes": dict(sizes),
            "bytes": plan.total_written,
            "merged_tensors": merged,
            "copied_tensors": len(plan.jobs) - merged,
        },
        "versions": {
            "gradmerge": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "timings": {name: round(value, 3) for name, value in timings.items()},
        "resumed_blocks": resumed,
        "notes": plan.notes,
    }


def recorded_models(recipe: Recipe, out: Path) -> dict[str, str]:
    """Name → fine-tuned model: a path relative to the result, or a Hub id or URL as it is."""
    given = [model.adapter or model.model for model in recipe.sources]
    names = short_names(given, recipe.folder)
    found = {}
    for reference in given:
        reference = str(recipe.made.get(reference, reference))
        path = local_path(reference, recipe.folder)
        found[names.get(reference, reference)] = os.path.relpath(path, out) if path.exists() else reference
    return found


def _recorded(sources: Sequence[Source]) -> Iterator[Source]:
    """What was read, each once: of stacked layers the models that they are of."""
    yield from dict.fromkeys(
        part for source in sources for part in (source.parts if isinstance(source, StackedCheckpoint) else [source])
    )


def _input_record(plan: Plan, source: Source) -> dict[str, Any]:
    record: dict[str, Any] = {"role": _role(source, plan.inputs), "source": source.label}
    if isinstance(source, Checkpoint) and source.hub_id:
        record["hub_id"] = source.hub_id
        from ..io.remote import commit_of

        if source.folder is not None and (commit := commit_of(source.folder)) is not None:
            record["commit"] = commit
    record["files"] = [{"name": path.name, "bytes": path.stat().st_size} for path in source.files()]
    return record


def _role(source: Source, inputs: Inputs) -> str:
    if isinstance(inputs.base, StackedCheckpoint) and source in inputs.base.parts:
        return "base"
    roles: dict[Source | None, str] = {inputs.base: "base", inputs.prior: "base curvature"}
    roles |= dict.fromkeys(inputs.penalty, "penalty")
    return roles.get(source, "tuned" if isinstance(source, Checkpoint) else "curvature")
