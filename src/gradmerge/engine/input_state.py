"""The files that a command reads, whether they change, and the fingerprint of a merge of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..cards.metadata import RECORD, with_inner
from ..checkpoints.checkpoint import unwrap_chain
from ..checkpoints.lora import is_adapter, read_adapter_config
from ..checkpoints.sidecars import sidecars
from ..errors import InputError
from ..io.reader import local_path
from ..io.small_files import MAX_TOKENIZER, read_json
from ..recipe import Recipe
from ..urls import count_local_copies, is_url, redact
from .inputs import PENALTY

if TYPE_CHECKING:
    from .plan import Plan

State = list[list[Any]]
"""For each file: path, size, modification times and inode; for a file at a URL: URL, size and version."""


def model_paths(reference: str | None, relative_to: Path | None = None) -> list[Path]:
    """Return the folder or file of a model, and of the base that an adapter names; nothing for a Hub id."""
    if reference is None or not (path := local_path(reference, relative_to)).exists():
        return []
    if not path.is_dir() or not is_adapter(path):
        return [path]
    try:
        base = read_adapter_config(path).get("base_model_name_or_path")
    except InputError:  # opening the adapter will say what is wrong
        return [path]
    bases = [local_path(base, start) for start in (None, path)] if base else []
    return [path, *(base for base in bases if base.exists())]


def recipe_paths(recipe: Recipe) -> list[Path]:
    """Return the files of the recipe and of its rule, and every model and curvature that it names."""
    named = [text for model in recipe.sources for text in (model.model, model.adapter, model.curvature)]
    if recipe.base is not None:
        named += [recipe.base.model, recipe.base.adapter, recipe.base.curvature, recipe.base.penalty]
    paths = [recipe.file] if recipe.file is not None else []
    paths += [recipe.folder / Path(recipe.rule.file).expanduser()] if recipe.rule.file else []
    return paths + [path for text in named if isinstance(text, str) for path in model_paths(text, recipe.folder)]


def state_of(paths: Iterable[Path], *, deep: bool = False) -> State:
    """Return the state of files and of the files in folders (with ``deep``, also in subfolders)."""
    files = set()
    for path in paths:
        if path.is_dir():
            files |= {p for p in (path.rglob("*") if deep else path.iterdir()) if p.is_file()}
        else:
            files.add(path)
    remote: dict[Path, list[Any]] = {}
    if count_local_copies():
        from ..io.remote import states_of

        remote = states_of(files)
    states = [remote.get(path) or [str(path.absolute()), *_status(path)] for path in sorted(files)]
    # The placeholders of files at URLs have random names.
    return sorted(states, key=lambda entry: str(entry[0])) if remote else states


def _status(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError:  # it was there a moment ago
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def digest_of_state(state: State) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def changed(before: State, after: State) -> str | None:
    """Return the first file that differs between two states of the same files."""
    then, now = ({entry[0]: entry[1:] for entry in state} for state in (before, after))
    return next((path for path in sorted(then | now) if then.get(path) != now.get(path)), None)


def files_read(plan: Plan) -> list[Path]:
    """Return every file that the result depends on: weights, curvature, configs and copied files."""
    files = [*plan.inputs.files(), *sidecars(plan.inputs.template).values()]
    files += plan.inputs.result_files.reads if plan.inputs.result_files else []
    folders = {c.folder for checkpoint in plan.inputs.checkpoints for c in with_inner(checkpoint) if c.folder}
    configs = [folder / name for folder in folders for name in ("config.json", "adapter_config.json", PENALTY)]
    return files + [path for path in configs if path.is_file()]


def fingerprint_of(plan: Plan, files: State) -> str:
    """Return a hash of the recipe, the settings, and the inputs by path, size, modification times and inode."""
    recipe = plan.recipe
    folders = {name: str(folder) for name, folder in recipe.merged_folders.items()}
    named = {name: read_json(Path(folder) / RECORD, MAX_TOKENIZER)["fingerprint"] for name, folder in folders.items()}

    def is_named_merge(path: object) -> bool:
        return any(Path(str(path)).is_relative_to(folder) for folder in folders.values())

    content = {
        "versions": [__version__, torch.__version__],
        "recipe": recipe.to_dict(),
        "code": recipe.rule.digest,
        "named": named,
        "files": [entry for entry in files if not is_named_merge(entry[0])],
        "block": plan.block,
        "allow_nonfinite": plan.allow_nonfinite,
        "kinds": [[type(layer).__name__ for layer in unwrap_chain(c)] for c in plan.inputs.checkpoints],
    }
    return hashlib.sha256(redact(json.dumps(content, sort_keys=True)).encode()).hexdigest()


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
