"""The fingerprint of a merge: everything that the bytes of its result depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from .._version import __version__
from ..cards.metadata import RECORD
from ..checkpoints.checkpoint import Checkpoint, unwrap_chain
from ..checkpoints.layers import StackedCheckpoint
from ..checkpoints.sidecars import sidecars
from ..errors import InputError
from ..io.reader import local_path
from ..io.small_files import MAX_TOKENIZER, read_json
from ..recipe import Recipe
from ..urls import is_url
from .input_state import State
from .penalties import PENALTY
from .plan import Plan


def files_read(plan: Plan) -> list[Path]:
    """Return every file that the result depends on: weights, curvature, configs and copied files."""
    files = [*plan.inputs.files(), *sidecars(plan.inputs.template).copied.values()]
    files += plan.inputs.result_files.reads if plan.inputs.result_files else []
    folders = {c.folder for checkpoint in plan.inputs.checkpoints for c in _with_inner(checkpoint) if c.folder}
    configs = [folder / name for folder in folders for name in ("config.json", "adapter_config.json", PENALTY)]
    return files + [path for path in configs if path.is_file()]


def _with_inner(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Yield a checkpoint, the checkpoints that it is a view of, an adapter's base, and the models of a stack."""
    for inner in unwrap_chain(checkpoint):
        yield inner
        for part in inner.parts if isinstance(inner, StackedCheckpoint) else ():
            yield from _with_inner(part)


def fingerprint_of(recipe: Recipe, plan: Plan, files: State, allow_nonfinite: bool) -> str:
    """Return a hash of the recipe, the settings, and the inputs by path, size, modification times and inode."""
    made = {name: str(folder) for name, folder in recipe.made.items()}
    named = {name: read_json(Path(folder) / RECORD, MAX_TOKENIZER)["fingerprint"] for name, folder in made.items()}

    def is_made(path: object) -> bool:
        return any(Path(str(path)).is_relative_to(folder) for folder in made.values())

    content = {
        "version": __version__,
        "recipe": recipe.to_dict(),
        "code": recipe.rule.digest,
        "named": named,
        "files": [entry for entry in files if not is_made(entry[0])],
        "block": plan.block,
        "allow_nonfinite": allow_nonfinite,
        "kinds": [[type(layer).__name__ for layer in unwrap_chain(c)] for c in plan.inputs.checkpoints],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_complete(out: Path, fingerprint: str) -> bool:
    """Return whether a folder is the complete result of this merge, by its record and the sizes of its files."""
    try:
        out = local_path(str(out), None) if is_url(out) else out
        record = read_json(out / RECORD, MAX_TOKENIZER)
        sizes = record["output"]["sizes"].items()
        return bool(record["fingerprint"] == fingerprint) and all(
            (out / name).stat().st_size == nbytes for name, nbytes in sizes
        )
    except (InputError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
