"""The files of a folder that belong into a repository of the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cards.metadata import CARD, MAX_CARD, RECORD, may_be_hub_id
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.lora import is_adapter
from ..checkpoints.open import open_checkpoint
from ..checkpoints.sidecars import sidecars
from ..curvature.format import STEM, open_curvature
from ..engine.output import JOURNAL
from ..errors import InputError
from ..io.atomic_dir import MARK, PARTIAL
from ..io.reader import close_files, open_files
from ..io.small_files import MAX_TOKENIZER, read_bounded, read_json
from ..text import first_line, to_json
from ..training.penalty import FOLDER, RECORD as PENALTY

ADAPTER = "adapter_config.json"
_SHARD = re.compile(r"(?P<stem>.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass
class Package:
    """The files of a push."""

    kind: str
    files: dict[str, Path | bytes]
    """Path in the repository → the file, or its content if it differs from the file."""
    left_out: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    """The metadata of the card."""
    notes: list[str] = field(default_factory=list)


def stem_of(name: str) -> str | None:
    """Return the path without shard number and suffix, if it is that of weights or curvature."""
    found = _SHARD.fullmatch(name)
    return found["stem"] if found else None


def page_card(package: Package, present: Collection[str]) -> dict[str, Path | bytes]:
    """Return the card of curvature, for a repository that has no other card."""
    card = package.files.get(f"{STEM}/{CARD}")
    return {CARD: card} if package.kind == STEM and card is not None and CARD not in present else {}


def collect_files(out: Path, repo: str) -> Package:
    """Return the files of a folder that belong into a repository. Raise if the folder is incomplete."""
    if not out.is_dir():
        raise InputError(f"{out}: no such folder")
    if out.name.endswith(PARTIAL) or any((out / name).exists() for name in (MARK, JOURNAL)):
        raise InputError(f"{out}: is incomplete. Run the command that writes it again with --resume, then push.")
    is_curvature = _has_curvature(out)
    package = Package(STEM, _curvature_files(out, STEM)) if is_curvature else _model_files(out, repo)
    sent = {name.split("/")[1 if is_curvature else 0] for name in package.files}
    package.left_out = sorted(path.name + "/" * path.is_dir() for path in out.iterdir() if path.name not in sent)
    return package


def _has_curvature(folder: Path) -> bool:
    files = open_files(folder, STEM)
    close_files(files or [])
    return bool(files)


def _curvature_files(folder: Path, inside: str) -> dict[str, Path | bytes]:
    with open_curvature(str(folder)) as file:
        paths = [*file.files(), folder / CARD, folder / f"{STEM}.safetensors.index.json"]
    return {f"{inside}/{path.name}": path for path in paths if path.is_file()}


def _model_files(out: Path, repo: str) -> Package:
    if not (out / CARD).is_file():
        raise InputError(f"{out / CARD}: is missing. Write a card: metadata (license, base_model) and a description")
    package = Package("adapter" if is_adapter(out) else "model", _weight_files(out))
    for name in (STEM, FOLDER):
        if _has_curvature(out / name):
            package.files |= _curvature_files(out / name, name)
    if (out / PENALTY).is_file():
        package.files[PENALTY] = out / PENALTY
    card = read_bounded(out / CARD, MAX_CARD).decode("utf-8", "replace")
    package.metadata = _metadata(card, out / CARD)
    # The card's code loads the model from the Hub.
    code = re.compile(r'^name = "(local-dir:)?[^"\n]*"$', re.M)
    card = code.sub(lambda found: f'name = "{"hf-hub:" if found[1] else ""}{repo}"', card, count=1)
    package.files[CARD] = card.encode()
    if (out / RECORD).is_file():
        record = read_json(out / RECORD, MAX_TOKENIZER)
        package.files[RECORD] = _without_paths(to_json(record | {"hub_id": repo}) + "\n").encode()
    if package.kind == "adapter":
        _name_base(out, package)
    return package


def _weight_files(out: Path) -> dict[str, Path | bytes]:
    """Return the weights of a model or an adapter, and the small files that go with them."""
    checkpoint = Checkpoint(str(out), folder=out)
    if is_adapter(out):
        paths = [out / "adapter_model.safetensors"]
        if not paths[0].is_file():
            raise InputError(f"{paths[0]}: is missing")
    else:
        with open_checkpoint(out) as checkpoint:
            paths = checkpoint.files()
    files: dict[str, Path | bytes] = {path.relative_to(out).as_posix(): path for path in paths}
    for stem in {stem_of(name) for name in files if "-of-" in name}:
        index = f"{stem}.safetensors.index.json"
        if (out / index).is_file():
            files[index] = out / index
    return files | sidecars(checkpoint)


def _metadata(card: str, path: Path) -> dict[str, Any]:
    """Return the metadata of a card. Raise if the Hub cannot read it."""
    import yaml
    from huggingface_hub import ModelCard

    try:
        data: Any = ModelCard(card).data if card.startswith("---") else {}
        return dict(data.to_dict()) if data else {}
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: the Hub cannot read its metadata: {first_line(error)}") from error


def _without_paths(record: str) -> str:
    """Replace absolute paths in a record by their last parts, also inside of notes."""
    for path in sorted(set(re.findall(r'"([/~][^"\\]*)"', record)), key=len, reverse=True):
        record = record.replace(path, Path(path).name)
    return record


def _name_base(out: Path, package: Package) -> None:
    """Name the base of an adapter by its Hub id, so that others can load it."""
    config = read_json(out / ADAPTER)
    package.files[ADAPTER] = out / ADAPTER
    if may_be_hub_id(config.get("base_model_name_or_path"), out):
        return
    bases = package.metadata.get("base_model")
    base = bases[0] if isinstance(bases, list) and len(bases) == 1 else bases
    if isinstance(base, str):
        package.files[ADAPTER] = (json.dumps(config | {"base_model_name_or_path": base}, indent=2) + "\n").encode()
    note = f"is sent with {base} as its base instead of a local folder"
    if not isinstance(base, str):
        note = "names a local folder as the base. Others cannot load the adapter without the base's Hub id"
    package.notes.append(f"{ADAPTER} {note}")
