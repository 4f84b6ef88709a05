"""What a model says of itself for the Hub: its id, or those of the models it was made from, its licence, its data.

It is read from the model's own files: the front matter of README.md, gradmerge.json, adapter_config.json and
config.json. All of that was written by others, so that only values of the right form are taken.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..io.reader import local_path
from ..io.small_files import lies_within, read_bounded, readable_json
from ..markdown import front_of
from ..safe_yaml import parse_yaml
from .checkpoint import Checkpoint
from .layers.stack import StackedCheckpoint
from .lora import AdapterCheckpoint
from .open import HUB_ID
from .views import View, beneath

CARD, RECORD = "README.md", "gradmerge.json"
MAX_CARD = 5_000_000
KEYS = ("license", "license_name", "license_link", "base_model", "language", "datasets", "pipeline_tag")
#: First parts of relative paths that look like an owner on the Hub.
_PLACES = (
    "checkpoint checkpoints content data demo experiments home kaggle merged mnt model models opt out output outputs "
    "results root runs scratch tmp tuned usr var weights work workspace"
)
_SNAPSHOT = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)")
_WORD = re.compile(r"[A-Za-z0-9][\w.+-]{0,95}")
_DATASET = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")


@dataclass(frozen=True)
class Published:
    """What is known of a model that goes into another."""

    name: str
    """What text calls it: its Hub id, or the name of its folder without the path to it."""
    hub_id: str | None = None
    """Its own id on the Hub."""
    origins: tuple[str, ...] = ()
    """Where it has no id of its own: those of the models that it says it was made from."""
    license: tuple[tuple[str, str], ...] = ()
    """`license`, and of a licence without an identifier also `license_name` and `license_link`."""
    language: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    pipeline_tag: str | None = None

    @property
    def ids(self) -> tuple[str, ...]:
        return (self.hub_id,) if self.hub_id is not None else self.origins


def published(checkpoint: Checkpoint) -> Published:
    """What a model's own files say of it."""
    label, folder = checkpoint.label, checkpoint.folder
    front = front_matter(folder)
    hub_id = (checkpoint.hub_id or "").partition("@")[0] or _own_id(folder)
    return Published(
        name=hub_id or _last(label),
        hub_id=hub_id,
        origins=tuple(_origins(checkpoint, front)),
        license=_license(front),
        language=tuple(_words(front.get("language"), _WORD)),
        datasets=tuple(_words(front.get("datasets"), _DATASET)),
        pipeline_tag=next(_words(front.get("pipeline_tag"), _WORD), None),
    )


def all_published(checkpoints: Iterable[Checkpoint]) -> list[Published]:
    """The same of everything that goes into a merge: models, adapters and their bases, and models of slices."""
    return list(dict.fromkeys(published(one) for checkpoint in checkpoints for one in _models(checkpoint)))


def _models(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    for below in beneath(checkpoint):
        if isinstance(below, StackedCheckpoint):
            for part in below.parts:
                yield from _models(part)
        elif not isinstance(below, View):  # what it is a view of comes next
            yield below


def name_of(reference: str, relative_to: Path | None = None) -> str:
    """A model without the path to it: an id of the Hub as it is, of a folder or file its name."""
    on_the_hub = HUB_ID.fullmatch(reference) and not local_path(reference, relative_to).exists()
    return reference if on_the_hub else _last(reference)


def _last(reference: str) -> str:
    path = Path(reference)
    return path.name if path.name not in ("", "..") else path.resolve().name or reference


def short_names(
    references: Iterable[str], relative_to: Path | None = None, ids: Mapping[str, str | None] | None = None
) -> dict[str, str]:
    """Models by names that differ: ids as they are, of paths the shortest ends that tell them apart."""
    known = {text: found for text, found in (ids or {}).items() if found}
    parts = {text: Path(text).parts for text in dict.fromkeys(references) if text not in known}
    names = {text: name_of(text, relative_to) for text in parts}
    for depth in range(2, 6):
        twice = {name for name in names.values() if list(names.values()).count(name) > 1}
        names |= {
            text: "/".join(part for part in parts[text][-depth:] if part.strip("/"))
            for text, name in names.items()
            if name in twice
        }
    return names | known


def front_matter(folder: Path | None) -> dict[str, Any]:
    """What the front matter of a folder's card says under ``KEYS``; nothing where it cannot be read."""
    if folder is None or not (path := folder / CARD).is_file() or not lies_within(path, folder):
        return {}
    with contextlib.suppress(InputError):
        stated = front_of(read_bounded(path, MAX_CARD).decode("utf-8", "replace"), KEYS)
        front = parse_yaml(stated, str(path))
        return front if isinstance(front, dict) else {}
    return {}


def may_be_hub_id(text: Any, near: Path | None = None) -> bool:
    """Whether text that a file holds is an id of the Hub, as far as can be told: `owner/name`, and no folder here."""
    if not isinstance(text, str) or not HUB_ID.fullmatch(text) or "@" in text or len(text) > 96:
        return False
    owner, _, name = text.partition("/")
    folders = [Path(), *([near, *near.absolute().parents[:2]] if near is not None else [])]
    local = any((folder / text).exists() or (folder / owner).is_dir() for folder in folders)
    odd = "--" in text or ".." in text or name.endswith((".git", ".ipynb")) or name.startswith("checkpoint")
    return not (local or odd or owner.lower() in _PLACES.split())


def _own_id(folder: Path | None) -> str | None:
    """The id of a snapshot in the Hub's cache, or the one that `gradmerge push` has written into the record."""
    if folder is None:
        return None
    for place in (folder.absolute(), folder.resolve()):
        if place.parent.name == "snapshots" and (found := _SNAPSHOT.fullmatch(place.parent.parent.name)):
            return f"{found['owner']}/{found['name']}"
    stated = _json(folder / RECORD).get("hub_id")
    return stated if may_be_hub_id(stated) else None


def _origins(checkpoint: Checkpoint, front: Mapping[str, Any]) -> Iterator[str]:
    folder = checkpoint.folder
    if folder is None:
        return
    stated: list[Any] = [front["base_model"]] if isinstance(front.get("base_model"), str) else []
    stated = front["base_model"] if isinstance(front.get("base_model"), list) else stated
    found = [text for text in stated[:32] if may_be_hub_id(text, folder)]
    adapter = isinstance(checkpoint, AdapterCheckpoint)
    if not found and not adapter:  # an adapter's base is a model of its own here
        stated = [_json(folder / "config.json").get("_name_or_path")]
        found = [text for text in stated if may_be_hub_id(text, folder)]
    yield from dict.fromkeys(found)


def _json(path: Path) -> dict[str, Any]:
    return (readable_json(path) or {}) if lies_within(path, path.parent) else {}


def _license(front: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    stated = front.get("license")
    stated = stated[0] if isinstance(stated, list) and len(stated) == 1 else stated
    if not isinstance(stated, str) or not _WORD.fullmatch(stated):
        return ()
    found = {"license": stated.lower()}
    if found["license"] == "other":  # which says nothing without a name
        more = {key: front.get(key) for key in ("license_name", "license_link")}
        found |= {key: text for key, text in more.items() if isinstance(text, str) and 0 < len(text) <= 300}
    return tuple(found.items())


def _words(stated: Any, form: re.Pattern[str]) -> Iterator[str]:
    """The values of a key that is one word or a list of some."""
    for text in (stated if isinstance(stated, list) else [stated])[:200]:
        if text is False:  # Norwegian, as YAML 1.1 reads `no`
            text = "no"
        if isinstance(text, str) and form.fullmatch(text):
            yield text
