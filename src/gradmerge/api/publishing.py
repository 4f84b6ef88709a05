"""A model, an adapter or curvature on the Hugging Face Hub, and metrics in the card that goes there with it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..arguments import checked
from ..cards.eval_results import evaluation, with_evaluations
from ..cards.metadata import CARD, MAX_CARD, RECORD
from ..checkpoints.open import HUB_ID
from ..display import Displayed
from ..errors import InputError, MachineError
from ..io.small_files import MAX_TOKENIZER, read_bounded, read_json
from ..progress import Progress, shown
from ..report.whole_file import whole_file
from ..tasks.data.read import dataset_metadata, dataset_type
from ..text import size, to_json
from ..urls import remote_url, strip_file_scheme
from .hub_upload import send
from .package import pack


@dataclass(repr=False)
class Push(Displayed):
    """What was sent to the Hub, or would be; sizes are in bytes."""

    repo: str
    revision: str
    kind: str
    """`model`, `adapter` or `curvature`."""
    files: dict[str, int]
    """Path in the repository → size."""
    left_out: list[str]
    """What else the folder holds, and is not sent."""
    lacks: dict[str, str]
    """Keys that the card's front matter does not have, and what that means."""
    sent: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    """Files that the repository had already."""
    removed: list[str] = field(default_factory=list)
    """Files of earlier weights or curvature, which would be taken for part of these."""
    url: str | None = None
    """Of the commit; None if nothing had changed, and for a plan."""
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    def _line(self) -> list[str]:
        done = f"{len(self.sent)} files sent" if self.url else "nothing sent"
        return [self.repo, self.revision, self.kind, size(self.nbytes), done]


@checked()
def push(
    out: str | Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    progress: bool | Progress = True,
) -> Push:
    """Publish a folder on the Hugging Face Hub: weights, card, record and curvature, in one commit.

    The repository is made if it is not there. What it has already is not sent again, so that a push that failed goes on
    where it stopped. Only files that a model needs are sent; ``left_out`` lists the others. The token is the one of
    `hf auth login`, or of the environment variable HF_TOKEN.

    Args:
        out: A model, an adapter or a curvature folder. Curvature goes into the folder `curvature` of the repository.
        repo: `owner/name` on the Hub.
        private: Make a new repository private. One that is there and public is refused.
        revision: The branch to send to, made if it is not there; by default `main`.
        dry_run: Say what would be sent and what the card lacks, and ask nothing of the network.
        progress: A bar on long work; False for none; or what is told how far it is, in bytes.

    Returns:
        What was sent, or would be.

    >>> push("./merged", "your-name/merged", dry_run=True).lacks  # doctest: +SKIP
    {'license': 'nobody knows what they may do with it: add `license: …`'}
    """
    _check_id(repo)
    if revision is not None and not re.fullmatch(r"[A-Za-z0-9][\w./-]{0,199}", revision):
        raise InputError(f"revision {revision!r}: the name of a branch, such as main")
    package = pack(Path(out), repo)
    told = Push(repo, revision or "main", package.kind, package.sizes, package.left_out, package.lacks)
    told.notes += package.notes
    if dry_run:
        return told
    with shown(progress) as bar:
        sent = send(repo, package, private=private, revision=revision, progress=bar)
    told.sent, told.unchanged, told.removed, told.url = sent.sent, sent.unchanged, sent.removed, sent.url
    told.notes += sent.notes
    if RECORD in package.texts:
        with contextlib.suppress(MachineError):  # a folder that cannot be written to is published all the same
            _write_record(Path(out), read_json(Path(out) / RECORD, MAX_TOKENIZER) | {"hub_id": repo})
    return told


def _check_id(repo: str) -> None:
    right = HUB_ID.fullmatch(repo) and "@" not in repo and len(repo) <= 96 and "--" not in repo and ".." not in repo
    if not right or repo.endswith((".git", ".ipynb", "-", ".")):
        raise InputError(f"{repo}: not an id that the Hub allows; write owner/name, such as your-name/merged")


class MeasuredCard:
    """The card and the record of a folder that gradmerge wrote, to which measurements are added."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if not all((self._folder / name).is_file() for name in (CARD, RECORD)):
            raise InputError(f"--card: {folder} is no folder with {CARD} and {RECORD}, as gradmerge writes them")
        self._read()

    def _read(self) -> tuple[str, dict[str, Any]]:
        card = read_bounded(self._folder / CARD, MAX_CARD).decode("utf-8", "replace")
        record = read_json(self._folder / RECORD, MAX_TOKENIZER)
        if not isinstance(record.setdefault("evaluations", []), list):
            raise InputError(f"{self._folder / RECORD}: its evaluations are no list")
        with_evaluations(card, "", [], str(self._folder / CARD))  # whether it can be read
        return card, record

    def add(self, source: str | None, numbers: Mapping[str, Any]) -> None:
        """Put metrics on data, and of the harness, into both; they take the place of earlier ones on the same data."""
        card, record = self._read()
        new = [self._of_data(source, numbers, record["evaluations"])] if source is not None else []
        for task, one in (numbers.get("lm_eval") or {}).items():
            new.append(
                evaluation(task, {"type": dataset_type(task), "name": task}, one, "by the lm-evaluation-harness")
            )
        known = [one["dataset"] for one in new]
        record["evaluations"] = [one for one in record["evaluations"] if one.get("dataset") not in known] + new
        card = with_evaluations(card, self._folder.resolve().name, record["evaluations"], str(self._folder / CARD))
        with whole_file(self._folder / CARD) as partial:
            partial.write_text(card, "utf-8")
        _write_record(self._folder, record)

    def _of_data(self, source: str, numbers: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        place = remote_url(source) or str(Path(strip_file_scheme(source)).absolute())
        for parts in range(1, 6):  # as many as tell it apart from other files that are called the same
            name, dataset = dataset_metadata(source, parts)
            if all(one.get("source") == place for one in earlier if one.get("dataset") == dataset):
                break
        return evaluation(name, dataset, numbers) | {"source": place}


def _write_record(folder: Path, record: Mapping[str, Any]) -> None:
    with whole_file(folder / RECORD) as partial:
        partial.write_text(to_json(record) + "\n", "utf-8")
