"""The record gradmerge.json: what a result was made from and how, so that it can be made again and checked."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..io.reader import local_path
from ..recipe import Recipe
from ..text import to_json
from ..urls import redact, url_of
from .metadata import RECORD, short_names


def write_record(
    folder: Path,
    facts: Mapping[str, Any],
    *,
    inputs: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, int],
    seconds: float,
    notes: Sequence[str],
    output: Mapping[str, Any] | None = None,
) -> None:
    """Write gradmerge.json.

    Args:
        folder: The finished result.
        facts: What was done, such as `recipe` and `models`.
        inputs: What was read; see ``input_entry``.
        sizes: File of the result → bytes.
        seconds: How long it took.
        notes: What a user should know.
        output: More facts about the result.
    """
    record = {
        "gradmerge": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **facts,
        "inputs": list(inputs),
        "output": {
            "files": [name for name in sizes if not name.startswith("curvature/")],
            "sizes": dict(sizes),
            "bytes": sum(sizes.values()),
            **(output or {}),
        },
        "versions": {
            "gradmerge": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "timings": {"total": round(seconds, 3)},
        "notes": list(notes),
    }
    (folder / RECORD).write_text(redact(to_json(record)) + "\n", "utf-8")


def input_entry(
    role: str, source: str, files: Sequence[Path], hub_id: str | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """Return an entry of `inputs`: what a source was used for, its files and sizes, and its commit on the Hub."""
    entry: dict[str, Any] = {"role": role, "source": source}
    if hub_id is not None:
        from ..io.remote import commit_of

        entry["hub_id"] = hub_id
        if folder is not None and (commit := commit_of(folder)) is not None:
            entry["commit"] = commit
    return entry | {"files": [{"name": path.name, "bytes": path.stat().st_size} for path in files]}


def model_references(recipe: Recipe, out: Path) -> dict[str, str]:
    """Return `models` of a record: name → fine-tuned model, as a path relative to the result, a Hub id or a URL."""
    references = [model.adapter or model.model for model in recipe.sources]
    names = short_names(references, recipe.folder)
    return {names.get(reference, reference): _stored(reference, recipe, out) for reference in references}


def base_reference(recipe: Recipe, out: Path) -> str | None:
    """Return `base` of a record in the same way."""
    return None if recipe.base is None else _stored(recipe.base.model, recipe, out)


def _stored(reference: str, recipe: Recipe, out: Path) -> str:
    reference = str(recipe.merged_folders.get(reference, reference))
    path = local_path(reference, recipe.folder)
    return url_of(path) or (os.path.relpath(path, out) if path.exists() else reference)
