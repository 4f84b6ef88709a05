"""Models, recipes and data at URLs, read through fsspec.

:func:`local_copy` creates a folder in the cache with the names of the remote files. It downloads small files, such as
configs and tokenizers, so that all other code reads them as usual. Every other file becomes a sparse placeholder of the
same size with an invalid header. :class:`gradmerge.io.reader.PositionalFile` recognizes placeholders with
:func:`remote_file_at` and reads byte ranges of the original. Commands that run a model replace the placeholders by the
content.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from ..errors import GradmergeError, InputError, MachineError
from ..text import first_line, size
from ..urls import redact, register_local_copy
from .reader import is_plain_name
from .small_files import MAX_TOKENIZER, read_start

#: Number of attempts for each request, and seconds before the second one. The pause doubles every time.
TRIES, PAUSE = 4, 0.25
#: Small files that are downloaded when a model is opened.
SMALL_FILES = (
    *("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "*.bpe", "*.codes", "*.yml", "*.yaml"),
    *("README.md", "LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*"),
)
#: Seconds for which a listing is reused while a recipe is being opened.
FRESH = 10.0
#: The first bytes of a placeholder. As the length of a safetensors header, they exceed every file.
INVALID_HEADER = b"\xff" * 8
#: Names of errors of file systems, or parts of them, that repeating a request does not help against.
WRONG_REQUESTS = ("Credentials", "Token", "NotFound", "NoSuchBucket", "ParamValidation")
T = TypeVar("T")


def cache_folder() -> Path:
    """Return the folder for copies of remote files and for results that are being uploaded."""
    if folder := os.environ.get("GRADMERGE_CACHE"):
        return Path(folder).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gradmerge"  # noqa: PTH111


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    options: dict[str, Any] = {}
    if url.startswith("hf://"):
        from huggingface_hub import constants

        options["endpoint"] = constants.ENDPOINT
    try:
        fs, path = url_to_fs(url, **options)
    except Exception as error:
        raise translate_fs_error(url, error) from None  # its text may contain secrets
    return fs, str(path)


def _protocol(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]


def retry(url: str, request: Callable[[], T]) -> T:
    """Return what ``request`` returns. Repeat it if the network or the store fails."""
    for attempt in range(TRIES):
        try:
            return request()
        except GradmergeError:
            raise
        except Exception as error:
            translated = translate_fs_error(url, error)
            if isinstance(translated, InputError) or attempt == TRIES - 1:
                raise translated from None
            time.sleep(PAUSE * 2**attempt)
    raise AssertionError


def translate_fs_error(url: str, error: Exception) -> GradmergeError:
    """Return an InputError if the request is wrong, and a MachineError if the network or the store failed."""
    cause = error.__cause__
    if isinstance(cause, Exception) and type(cause).__module__.startswith("aiohttp"):  # fsspec: FileNotFoundError
        return translate_fs_error(url, cause)
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    kind = type(error).__name__
    reason = first_line(error) or kind
    if redact(url) != url:  # the text may quote the password without the protocol before it
        reason = f"status {status}" if status else kind
    if isinstance(error, ImportError):
        return InputError(f"{url}: a package is not installed ({reason}); try pip install 'gradmerge[remote]'")
    wrong = isinstance(error, FileNotFoundError | PermissionError | ValueError | NotImplementedError)
    if wrong or status in (401, 403, 404) or any(name in kind for name in WRONG_REQUESTS):
        return InputError(
            f"{url}: cannot be opened: {reason}. Check that it exists, and that your credentials allow it. Records "
            "contain no passwords and signatures: pass such a URL again in full."
        )
    return MachineError(f"{url}: the network or the store failed: {kind}: {reason}")


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

    def _read_range(self, start: int, stop: int) -> bytes:
        if _protocol(self.fs) not in ("hf", "http", "https"):
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

    def name_of(self, path: Path) -> str:
        name = path.relative_to(self.path).as_posix()
        return "" if name == "." else name


_copies: dict[str, LocalCopy] = {}
_lock = threading.RLock()


def local_copy(url: str) -> Path:
    """Return the local stand-in of a URL: a folder with its small files, or a file."""
    with _lock:
        copy = _copies.get(url)
        if copy is None or time.monotonic() - copy.listed > FRESH:
            files, commit = list_files(url)
            copy = LocalCopy(url, _cached_path(url, files), files, commit)
            if not copy.path.exists():
                _create(copy)
            _copies[url] = copy
            register_local_copy(copy.path, url)
        return copy.path


def download_url(url: str) -> Path:
    """Return the local copy of a file, or of a model folder with all its weights."""
    path = local_copy(url)
    download(path / name for name in _copies[url].files if not name or name.endswith(".safetensors"))
    return path


def download(paths: Iterable[Path]) -> None:
    """Replace placeholders by the content of their files."""
    for path in paths:
        if (file := remote_file_at(path)) is None:
            continue
        logging.getLogger(__name__).warning("%s: downloading %s to %s", redact(file.url), size(file.size), path)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            retry(file.url, functools.partial(file.fs.get_file, file.path, str(partial)))
            partial.replace(path)
        except OSError as error:
            raise MachineError(f"{path}: cannot be written: {error.strerror}") from error
        finally:
            partial.unlink(missing_ok=True)


def remote_file_at(path: Path) -> RemoteFile | None:
    """Return the remote file that a local path is a placeholder of, or None if the path has the content."""
    copy = _copy_at(path)
    file = copy.files.get(copy.name_of(path)) if copy is not None else None
    return file if file is not None and read_start(path)[:8] == INVALID_HEADER[: file.size] else None


def commit_of(folder: Path) -> str | None:
    """Return the Hub commit of a folder that is a local copy, or a snapshot in the Hub's cache."""
    copy = _copy_at(folder)
    commit = copy.commit if copy is not None else None
    return commit or (folder.name if folder.parent.name == "snapshots" else None)


def states_of(paths: Iterable[Path]) -> dict[Path, list[Any]]:
    """Return the current URL, size and version of every path that is a local copy of a remote file."""
    states: dict[Path, list[Any]] = {}
    files: dict[str, dict[str, RemoteFile]] = {}
    for path in paths:
        if (copy := _copy_at(path)) is None:
            continue
        if copy.url not in files:
            files[copy.url] = copy.files if copy.commit else list_files(copy.url)[0]
        name = copy.name_of(path)
        file = files[copy.url].get(name)
        states[path] = [redact(f"{copy.url}/{name}"), *([file.size, file.version] if file is not None else [])]
    return states


def read_whole(url: str, limit: int) -> bytes:
    """Return the content of a file at a URL of at most ``limit`` bytes. The cache gets no copy: it may have secrets."""
    file = list_files(url)[0].get("")
    if file is None or file.size > limit:
        raise InputError(f"{url}: is not a file of at most {size(limit)}")
    return file.fetch(0, file.size)


def _copy_at(path: Path) -> LocalCopy | None:
    return next((copy for copy in list(_copies.values()) if path.is_relative_to(copy.path)), None)


def _cached_path(url: str, files: dict[str, RemoteFile]) -> Path:
    """Return the path in the cache of these versions of the files."""
    key = str([url, sorted((name, file.size, file.version) for name, file in files.items())])
    name = Path(redact(url)).name
    name = name if "" in files else name.partition("@")[0]  # of a Hub repository without its revision
    return cache_folder() / "models" / hashlib.sha256(key.encode()).hexdigest()[:16] / name


def _create(copy: LocalCopy) -> None:
    """Download the small files and create placeholders for all others."""
    small = [file for file in copy.files.values() if _is_small(file)]
    try:
        copy.path.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=copy.path.parent, prefix=".partial-") as partial,
            ThreadPoolExecutor(8, "gradmerge-download") as pool,
        ):
            contents = dict(zip(small, pool.map(lambda file: file.fetch(0, file.size), small), strict=True))
            for name, file in copy.files.items():
                path = Path(partial, copy.path.name, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(contents.get(file, INVALID_HEADER[: file.size]))
                os.truncate(path, file.size)
            Path(partial, copy.path.name).rename(copy.path)
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
    if _protocol(fs) == "hf":
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
    version = hashlib.sha256(str(sorted(info.items())).encode()).hexdigest()[:16]  # includes the ETag or the time
    return RemoteFile(fs, info["name"], url, info["size"], version)


def _is_small(file: RemoteFile) -> bool:
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
