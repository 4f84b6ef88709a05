"""What of a folder is sent to the Hub: the files that a model needs, its card, its record and its curvature."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..cards.metadata import CARD, MAX_CARD, RECORD, may_be_hub_id
from ..checkpoints.adapter_config import is_adapter
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.open import open_checkpoint
from ..checkpoints.sidecars import sidecars
from ..curvature.curvature import curvature_card
from ..curvature.format import STEM, open_curvature
from ..engine.journal import NAME as JOURNAL
from ..engine.penalties import PENALTY
from ..errors import InputError
from ..io.atomic_dir import MARK, PARTIAL
from ..io.reader import close_files, open_files
from ..io.small_files import MAX_TOKENIZER, read_bounded, read_json
from ..text import first_line, to_json

#: Keys of front matter that the Hub shows, and what their absence means.
WANTED = {
    "license": "nobody knows what they may do with it: add `license: …`",
    "base_model": "it is not linked to the models that it was made from, of which no Hub id is known",
    "library_name": "the Hub does not say how to load it",
    "pipeline_tag": "nobody finds it by its task",
}
ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"(?P<stem>.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass
class Package:
    """What is sent, by its path in the repository."""

    kind: str
    """`model`, `adapter` or `curvature`."""
    files: dict[str, Path]
    texts: dict[str, bytes] = field(default_factory=dict)
    """Of files that are sent otherwise than they lie here: their content."""
    left_out: list[str] = field(default_factory=list)
    front: dict[str, Any] = field(default_factory=dict)
    """The front matter of the card."""
    notes: list[str] = field(default_factory=list)

    @property
    def sizes(self) -> dict[str, int]:
        every = {name: path.stat().st_size for name, path in self.files.items()}
        return dict(sorted((every | {name: len(text) for name, text in self.texts.items()}).items()))

    @property
    def lacks(self) -> dict[str, str]:
        """Keys that the card does not have, and what that means."""
        return {key: why for key, why in WANTED.items() if self.kind != STEM and not self.front.get(key)}

    @property
    def bases(self) -> list[str]:
        """The models that the card names as base models."""
        stated = self.front.get("base_model")
        return [str(text) for text in (stated if isinstance(stated, list) else [stated] if stated else [])]


def stem_in(name: str) -> str | None:
    """What the files of one set of weights or curvature have in common, from the path of one of them."""
    found = _SHARD.fullmatch(name)
    return found["stem"] if found else None


def pack(out: Path, repo: str) -> Package:
    """What of a folder is sent to a repository. A folder that should not be sent is refused."""
    if not out.is_dir():
        partial = out.with_name(out.name + PARTIAL)
        found = f", but {partial} is there: finish it first, with --resume" if partial.is_dir() else ""
        raise InputError(f"{out}: no such folder{found}")
    if out.name.endswith(PARTIAL) or any((out / name).exists() for name in (MARK, JOURNAL)):
        raise InputError(f"{out}: is not finished. Run the command that writes it again with --resume, then push.")
    package = _curvature(out) if _holds_curvature(out) else _model(out, repo)
    sent = {name.split("/")[0 if package.kind != STEM else -1] for name in (*package.files, *package.texts)}
    package.left_out = sorted(path.name + "/" * path.is_dir() for path in out.iterdir() if path.name not in sent)
    return package


def _holds_curvature(folder: Path) -> bool:
    files = open_files(folder, STEM)
    close_files(files or [])
    return bool(files)


def _curvature(folder: Path, inside: str = STEM) -> Package:
    """A curvature folder, as the folder ``inside`` of a repository."""
    with open_curvature(str(folder)) as file:
        paths = file.files()
        card = curvature_card(file)
    paths += [path for path in (folder / CARD, folder / f"{STEM}.safetensors.index.json") if path.is_file()]
    made = Package(STEM, {f"{inside}/{path.name}": path for path in paths})
    if f"{inside}/{CARD}" not in made.files and inside == STEM:
        made.texts[f"{inside}/{CARD}"] = card.encode()
    return made


def _model(out: Path, repo: str) -> Package:
    made = Package("adapter" if is_adapter(out) else "model", _weights(out))
    if not (out / CARD).is_file():
        raise InputError(
            f"{out / CARD}: is not there, and a model without a card is of no use to others. Write one: front matter "
            "(license, base_model), and what the model is"
        )
    for name in (STEM, "penalty"):
        if _holds_curvature(out / name):
            part = _curvature(out / name, name)
            made.files, made.texts = made.files | part.files, made.texts | part.texts
    if (out / PENALTY).is_file():
        made.files[PENALTY] = out / PENALTY
    card = read_bounded(out / CARD, MAX_CARD).decode("utf-8", "replace")
    made.front = _front(card, str(out / CARD))
    made.texts[CARD] = _with_id(card, repo).encode()
    if (out / RECORD).is_file():
        record = read_json(out / RECORD, MAX_TOKENIZER)
        _check_complete(out, record)
        made.texts[RECORD] = (to_json(_without_paths(record | {"hub_id": repo})) + "\n").encode()
    if made.kind == "adapter":
        _name_base(out, made)
    made.files = {name: path for name, path in made.files.items() if name not in made.texts}
    return made


def _weights(out: Path) -> dict[str, Path]:
    """The weights of a model or an adapter, and the small files that go with them."""
    checkpoint = Checkpoint(str(out), folder=out)
    if is_adapter(out):
        stored = open_files(out, "adapter_model")
        if not stored:
            raise InputError(f"{out}: an adapter without adapter_model.safetensors")
        paths = [file.path for file in stored]
        close_files(stored)
    else:
        with open_checkpoint(out) as checkpoint:
            paths = checkpoint.files()
    found = {path.relative_to(out).as_posix(): path for path in paths}
    for name in list(found):
        index = f"{stem_in(name)}.safetensors.index.json"
        if f"{stem_in(name)}.safetensors" not in found and (out / index).is_file():
            found[index] = out / index
    return found | sidecars(checkpoint).copied


def _front(card: str, where: str) -> dict[str, Any]:
    """The front matter, if the Hub can read it."""
    from huggingface_hub import ModelCard

    if not card.startswith("---"):
        return {}
    try:
        data: Any = ModelCard(card).data
        front: dict[str, Any] = data.to_dict()
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{where}: its front matter is not as the Hub wants it: {first_line(error)}") from error
    return front


def _check_complete(out: Path, record: Mapping[str, Any]) -> None:
    try:
        sizes = dict(record["output"]["sizes"])
    except (KeyError, TypeError, ValueError):
        return
    for name, nbytes in sizes.items():
        if name.startswith(f"{STEM}/") and not (out / STEM).exists():  # taken out, so as not to be published
            continue
        if not (out / name).is_file() or (out / name).stat().st_size != nbytes:
            raise InputError(
                f"{out / name}: is not as {RECORD} says ({nbytes} bytes). Make the folder again, then push."
            )


def _with_id(card: str, repo: str) -> str:
    """The card whose lines of code load the model from the Hub."""
    names = re.compile(r'^name = "(local-dir:)?[^"\n]*"$', re.M)
    return names.sub(lambda found: f'name = "{"hf-hub:" if found[1] else ""}{repo}"', card, count=1)


def _without_paths(record: dict[str, Any]) -> Any:
    """The record for others: paths from the root of this machine's disk are told by their last names, also in notes."""
    paths = sorted({text for text in _texts(record) if text.startswith(("/", "~")) and "\n" not in text}, key=len)

    def told(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: told(item) for key, item in value.items()}
        if isinstance(value, list):
            return [told(item) for item in value]
        if isinstance(value, str):
            for path in reversed(paths):
                value = value.replace(path, Path(path).name)
        return value

    return told(record)


def _texts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _name_base(out: Path, made: Package) -> None:
    """An adapter names its base by its Hub id, so that others can load it."""
    config = read_json(out / ADAPTER)
    stated = config.get("base_model_name_or_path")
    made.files[ADAPTER] = out / ADAPTER
    if may_be_hub_id(stated, out):
        return
    if len(made.bases) == 1:
        made.texts[ADAPTER] = (
            json.dumps(config | {"base_model_name_or_path": made.bases[0]}, indent=2) + "\n"
        ).encode()
        made.notes.append(f"{ADAPTER} is sent with {made.bases[0]} as its base, which is a folder here")
    else:
        made.notes.append(
            f"{ADAPTER} names a folder of this machine as the base, so that others cannot load the adapter. Put the "
            "base's Hub id there, as base_model_name_or_path"
        )
