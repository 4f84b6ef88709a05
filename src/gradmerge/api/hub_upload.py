"""A package on its way to the Hub: what is there already is not sent again, and all of it appears in one commit."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..cards.metadata import CARD
from ..curvature.format import STEM
from ..errors import GradmergeError, InputError, MachineError
from ..progress import Progress
from ..text import first_line, one_line, some
from .package import Package, stem_in

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoFile

LOG_IN = "Log in with `hf auth login` (a token with the right to write), or set HF_TOKEN"


@dataclass
class Sent:
    """What a push did."""

    sent: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    url: str | None = None
    notes: list[str] = field(default_factory=list)


def send(repo: str, package: Package, *, private: bool, revision: str | None, progress: Progress) -> Sent:
    """Make the repository if it is not there, and commit what of the package it does not have."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
    from huggingface_hub.hf_api import RepoFile

    token = get_token()
    if token is None:
        raise InputError(f"the Hub takes nothing without a token. {LOG_IN}.")
    api = HfApi(token=token, library_name="gradmerge", library_version=__version__)
    done = Sent()
    with _explained(repo, api.endpoint, token), _without_bars(), _warnings_into(done.notes):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and api.model_info(repo).private is False:
            raise InputError(f"{repo}: is there already, and public. Make it private in its settings, then push again.")
        if revision not in (None, "main") and not str(revision).startswith("refs/"):
            api.create_branch(repo, branch=str(revision), exist_ok=True)
        tree = api.list_repo_tree(repo, recursive=True, revision=revision)
        there = {file.path: file for file in tree if isinstance(file, RepoFile)}
        contents: dict[str, Any] = {**package.files, **package.texts}
        if package.kind == STEM and CARD not in there:  # a repository of its own, whose page shows the card
            contents[CARD] = contents[f"{STEM}/{CARD}"]
        additions: list[CommitOperationAdd] = []
        progress.begin("uploading", sum(package.sizes.values()))
        for name, content in sorted(contents.items()):
            addition = CommitOperationAdd(name, content)
            if _is_there(addition, there.get(name)):
                done.unchanged.append(name)
            else:
                if name.endswith(".safetensors"):  # one by one, so that a push that fails goes on with the next
                    api.preupload_lfs_files(repo, [addition], revision=revision, free_memory=False)
                additions.append(addition)
            progress.advance(addition.upload_info.size)
        done.sent = [addition.path_in_repo for addition in additions]
        done.removed = _stale(there, contents)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [*additions]
        operations += [CommitOperationDelete(name) for name in done.removed]
        if operations:
            message = f"{package.kind.capitalize()} by gradmerge {__version__}"
            done.url = str(api.create_commit(repo, operations, commit_message=message, revision=revision).commit_url)
    done.notes += _left_behind(there, contents, done) + _unknown(api, package)
    return done


def _is_there(addition: CommitOperationAdd, file: RepoFile | None) -> bool:
    """Whether the repository has a file, byte for byte."""
    if file is None or file.size != addition.upload_info.size:
        return False
    if file.lfs is not None:
        return bool(file.lfs.sha256 == addition.upload_info.sha256.hex())
    with addition.as_file() as content:  # a small one: Git names it by this digest
        raw = content.read()
    return bool(file.blob_id == hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest())


def _stale(there: dict[str, RepoFile], contents: dict[str, Any]) -> list[str]:
    """Files of earlier weights or curvature that lie between the new ones, cut into other shards or into none."""
    stems = {stem_in(name) for name in contents} - {None}
    return sorted(name for name in there if name not in contents and stem_in(name) in stems)


def _left_behind(there: dict[str, RepoFile], contents: dict[str, Any], done: Sent) -> list[str]:
    """Says so where new weights lie beside older curvature."""
    old = any(name.startswith(f"{STEM}/") for name in there) and not any(
        name.startswith(f"{STEM}/") for name in contents
    )
    new = any(name.endswith(".safetensors") for name in done.sent)
    return [f"the repository has a {STEM}/ that is not of these weights; estimate it anew, or remove it"] * (
        old and new
    )


def _unknown(api: HfApi, package: Package) -> list[str]:
    """Says which base models the Hub does not know; a push does not fail because that cannot be asked."""
    unknown: list[str] = []
    with contextlib.suppress(Exception):
        unknown = [one for one in package.bases[:8] if not api.repo_exists(one)]
    found = "as base_model, which the Hub does not know, or does not show to you"
    return [f"{CARD} names {one_line(some(unknown))} {found}. If it is a folder, take it out"] if unknown else []


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """The library's own bars would be drawn into ours."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    if shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


@contextlib.contextmanager
def _warnings_into(notes: list[str]) -> Iterator[None]:
    """What the library warns of, such as what the Hub says of the card, becomes notes."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        yield
    notes += dict.fromkeys(str(one.message) for one in told if one.category is UserWarning)


@contextlib.contextmanager
def _explained(repo: str, endpoint: str, token: str) -> Iterator[None]:
    """What the Hub or the network say no with, as a message; the token is in none of them."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except GradmergeError:
        raise
    except Exception as error:
        chain: list[BaseException] = [error]
        cause = error.__cause__
        while cause is not None and len(chain) < 20:
            chain, cause = [*chain, cause], cause.__cause__
        if any(isinstance(one, OfflineModeIsEnabled) for one in chain):
            raise InputError("HF_HUB_OFFLINE is set, so that nothing can be sent; unset it") from None
        if isinstance(error, ValueError) and not isinstance(error, HfHubHTTPError):  # of the card, mostly
            raise InputError(f"{repo}: {str(error).strip().replace(token, '…')[:600]}") from None
        refused = next((one for one in chain if isinstance(one, HfHubHTTPError) and one.response is not None), None)
        if isinstance(refused, HfHubHTTPError):
            said = one_line(refused.server_message or first_line(refused)).replace(token, "…")[:300]
            raise _of_status(refused.response.status_code, repo, said) from None
        if any(type(one).__module__.partition(".")[0] in ("httpx", "httpx2") for one in chain):
            why = first_line(chain[-1]).replace(token, "…")
            raise MachineError(f"{endpoint}: cannot be reached: {why}. Push again; what has arrived stays.") from None
        raise


def _of_status(status: int, repo: str, said: str) -> GradmergeError:
    """The user's error where another request would do, and the machine's where the same one would."""
    if status == 401:
        return InputError(f"{repo}: the Hub does not accept the token (401). {LOG_IN}.")
    if status == 403:
        return InputError(
            f"{repo}: the token may not write there (403: {said}). Take one with the right to write, of a member of "
            f"{repo.partition('/')[0]}: `hf auth login`."
        )
    if status == 404:
        return InputError(f"{repo}: the Hub has no such owner, repository or branch (404: {said})")
    if status in (409, 412):
        return MachineError(f"{repo}: something else was changed there meanwhile ({status}: {said}). Push again.")
    if status == 429 or status >= 500:
        return MachineError(f"{repo}: the Hub failed ({status}: {said}). Push again later; what has arrived stays.")
    return InputError(f"{repo}: the Hub refuses this ({status}: {said})")
