"""Models, recipes and data at URLs, read through fsspec.

:func:`local_copy` creates a folder in the cache with the names of the remote files. It downloads small files, such as
configs and tokenizers, so that all other code reads them as usual. Every other file becomes a sparse placeholder of the
same size with an invalid header. :class:`gradmerge.io.reader.PositionalFile` recognizes placeholders with
:func:`remote_file_at` and reads byte ranges of the original. Commands that run a model replace the placeholders by the
content.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..errors import InputError, MachineError
from ..text import size
from ..urls import redact, register_local_copy
from .file_system import cache_folder, file_system, protocol_of, retry
from .reader import is_plain_name
from .small_files import MAX_TOKENIZER, read_start

#: Small files that are downloaded when a model is opened.
SMALL_FILES = (
    *("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "*.bpe", "*.codes", "*.yml", "*.yaml"),
    *("README.md", "LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*"),
)
#: Seconds for which a listing is reused while a recipe is being opened.
FRESH = 10.0
#: Bytes of each request when a whole file is downloaded.
STEP = 32 << 20
#: Keys of fsspec's file information that change with a file's content.
VERSION_KEYS = (
    *("ETag", "etag", "generation", "versionId", "VersionId", "blob_id", "content_md5", "md5Hash", "LastModified"),
    *("Last-Modified", "last_modified", "mtime", "modified", "modify", "created"),
)
#: The first bytes of a placeholder. As the length of a safetensors header, they exceed every file.
INVALID_HEADER = b"\xff" * 8


@dataclass(frozen=True)
class RemoteFile:
    """One file at a URL, with its size and version when it was listed."""

    fs: Any
    path: str
    """In the file system."""
    url: str
    size: int
    version: str

    def fetch(self, start: int, stop: int) -> bytes:
        """Download the bytes from ``start`` to ``stop``."""
        if stop <= start:
            return b""
        content = retry(self.url, lambda: self._read_range(start, stop))
        if len(content) > stop - start:
            raise InputError(f"{self.url}: the server does not support range requests. Download the file.")
        if len(content) < stop - start:
            raise MachineError(f"{self.url}: ends at byte {start + len(content)}; it was longer when it was opened")
        return content

    def download(self, path: Path) -> Path:
        """Download the whole file to a path, several ranges at a time."""
        with path.open("wb") as out, ThreadPoolExecutor(8, "gradmerge-download") as pool:

            def fetch(start: int) -> None:
                os.pwrite(out.fileno(), self.fetch(start, min(start + STEP, self.size)), start)

            list(pool.map(fetch, range(0, self.size, STEP)))
        return path

    def _read_range(self, start: int, stop: int) -> bytes:
        if protocol_of(self.fs) not in ("hf", "http", "https"):
            return bytes(self.fs.cat_file(self.path, start=start, end=stop))
        # Their cat_file reads ahead, or downloads the whole file from a server that ignores ranges.
        file = self.fs.open(self.path, "rb", cache_type="none", size=self.size, block_size=1 << 22)
        return bytes(file._fetch_range(start, stop))


@dataclass
class LocalCopy:
    """The local stand-in of a URL: a folder, or a file."""

    url: str
    path: Path
    files: dict[str, RemoteFile]
    """By name in the folder. If the URL is a file, its name is ""."""
    commit: str | None
    """Of a Hub repository."""
    listed: float = field(default_factory=time.monotonic)

    def path_of(self, name: str) -> Path:
        return self.path / name if name else self.path


_copies: dict[str, LocalCopy] = {}
_files: dict[str, tuple[LocalCopy, RemoteFile]] = {}
"""By local path."""
_lock = threading.RLock()


def local_copy(url: str) -> Path:
    """Return the local stand-in of a URL: a folder with its small files, or a file."""
    return _local_copy(url, FRESH).path


def download_model(url: str) -> Path:
    """Return the local copy of the model at a URL, with all its weights."""
    copy = _local_copy(url, 0)
    if "" in copy.files:
        raise InputError(f"{url}: is a file. To run a model, pass the folder with its config.json.")
    download(copy.path / name for name in copy.files if name.endswith(".safetensors"))
    return copy.path


def download_file(url: str) -> Path:
    """Return the local copy of a file at a URL, with its content."""
    copy = _local_copy(url, 0)
    if "" not in copy.files:
        raise InputError(f"{url}: is a folder. Pass the URL of one file.")
    download([copy.path])
    return copy.path


def download(paths: Iterable[Path]) -> None:
    """Replace placeholders by the content of their files."""
    for path in paths:
        if (file := remote_file_at(path)) is None:
            continue
        logging.getLogger(__name__).warning("%s: downloading %s to %s", redact(file.url), size(file.size), path)
        try:
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as partial:
                file.download(Path(partial, "file")).rename(path)
        except OSError as error:
            raise MachineError(f"{path}: cannot be written: {error.strerror}") from error


def remote_file_at(path: Path) -> RemoteFile | None:
    """Return the remote file that a local path is a placeholder of, or None if the path has the content."""
    known = _files.get(str(path)) if _files else None
    is_placeholder = known is not None and read_start(path)[:8] == INVALID_HEADER[: known[1].size]
    return known[1] if known is not None and is_placeholder else None


def commit_of(folder: Path) -> str | None:
    """Return the Hub commit of a folder that is a local copy, or a snapshot in the Hub's cache."""
    commit = next((copy.commit for copy in _copies.values() if copy.path == folder), None)
    return commit or (folder.name if folder.parent.name == "snapshots" else None)


def states_of(paths: Iterable[Path]) -> dict[Path, list[Any]]:
    """Return the current URL, size and version of every path that is a local copy of a remote file."""
    known = {path: _files[str(path)] for path in paths if str(path) in _files}
    copies = {copy.url: copy for copy, _ in known.values()}
    with ThreadPoolExecutor(8, "gradmerge-list") as pool:
        listings = pool.map(lambda copy: copy.files if copy.commit else list_files(copy.url)[0], copies.values())
        now = {file.url: [file.size, file.version] for files in listings for file in files.values()}
    return {path: [redact(file.url), *now.get(file.url, [])] for path, (_, file) in known.items()}


def read_whole(url: str, limit: int) -> bytes:
    """Return the content of a file at a URL of at most ``limit`` bytes, without a local copy."""
    file = list_files(url)[0].get("")
    if file is None or file.size > limit:
        raise InputError(f"{url}: is not a file of at most {size(limit)}")
    return file.fetch(0, file.size)


def _local_copy(url: str, max_age: float) -> LocalCopy:
    """Return the local copy of a URL, listed at most ``max_age`` seconds ago."""
    with _lock:
        copy = _copies.get(url)
        if copy is None or time.monotonic() - copy.listed > max_age:
            files, commit = list_files(url)
            if copy is None or files != copy.files:
                copy = LocalCopy(url, _cached_path(url, files), files, commit)
                _create(copy)
                _copies[url] = copy
                _files.update({str(copy.path_of(name)): (copy, file) for name, file in files.items()})
                register_local_copy(copy.path, url)
            copy.listed = time.monotonic()
        return copy


def _cached_path(url: str, files: dict[str, RemoteFile]) -> Path:
    """Return the path in the cache of these versions of the files."""
    key = json.dumps([url, sorted((name, file.size, file.version) for name, file in files.items())])
    name = Path(redact(url)).name
    name = name if "" in files else name.partition("@")[0]  # of a Hub repository without its revision
    name = name if is_plain_name(name) else "model"
    return cache_folder() / "models" / hashlib.sha256(key.encode()).hexdigest()[:16] / name


def _create(copy: LocalCopy) -> None:
    """Download the small files and create placeholders for all others, unless the cache has them."""
    if copy.path.exists():
        return
    small = {name: file for name, file in copy.files.items() if is_small(file)}
    try:
        copy.path.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=copy.path.parent, prefix=".partial-") as partial,
            ThreadPoolExecutor(8, "gradmerge-download") as pool,
        ):
            contents = dict(zip(small, pool.map(lambda file: file.fetch(0, file.size), small.values()), strict=True))
            unfinished = LocalCopy(copy.url, Path(partial, copy.path.name), copy.files, None)
            for name, file in copy.files.items():
                path = unfinished.path_of(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(contents.get(name, INVALID_HEADER[: file.size]))
                os.truncate(path, file.size)
            unfinished.path.rename(copy.path)
    except OSError as error:
        if not copy.path.exists():  # otherwise another process has created it meanwhile
            advice = "Set the environment variable GRADMERGE_CACHE to another folder."
            raise MachineError(f"{copy.path}: cannot be written: {error.strerror}. {advice}") from error


def list_files(url: str) -> tuple[dict[str, RemoteFile], str | None]:
    """Return the files at a URL by name, including those one folder below, and the commit of a Hub repository.

    If the URL is a file, its name is "".
    """
    fs, path = file_system(url)
    commit = None
    if protocol_of(fs) == "hf":
        path, commit = retry(url, lambda: _pin_commit(fs, path))
    files = retry(url, lambda: _list(fs, path, url))
    if not files:
        raise InputError(f"{url}: does not exist, or you may not see it")
    return files, commit


def _list(fs: Any, path: str, url: str) -> dict[str, RemoteFile]:
    fs.invalidate_cache()
    info = fs.info(path)
    if info["type"] != "directory":
        return {"": _remote_file(fs, url, info)}
    files = {}
    for name, entry in fs.find(path, maxdepth=2, detail=True).items():
        name = name.removeprefix(path.rstrip("/")).strip("/")
        is_skipped = "/" in name and name.startswith((".", "checkpoint-"))
        if name and not is_skipped and all(map(is_plain_name, name.split("/"))):
            files[name] = _remote_file(fs, f"{url}/{name}", entry)
    return files


def _remote_file(fs: Any, url: str, info: dict[str, Any]) -> RemoteFile:
    if not isinstance(info.get("size"), int):
        raise InputError(f"{url}: the server does not report the size of the file, so gradmerge cannot read ranges")
    version = next((str(info[key]) for key in VERSION_KEYS if info.get(key) is not None), "")
    return RemoteFile(fs, info["name"], url, info["size"], version)


def is_small(file: RemoteFile) -> bool:
    """Return whether a file is downloaded when its model is opened."""
    name = Path(file.path.partition("?")[0]).name
    return file.size <= MAX_TOKENIZER and any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)


def _pin_commit(fs: Any, path: str) -> tuple[str, str | None]:
    """Return a Hub path with its commit, so that later commits do not change what is read."""
    resolved = fs.resolve_path(path)
    if not hasattr(resolved, "repo_id"):  # a bucket, which has no commits
        return path, None
    info = fs._api.repo_info(resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision)
    kind = "" if resolved.repo_type == "model" else f"{resolved.repo_type}s/"
    return f"{kind}{resolved.repo_id}@{info.sha}/{resolved.path_in_repo}".rstrip("/"), str(info.sha)
