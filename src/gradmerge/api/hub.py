"""Publish a model, an adapter or curvature on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..arguments import checked
from ..cards.metadata import CARD, MAX_CARD, RECORD, may_be_hub_id
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.lora import is_adapter
from ..checkpoints.open import HUB_ID, open_checkpoint
from ..checkpoints.sidecars import sidecars
from ..curvature.curvature import curvature_card
from ..curvature.format import STEM, open_curvature
from ..display import Displayed
from ..engine.output import JOURNAL
from ..errors import GradmergeError, InputError, MachineError
from ..io.atomic_dir import MARK, PARTIAL
from ..io.reader import close_files, open_files
from ..io.small_files import MAX_TOKENIZER, read_bounded, read_json
from ..text import first_line, one_line, size, to_json
from ..training.penalty import FOLDER, RECORD as PENALTY
from .measured_card import write_record

#: Keys of the card's metadata that the Hub uses, and what is missing without them.
METADATA = {
    "license": "nobody knows what they may do with the model: add `license: …`",
    "base_model": "the Hub does not link the model to those it was made from",
    "library_name": "the Hub does not say how to load the model",
    "pipeline_tag": "nobody finds the model by its task",
}
ADAPTER = "adapter_config.json"
LOG_IN = "Log in with `hf auth login` (a token with the right to write), or set HF_TOKEN"
_SHARD = re.compile(r"(?P<stem>.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(repr=False)
class Push(Displayed):
    """A commit on the Hub, or with ``dry_run`` the plan of one."""

    repo: str
    revision: str
    kind: str
    """`model`, `adapter` or `curvature`."""
    files: dict[str, int]
    """Path in the repository → size in bytes."""
    left_out: list[str]
    """Other files and folders, which are not sent."""
    lacks: dict[str, str]
    """Keys that the card's metadata does not have, and what is missing without them."""
    url: str | None = None
    """The commit; the latest one if nothing has changed, None for a plan."""
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    def _line(self) -> list[str]:
        return [self.repo, self.revision, self.kind, size(self.nbytes), self.url or "nothing sent"]


@checked()
def push(
    out: str | Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> Push:
    """Publish a folder on the Hugging Face Hub: weights, card, record and curvature, in one commit.

    Creates the repository if it does not exist. Files that it has already are not sent again, also after a push that
    failed. Only files that a model needs are sent; ``left_out`` lists the others. The token is that of `hf auth login`,
    or of the environment variable HF_TOKEN.

    Args:
        out: A model, an adapter or a curvature folder. Curvature goes into the folder `curvature` of the repository.
        repo: `owner/name` on the Hub.
        private: Make a new repository private; raise if it exists and is public.
        revision: The branch, created if it does not exist; by default `main`.
        dry_run: Only return what would be sent and what the card lacks, without the network.
        progress: Show the progress bars of huggingface_hub.

    Returns:
        The files and the commit.

    >>> push("./merged", "your-name/merged", dry_run=True).lacks  # doctest: +SKIP
    {'license': 'nobody knows what they may do with the model: add `license: …`'}
    """
    if not HUB_ID.fullmatch(repo) or "@" in repo or ".." in repo:
        raise InputError(f"{repo}: not an id on the Hub; write owner/name, such as your-name/merged")
    out = Path(out)
    package = collect_files(out, repo)
    sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in sorted(package.files.items())}
    lacks = {key: text for key, text in METADATA.items() if package.kind != STEM and not package.metadata.get(key)}
    done = Push(repo, revision or "main", package.kind, sizes, package.left_out, lacks, notes=package.notes)
    if dry_run:
        return done
    done.url = _commit(package, repo, private, revision, progress)
    if RECORD in package.files:
        with contextlib.suppress(MachineError):  # a folder that cannot be written to was published all the same
            write_record(out, read_json(out / RECORD, MAX_TOKENIZER) | {"hub_id": repo})
    return done


def _commit(package: Package, repo: str, private: bool, revision: str | None, progress: bool) -> str:
    """Commit the files that have changed, and remove earlier shards; return the commit's URL."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    token = get_token()
    if token is None:
        raise InputError(f"the Hub needs a token. {LOG_IN}.")
    api = HfApi(token=token, library_name="gradmerge", library_version=__version__)
    with _hub_errors(repo, token), _progress_bars(progress):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and api.model_info(repo).private is False:
            raise InputError(f"{repo}: exists and is public. Make it private in its settings, then push again.")
        if revision not in (None, "main"):
            api.create_branch(repo, branch=str(revision), exist_ok=True)
        present = set(api.list_repo_files(repo, revision=revision))
        files = dict(package.files)
        if package.kind == STEM and CARD not in present:  # the page of the repository shows the card
            files[CARD] = files[f"{STEM}/{CARD}"]
        stems = {stem_of(name) for name in files} - {None}
        operations: list[Any] = [CommitOperationAdd(name, content) for name, content in files.items()]
        operations += [CommitOperationDelete(n) for n in sorted(present - files.keys()) if stem_of(n) in stems]
        message = f"{package.kind.capitalize()} by gradmerge {__version__}"
        return str(api.create_commit(repo, operations, commit_message=message, revision=revision).commit_url)


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hides = not shown and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    yield
    if hides:
        enable_progress_bars()


@contextlib.contextmanager
def _hub_errors(repo: str, token: str) -> Iterator[None]:
    """Turn errors of the Hub and the network into messages without the token."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (GradmergeError, MemoryError):
        raise
    except Exception as error:  # of huggingface_hub, and of the HTTP library that its version uses
        reason = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
        message = one_line(str(getattr(reason, "server_message", None) or reason)).replace(token, "…")[:400]
        response = getattr(reason, "response", None)
        status = 0 if response is None else response.status_code
        offline = not status and type(reason).__module__.startswith("httpx")
        if offline or status in (409, 412, 429) or status >= 500:
            raise MachineError(
                f"{repo}: the Hub failed or cannot be reached ({status}: {message}). Push again."
            ) from None
        hint = f" {LOG_IN}." if status in (401, 403) else ""
        raise InputError(
            f"{repo}: the Hub refuses this ({status or type(reason).__name__}: {message}).{hint}"
        ) from None


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
        paths = file.files()
        files: dict[str, Path | bytes] = {f"{inside}/{CARD}": curvature_card(file).encode()} if inside == STEM else {}
    paths += [path for path in (folder / CARD, folder / f"{STEM}.safetensors.index.json") if path.is_file()]
    return files | {f"{inside}/{path.name}": path for path in paths}


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
        stored = open_files(out, "adapter_model")
        if not stored:
            raise InputError(f"{out}: an adapter without adapter_model.safetensors")
        paths = [file.path for file in stored]
        close_files(stored)
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
