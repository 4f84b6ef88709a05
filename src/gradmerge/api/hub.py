"""Publish a model, an adapter or curvature on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..arguments import checked
from ..display import Displayed
from ..errors import GradmergeError, InputError, MachineError
from ..text import one_line, size

if TYPE_CHECKING:
    from .hub_files import Package

#: Keys of the card's metadata that the Hub uses, and what is missing without them.
METADATA = {
    "license": "nobody knows what they may do with the model: add `license: …`",
    "base_model": "the Hub does not link the model to those it was made from",
    "library_name": "the Hub does not say how to load the model",
    "pipeline_tag": "nobody finds the model by its task",
}
LOG_IN = "Log in with `hf auth login` (a token with the right to write), or set HF_TOKEN"


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
        private: Make a new repository private. An existing public one is refused.
        revision: The branch, created if it does not exist; by default `main`.
        dry_run: Send nothing, without the network: only show what would be sent, and what the card lacks.
        progress: Show the progress bars of huggingface_hub.

    Returns:
        The files and the commit.

    >>> push("./merged", "your-name/merged", dry_run=True).lacks  # doctest: +SKIP
    {'license': 'nobody knows what they may do with the model: add `license: …`'}
    """
    from ..cards.metadata import RECORD
    from ..checkpoints.open import HUB_ID
    from ..io.small_files import MAX_TOKENIZER, read_json
    from .hub_files import collect_files
    from .measured_card import write_record

    if not HUB_ID.fullmatch(repo) or "@" in repo or ".." in repo:
        raise InputError(f"{repo}: not an id on the Hub; write owner/name, such as your-name/merged")
    out = Path(out)
    package = collect_files(out, repo)
    sizes = {name: len(c) if isinstance(c, bytes) else c.stat().st_size for name, c in sorted(package.files.items())}
    lacks = {
        key: text for key, text in METADATA.items() if package.kind != "curvature" and not package.metadata.get(key)
    }
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
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    from .hub_files import page_card, stem_of

    token = get_token()
    if token is None:
        raise InputError(f"the Hub needs a token. {LOG_IN}.")
    api = HfApi(token=token, library_name="gradmerge", library_version=__version__)
    with _hub_errors(repo, token), contextlib.ExitStack() as stack:
        if not progress and not are_progress_bars_disabled():
            disable_progress_bars()
            stack.callback(enable_progress_bars)
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and api.model_info(repo).private is False:
            raise InputError(f"{repo}: exists and is public. Make it private in its settings, then push again.")
        if revision not in (None, "main"):
            api.create_branch(repo, branch=str(revision), exist_ok=True)
        present = set(api.list_repo_files(repo, revision=revision))
        files = package.files | page_card(package, present)
        stems = {stem_of(name) for name in files} - {None}
        operations: list[Any] = [CommitOperationAdd(name, content) for name, content in files.items()]
        operations += [CommitOperationDelete(n) for n in sorted(present - files.keys()) if stem_of(n) in stems]
        message = f"{package.kind.capitalize()} by gradmerge {__version__}"
        return str(api.create_commit(repo, operations, commit_message=message, revision=revision).commit_url)


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
