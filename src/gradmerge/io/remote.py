"""Models at a URL, by fsspec: seen as a folder of this machine, whose weights are read by ranges.

:func:`local_copy` lists what is there and makes a folder with the same names. Small files, such as configs and
tokenizers, are fetched into it, so that all who read them need not know. A weight file is a hole of the right size,
whose first bytes make every reader refuse it, but for :class:`gradmerge.io.reader.PositionalFile`: that looks
it up here (:func:`remote_file_at`) and reads ranges of the original.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from ..errors import GradmergeError, InputError, MachineError
from ..text import first_line, nearest, size
from ..urls import REDACTED, as_url, redact, register_local_copy, unredact
from .small_files import MAX_TOKENIZER

#: Small files that are read, or copied to a result. Nothing else of a folder is fetched.
SMALL = (
    "*.json *.txt *.model *.jinja *.tiktoken *.spm *.bpe *.codes README.md LICENSE* LICENCE* COPYING* NOTICE* "
    "USE_POLICY* *.yml *.yaml"
)
#: What a folder may hold: files in all, folders that are looked into, and bytes of small files.
MOST_FILES, MOST_FOLDERS, MOST_BYTES = 10_000, 64, 1_000_000_000
#: Seconds for which a listing is taken for true while a recipe is being opened.
FRESH = 10.0
#: Where in an answer stands what changes with a file's content.
_VERSIONS = (
    *("ETag", "etag", "generation", "versionId", "VersionId", "blob_id", "content_md5", "md5Hash", "LastModified"),
    *("Last-Modified", "last_modified", "mtime", "created"),
)
#: The first bytes of a hole: as the length of a header they are more than any file has.
_NO_HEADER = b"\xff" * 8
#: How often something is tried, and seconds before the second time; they double.
TRIES, PAUSE = 4, 0.25
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RemoteFile:
    """One file at a URL: where it is, how large, and what tells whether it has changed."""

    fs: Any
    path: str
    """As the file system knows it, which may hold secrets."""
    url: str
    """As it is shown."""
    size: int
    version: str

    def fetch(self, start: int, stop: int) -> bytes:
        """The bytes from ``start`` to ``stop``; tried again where the network fails."""
        if stop <= start:
            return b""
        found = retry(self.url, f"bytes {start} to {stop}", lambda: self._range(start, stop))
        if len(found) > stop - start:
            raise _no_ranges(self.url)
        if len(found) < stop - start:
            raise MachineError(f"{self.url}: ends at byte {start + len(found)}; it was longer when it was opened")
        return found

    def _range(self, start: int, stop: int) -> bytes:
        if protocol_of(self.fs) not in ("hf", "http", "https"):
            return bytes(self.fs.cat_file(self.path, start=start, end=stop))
        # Their cat_file would read on, or take a whole file for a range of it.
        opened = self.fs.open(self.path, "rb", cache_type="none", size=self.size, block_size=1 << 22)
        try:
            return bytes(opened._fetch_range(start, stop))
        except AttributeError:  # a stream: its server has said that it gives no ranges
            raise _no_ranges(self.url) from None
        except ValueError as error:
            if "range" in str(error) or "more bytes" in str(error):
                raise _no_ranges(self.url) from None
            raise


def _no_ranges(url: str) -> InputError:
    return InputError(
        f"{url}: the server gives whole files where a part is asked for. Download the file, and give that."
    )


@dataclass
class Copy:
    """The stand-in of a URL on this machine."""

    url: str
    place: Path
    """A folder, or a file."""
    files: dict[str, RemoteFile]
    """By name in the folder; "" for a file."""
    commit: str | None
    """Of the Hub, which cannot change."""
    listed: float = field(default_factory=time.monotonic)

    def path(self, name: str) -> Path:
        return self.place / name if name else self.place


_copies: dict[str, Copy] = {}
_stored: dict[str, tuple[Copy, RemoteFile]] = {}
"""By the path of the stand-in."""
_lock = threading.RLock()


def remote_file_at(path: Path) -> RemoteFile | None:
    """What a path stands for, if it is the stand-in of a file at a URL."""
    found = _stored.get(str(path)) if _stored else None
    return found[1] if found is not None else None


def files_at(url: str) -> tuple[Path, dict[str, RemoteFile]]:
    """The stand-in of a URL, and the files there by name; one that is a file has the name ""."""
    place = local_copy(url)
    return place, _copies[url].files


def commit_of(folder: Path) -> str | None:
    """The commit of the Hub that a folder is of: a stand-in, or a snapshot in the Hub's cache."""
    found = next((copy.commit for copy, _ in _stored.values() if copy.place == folder), None)
    return found or (folder.name if folder.parent.name == "snapshots" else None)


def url_of(path: Path) -> str | None:
    """The URL that a path is, or stands for."""
    for place in (path, *path.parents) if _copies else ():
        for copy in _copies.values():
            if copy.place == place:
                return f"{copy.url}/{path.relative_to(place).as_posix()}".removesuffix("/.")
    return as_url(path)


def states_of(paths: Iterable[Path]) -> dict[Path, list[Any]]:
    """URL, size and version of every path that stands for a file at a URL, as they are there now."""
    known = {path: _stored[str(path)] for path in paths if str(path) in _stored}
    copies = {copy.url: copy for copy, _ in known.values()}
    with ThreadPoolExecutor(8, "gradmerge-list") as pool:
        listed = pool.map(lambda copy: copy.files if copy.commit else listing(copy.url)[0], copies.values())
        now = {url: {file.url: file for file in files.values()} for url, files in zip(copies, listed, strict=True)}
    found: dict[Path, list[Any]] = {}
    for path, (copy, file) in known.items():
        there = now[copy.url].get(file.url)
        found[path] = [file.url, *((there.size, there.version) if there is not None else ())]
    return found


def local_copy(url: str) -> Path:
    """The stand-in of a URL: a folder with its small files, or a file. It is gone when the process ends."""
    with _lock:
        known = _copies.get(url)
        if known is not None and time.monotonic() - known.listed < FRESH:
            return known.place
        files, commit = listing(url)
        versions = {name: (file.size, file.version) for name, file in files.items()}
        if known is not None and versions == {name: (f.size, f.version) for name, f in known.files.items()}:
            known.listed = time.monotonic()
            return known.place
        copy = Copy(url, _root() / str(len(_stored)) / _name_of(url), files, commit)
        _fill(copy)
        _copies[url] = copy
        _stored.update({str(copy.path(name)): (copy, file) for name, file in files.items()})
        register_local_copy(copy.place, url)
        return copy.place


def read_at(url: str, limit: int) -> bytes:
    """All bytes of a file at a URL that has no more than ``limit`` of them."""
    files, _ = listing(url)
    if "" not in files:
        raise InputError(f"{url}: is a folder, not a file")
    if files[""].size > limit:
        raise InputError(f"{url}: larger than {size(limit)}, the limit for such a file")
    return files[""].fetch(0, files[""].size)


@contextlib.contextmanager
def said_of(url: str) -> Iterator[None]:
    """Turn whatever a file system raises into words."""
    try:
        yield
    except GradmergeError:
        raise
    except Exception as error:
        raise _explained(url, error) from None  # whose text may hold secrets


def retry(url: str, what: str, ask: Callable[[], Answer]) -> Answer:
    """What ``ask`` gives, tried again where the network or the store fails."""
    for number in range(1, TRIES + 1):
        try:
            return ask()
        except GradmergeError:
            raise
        except Exception as error:
            found = _explained(url, error)
            if isinstance(found, InputError):
                raise found from None
            if number == TRIES:
                raise MachineError(f"{found} ({what}, tried {TRIES} times)") from None
            time.sleep(PAUSE * 2 ** (number - 1))
    raise AssertionError


def _explained(url: str, error: Exception) -> GradmergeError:
    """Whose fault it is that a file system fails: the request's, or that of the network and the store."""
    cause = error.__cause__
    if isinstance(cause, Exception) and type(cause).__module__.startswith("aiohttp"):  # fsspec takes it for no file
        return _explained(url, cause)
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    why = redact(first_line(error) or type(error).__name__)
    kind = type(error).__name__
    if isinstance(error, FileNotFoundError) or status == 404 or kind in ("RepositoryNotFoundError", "NoSuchBucket"):
        return InputError(f"{url}: there is nothing of that name, or it may not be seen ({why})")
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in kind or "Token" in kind:
        hide = f" What {REDACTED} stands for is not known here: records and messages do not hold it." * (
            REDACTED in url
        )
        return InputError(
            f"{url}: access is denied ({why}). Give credentials in the way of its file system, such as the "
            f"environment or a profile.{hide}"
        )
    if isinstance(error, NotImplementedError):
        return InputError(f"{url}: its file system cannot do this ({why or kind})")
    if kind == "ParamValidationError":  # of S3, whose buckets have no `user:password@`
        return InputError(f"{url}: S3 has no such addresses. Keys come from the environment or a profile.")
    return MachineError(f"{url}: the network or the store fails: {kind}: {why}")


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    import fsspec  # type: ignore[import-untyped]
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    from fsspec.registry import get_filesystem_class, known_implementations  # type: ignore[import-untyped]

    protocol = url.partition("://")[0]
    try:
        get_filesystem_class(protocol)
    except ValueError:
        known = sorted({*known_implementations, *fsspec.available_protocols()})
        raise InputError(f"{url}: there is no protocol {protocol!r}{nearest(protocol, known)}") from None
    except ImportError as error:
        extra = "pip install 'gradmerge[remote]'" if protocol in ("s3", "s3a") else first_line(error)
        raise InputError(f"{url}: a package for {protocol}:// is not installed: {extra}") from None
    more: dict[str, Any] = {}
    if protocol == "hf":
        from huggingface_hub import constants

        more["endpoint"] = constants.ENDPOINT
    with said_of(url):
        fs, path = url_to_fs(unredact(url), **more)
        return fs, str(path)


def protocol_of(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]


def listing(url: str) -> tuple[dict[str, RemoteFile], str | None]:
    """The files at a URL by their names below it, "" for a file itself; and of the Hub, the commit."""
    fs, path = file_system(url)
    commit = None
    if protocol_of(fs) == "hf":
        path, commit = _at_commit(url, fs, path)

    def look() -> dict[str, RemoteFile]:
        fs.invalidate_cache()
        entry = fs.info(path)
        if entry["type"] != "directory" and not (protocol_of(fs).startswith("http") and _is_listing(entry)):
            return {"": _stored_file(fs, url, "", entry)}
        entries = fs.ls(path, detail=True)
        folders = sorted(one["name"] for one in entries if one["type"] == "directory")
        wanted = [name for name in folders if not last_part(name).startswith((".", "checkpoint-"))]
        for folder in wanted[:MOST_FOLDERS]:
            if folder.rstrip("/") != path.rstrip("/") and len(entries) <= MOST_FILES:
                entries += [one for one in fs.ls(folder, detail=True) if one["type"] != "directory"]
        files: dict[str, RemoteFile] = {}
        for one in entries[:MOST_FILES]:
            name = one["name"].rstrip("/").removeprefix(path.rstrip("/")).lstrip("/")
            if one["type"] != "directory" and one["name"] != name and _fits(name):
                whole = one if one.get("size") is not None else fs.info(one["name"])
                files[name] = _stored_file(fs, url, name, {**whole, "name": one["name"]})
        return files

    found = retry(url, "listing", look)
    if not found:
        raise InputError(f"{url}: there is nothing of that name, or it may not be seen")
    return found, commit


def _at_commit(url: str, fs: Any, path: str) -> tuple[str, str | None]:
    """A path of the Hub with its commit, so that no later one gets in between."""

    def ask() -> tuple[str, str | None]:
        where = fs.resolve_path(path)
        if not hasattr(where, "repo_id"):  # a bucket, which has no commits
            return path, None
        commit = fs._api.repo_info(where.repo_id, repo_type=where.repo_type, revision=where.revision).sha
        kind = "" if where.repo_type == "model" else f"{where.repo_type}s/"
        return f"{kind}{where.repo_id}@{commit}/{where.path_in_repo}".rstrip("/"), str(commit)

    return retry(url, "its commit", ask)


def _is_listing(entry: dict[str, Any]) -> bool:
    """Whether a page of HTTP is the index of a folder: fsspec takes its links for files."""
    return str(entry.get("mimetype", "")).startswith("text/html")


def _stored_file(fs: Any, url: str, name: str, entry: dict[str, Any]) -> RemoteFile:
    if not isinstance(entry.get("size"), int):
        raise InputError(f"{url}: the server does not say how large it is, so that no part of it can be asked for")
    lfs = entry.get("lfs")
    version = lfs.get("sha256") if isinstance(lfs, dict) else None
    version = version or next((str(entry[key]) for key in _VERSIONS if entry.get(key) is not None), "")
    return RemoteFile(fs, entry["name"], f"{url}/{name}" if name else url, entry["size"], version)


def _fits(name: str) -> bool:
    """Whether a name can be that of a file in the stand-in, or one folder below."""
    from .reader import is_plain_name

    parts = name.split("/")
    return len(parts) <= 2 and all(map(is_plain_name, parts)) and not (len(parts) > 1 and parts[0].startswith("."))


def _fill(copy: Copy) -> None:
    """Make the stand-in: small files fetched, several at a time, and holes for all others."""
    small = {name: file for name, file in copy.files.items() if is_small(file)}
    if sum(file.size for file in small.values()) > MOST_BYTES:
        raise InputError(f"{copy.url}: has more than {size(MOST_BYTES)} of small files; that is no model")
    (copy.place.parent if "" in copy.files else copy.place).mkdir(parents=True)
    try:
        for name, file in copy.files.items():
            place = copy.path(name)
            place.parent.mkdir(exist_ok=True)
            with place.open("wb") as out:
                if name not in small:
                    out.write(_NO_HEADER[: file.size])
                    out.truncate(file.size)
        with ThreadPoolExecutor(8, "gradmerge-fetch") as pool:
            fetched = pool.map(lambda file: file.fetch(0, file.size), small.values())
            for name, content in zip(small, fetched, strict=True):
                copy.path(name).write_bytes(content)
    except OSError as error:
        raise MachineError(f"{copy.place}: cannot be written: {error.strerror}") from error


def is_small(file: RemoteFile) -> bool:
    """Whether a file is one of those that are fetched at once."""
    return file.size <= MAX_TOKENIZER and any(fnmatchcase(last_part(file.path), form) for form in SMALL.split())


def _root() -> Path:
    """The folder of all stand-ins of this process."""
    if not _roots:
        _roots.append(Path(tempfile.mkdtemp(prefix="gradmerge-")))
        atexit.register(shutil.rmtree, _roots[0], ignore_errors=True)
    return _roots[0]


_roots: list[Path] = []


def last_part(path: str) -> str:
    return path.partition("?")[0].rstrip("/").rpartition("/")[2]


def _name_of(url: str) -> str:
    """The last part of a URL, as the name of a folder."""
    return last_part(url.partition("://")[2]).partition("@")[0] or "model"
