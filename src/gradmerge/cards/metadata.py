"""What models state about themselves: Hub id, base models, license and task.

The statements come from the models' own files: README.md, gradmerge.json and config.json. These files are untrusted,
so only values of the expected form are used.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ..checkpoints.checkpoint import Checkpoint, View, unwrap_chain
from ..checkpoints.layers import StackedCheckpoint
from ..checkpoints.lora import AdapterCheckpoint
from ..checkpoints.open import HUB_ID
from ..errors import InputError
from ..io.reader import local_path
from ..io.small_files import lies_within, read_bounded, readable_json
from ..text import one_line
from ..urls import redact
from ..yaml import parse_yaml

CARD, RECORD = "README.md", "gradmerge.json"
MAX_CARD = 5_000_000
#: Longest front matter without evaluation results that is parsed, because PyYAML is slow.
MAX_FRONT = 50_000
#: First parts of relative paths that look like an owner on the Hub.
FOLDER_NAMES = """
    checkpoint checkpoints content data demo experiments home kaggle merged mnt model models opt out output outputs
    results root runs scratch tmp tuned usr var weights work workspace
"""
FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*$", re.M | re.S)
#: Evaluation results: up to megabytes, which PyYAML parses slowly.
EVAL_RESULTS = re.compile(r"^model-index:.*?(?=^\w|\Z)", re.M | re.S)
SNAPSHOT = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)")
WORD = re.compile(r"[A-Za-z0-9][\w.+-]{0,95}")


@dataclass(frozen=True)
class ModelMetadata:
    """What a model states about itself."""

    name: str
    """Its Hub id, or the name of its folder without the path."""
    ids: tuple[str, ...] = ()
    """Its Hub id; if it has none, those of the models that it was made from."""
    license: tuple[tuple[str, str], ...] = ()
    """Key and value of `license`, and of `license_name` and `license_link` if the license is `other`."""
    pipeline_tag: str | None = None


def read_metadata(checkpoint: Checkpoint) -> ModelMetadata:
    """Read what a model's own files state."""
    front = _front_matter(checkpoint.folder)
    hub_id = (checkpoint.hub_id or "").partition("@")[0] or _own_hub_id(checkpoint.folder)
    return ModelMetadata(
        name=hub_id or _last_part(checkpoint.label),
        ids=(hub_id,) if hub_id is not None else _base_models(checkpoint, front),
        license=_license(front),
        pipeline_tag=_word(front.get("pipeline_tag")),
    )


def read_all_metadata(checkpoints: Iterable[Checkpoint]) -> list[ModelMetadata]:
    """Read the same for all inputs of a merge: models, adapters and their base models, and models of slices."""
    models = (model for checkpoint in checkpoints for model in with_inner(checkpoint) if not isinstance(model, View))
    return list(dict.fromkeys(map(read_metadata, models)))


def with_inner(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Yield a checkpoint, the checkpoints that it is a view of, an adapter's base, and the models of a stack."""
    for inner in unwrap_chain(checkpoint):
        yield inner
        for part in inner.parts if isinstance(inner, StackedCheckpoint) else ():
            yield from with_inner(part)


def _front_matter(folder: Path | None) -> dict[str, Any]:
    """Return the front matter of a folder's card, without evaluation results; empty if it cannot be read."""
    if folder is None or not (path := folder / CARD).is_file() or not lies_within(path, folder):
        return {}
    with contextlib.suppress(InputError):
        match = FRONT_MATTER.match(read_bounded(path, MAX_CARD).decode("utf-8", "replace"))
        text = EVAL_RESULTS.sub("", match[1]) if match else ""
        front = parse_yaml(text, str(path)) if len(text) <= MAX_FRONT else {}
        return front if isinstance(front, dict) else {}
    return {}


def _own_hub_id(folder: Path | None) -> str | None:
    """Return the Hub id of a folder in the Hub's cache, or the one that `gradmerge push` wrote into the record."""
    if folder is None:
        return None
    for path in (folder.absolute(), folder.resolve()):
        if path.parent.name == "snapshots" and (match := SNAPSHOT.fullmatch(path.parent.parent.name)):
            return f"{match['owner']}/{match['name']}"
    hub_id = _json(folder / RECORD).get("hub_id")
    return hub_id if may_be_hub_id(hub_id) else None


def _base_models(checkpoint: Checkpoint, front: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the Hub ids in `base_model` of the card, or else `_name_or_path` of the config."""
    folder, named = checkpoint.folder, front.get("base_model")
    if folder is None:
        return ()
    names = named[:200] if isinstance(named, list) else [named]
    ids = tuple(dict.fromkeys(name for name in names if may_be_hub_id(name, folder)))
    if ids or isinstance(checkpoint, AdapterCheckpoint):  # the config of an adapter is that of its base model
        return ids
    name = _json(folder / "config.json").get("_name_or_path")
    return (name,) if may_be_hub_id(name, folder) else ()


def _license(front: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    name = _word(front.get("license"))
    if name is None:
        return ()
    license = {"license": name.lower()}
    if license["license"] == "other":
        more = {key: front.get(key) for key in ("license_name", "license_link")}
        license |= {key: one_line(text) for key, text in more.items() if isinstance(text, str) and 0 < len(text) <= 300}
    return tuple(license.items())


def _word(value: Any) -> str | None:
    """Return the word in a value, or in a list with one item; None for anything else."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return value if isinstance(value, str) and WORD.fullmatch(value) else None


def _json(path: Path) -> dict[str, Any]:
    return (readable_json(path) or {}) if lies_within(path, path.parent) else {}


def may_be_hub_id(text: Any, near: Path | None = None) -> TypeGuard[str]:
    """Return whether text from a file looks like a Hub id `owner/name`, and is not a local folder."""
    if not isinstance(text, str) or not HUB_ID.fullmatch(text) or "@" in text or len(text) > 96:
        return False
    owner, _, name = text.partition("/")
    if "--" in text or ".." in text or name.endswith((".git", ".ipynb")) or name.startswith("checkpoint"):
        return False
    folders = [Path(), *([near, *near.absolute().parents[:2]] if near is not None else [])]
    local = any((folder / text).exists() or (folder / owner).is_dir() for folder in folders)
    return not local and owner.lower() not in FOLDER_NAMES.split()


def license_notes(models: Sequence[ModelMetadata], chosen: str | None) -> list[str]:
    """Return a note for the user and the card if the models' licenses differ and the user chose none."""
    if chosen is not None or len({model.license for model in models}) < 2:
        return []
    licenses = {model.name: dict(model.license) for model in models}
    listed = [f"{name}: {x.get('license_name') or x.get('license') or 'not stated'}" for name, x in licenses.items()]
    return [
        f"The licenses of the models differ ({'; '.join(listed)}), so the card names none. Choose one that all models "
        "allow: set output.license in the recipe, or license in README.md."
    ]


def name_of(reference: str, relative_to: Path | None = None) -> str:
    """Return a model's Hub id, or the name of its folder or file without the path."""
    is_id = HUB_ID.fullmatch(reference) and not local_path(reference, relative_to).exists()
    return reference if is_id else _last_part(redact(reference))


def _last_part(reference: str) -> str:
    path = Path(reference)
    return path.name if path.name not in ("", "..") else path.resolve().name or reference


def short_names(references: Iterable[str], relative_to: Path | None = None) -> dict[str, str]:
    """Return reference → unique short name: its Hub id, or as many last parts of its path as make it unique."""
    names = {text: name_of(text, relative_to) for text in references}
    for length in range(2, 6):
        counts = Counter(names.values())
        for text in [text for text, name in names.items() if counts[name] > 1]:
            names[text] = "/".join(part for part in Path(redact(text)).parts[-length:] if part.strip("/"))
    return names
