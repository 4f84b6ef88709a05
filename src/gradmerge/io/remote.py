"""Models at URLs, read through fsspec.

:func:`local_copy` creates a temporary folder with the names of the remote files. It downloads small files, such as
configs and tokenizers, so that all other code reads them as usual. A weight file becomes a sparse placeholder of the
same size with an invalid header. :class:`gradmerge.io.reader.PositionalFile` recognizes placeholders with
:func:`remote_file_at` and reads byte ranges of the original.
"""

from __future__ import annotations

import atexit
import shutil
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
from ..urls import REDACTED, redact, register_local_copy, unredact
from .small_files import MAX_TOKENIZER

#: Small files that are downloaded when a model is opened.
SMALL_FILES = (
    "*.json *.txt *.model *.jinja *.tiktoken *.spm *.bpe *.codes README.md LICENSE* LICENCE* COPYING* NOTICE* "
    "USE_POLICY* *.yml *.yaml"
)
#: Limits of a model folder: number of files, of subfolders, and bytes of all small files.
MAX_FILES, MAX_FOLDERS, MAX_SMALL_BYTES = 10_000, 64, 1_000_000_000
#: Seconds for which a listing is reused while a recipe is being opened.
FRESH = 10.0
#: Keys of fsspec's file information that change with a file's content.
VERSION_KEYS = (
    *("ETag", "etag", "generation", "versionId", "VersionId", "blob_id", "content_md5", "md5Hash", "LastModified"),
    *("Last-Modified", "last_modified", "mtime", "created"),
)
#: The first bytes of a placeholder. As the length of a safetensors header, they exceed every file.
INVALID_HEADER = b"\xff" * 8
#: Number of attempts for each request, and seconds before the second one. The pause doubles every time.
TRIES, PAUSE = 4, 0.25
T = TypeVar("T")


@dataclass(frozen=True)
class RemoteFile:
    """One file at a URL, with its size and version when it was listed."""

    fs: Any
    path: str
    """In the file system. May contain secrets."""
    url: str
    """Redacted."""
    size: int
    version: str

    def fetch(self, start: int, stop: int) -> bytes:
        """Download the bytes from ``start`` to ``stop``."""
        if stop <= start:
            return b""
        content = retry(self.url, lambda: self._read_range(start, stop))
        if len(content) > stop - start:
            raise _no_ranges(self.url)
        if len(content) < stop - start:
            raise MachineError(f"{self.url}: ends at byte {start + len(content)}; it was longer when it was opened")
        return content

    def _read_range(self, start: int, stop: int) -> bytes:
        if protocol_of(self.fs) not in ("hf", "http", "https"):
            return bytes(self.fs.cat_file(self.path, start=start, end=stop))
        # Their cat_file reads ahead, or downloads the whole file from a server that ignores ranges.
        file = self.fs.open(self.path, "rb", cache_type="none", size=self.size, block_size=1 << 22)
        return bytes(file._fetch_range(start, stop))


@dataclass
class LocalCopy:
    """The local stand-in of a URL."""

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
_temporary_folders: list[Path] = []


def local_copy(url: str) -> Path:
    """Return the local stand-in of a URL: a folder with its small files, or a file. It is removed at exit."""
    with _lock:
        known = _copies.get(url)
        if known is not None and time.monotonic() - known.listed < FRESH:
            return known.path
        files, commit = list_files(url)
        if known is not None and files == known.files:
            known.listed = time.monotonic()
            return known.path
        if not _temporary_folders:
            _temporary_folders.append(Path(tempfile.mkdtemp(prefix="gradmerge-")))
            atexit.register(shutil.rmtree, _temporary_folders[0], ignore_errors=True)
        name = last_part(url.partition("://")[2]).partition("@")[0] or "model"
        copy = LocalCopy(url, _temporary_folders[0] / str(len(_files)) / name, files, commit)
        _create(copy)
        _copies[url] = copy
        _files.update({str(copy.path_of(name)): (copy, file) for name, file in files.items()})
        register_local_copy(copy.path, url)
        return copy.path


def _create(copy: LocalCopy) -> None:
    """Download the small files and create placeholders for all others."""
    small = {name: file for name, file in copy.files.items() if is_small(file)}
    if sum(file.size for file in small.values()) > MAX_SMALL_BYTES:
        raise InputError(f"{copy.url}: has more than {size(MAX_SMALL_BYTES)} of small files. That is not a model.")
    try:
        for name, file in copy.files.items():
            copy.path_of(name).parent.mkdir(parents=True, exist_ok=True)
            if name not in small:
                with copy.path_of(name).open("wb") as placeholder:
                    placeholder.write(INVALID_HEADER[: file.size])
                    placeholder.truncate(file.size)
        with ThreadPoolExecutor(8, "gradmerge-download") as pool:
            contents = pool.map(lambda file: file.fetch(0, file.size), small.values())
            for name, content in zip(small, contents, strict=True):
                copy.path_of(name).write_bytes(content)
    except OSError as error:
        raise MachineError(f"{copy.path}: cannot be written: {error.strerror}") from error


def remote_file_at(path: Path) -> RemoteFile | None:
    """Return the remote file that a local path is a stand-in of."""
    known = _files.get(str(path)) if _files else None
    return known[1] if known is not None else None


def commit_of(folder: Path) -> str | None:
    """Return the Hub commit of a folder that is a local copy, or a snapshot in the Hub's cache."""
    commit = next((copy.commit for copy in _copies.values() if copy.path == folder), None)
    return commit or (folder.name if folder.parent.name == "snapshots" else None)


def states_of(paths: Iterable[Path]) -> dict[Path, list[Any]]:
    """Return the current URL, size and version of every path that is a stand-in of a remote file."""
    known = {path: _files[str(path)] for path in paths if str(path) in _files}
    copies = {copy.url: copy for copy, _ in known.values()}
    with ThreadPoolExecutor(8, "gradmerge-list") as pool:
        listings = pool.map(lambda copy: copy.files if copy.commit else list_files(copy.url)[0], copies.values())
        now = {file.url: [file.size, file.version] for files in listings for file in files.values()}
    return {path: [file.url, *now.get(file.url, [])] for path, (_, file) in known.items()}


def read_whole(url: str, limit: int) -> bytes:
    """Return the content of a file at a URL of at most ``limit`` bytes."""
    files, _ = list_files(url)
    if "" not in files:
        raise InputError(f"{url}: is a folder, not a file")
    if files[""].size > limit:
        raise InputError(f"{url}: larger than {size(limit)}, the limit for such a file")
    return files[""].fetch(0, files[""].size)


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
    entries = fs.ls(path, detail=True)
    folders = sorted(entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory")
    wanted = [folder for folder in folders if not last_part(folder).startswith((".", "checkpoint-"))]
    for folder in wanted[:MAX_FOLDERS]:
        if folder != path.rstrip("/"):
            entries += fs.ls(folder, detail=True)
    files = {}
    for entry in entries[:MAX_FILES]:
        name = entry["name"].removeprefix(path.rstrip("/")).strip("/")
        if entry["type"] != "directory" and entry["name"] != name and _is_safe_name(name):
            files[name] = _remote_file(fs, f"{url}/{name}", entry)
    return files


def _is_safe_name(name: str) -> bool:
    """Return whether a name stays inside the local copy, at most one folder below it."""
    from .reader import is_plain_name

    parts = name.split("/")
    return len(parts) <= 2 and all(map(is_plain_name, parts)) and not (len(parts) == 2 and name.startswith("."))


def _remote_file(fs: Any, url: str, info: dict[str, Any]) -> RemoteFile:
    if not isinstance(info.get("size"), int):
        raise InputError(f"{url}: the server does not report the size of the file, so gradmerge cannot read ranges")
    lfs = info.get("lfs")
    version = lfs.get("sha256") if isinstance(lfs, dict) else None
    version = version or next((str(info[key]) for key in VERSION_KEYS if info.get(key) is not None), "")
    return RemoteFile(fs, info["name"], url, info["size"], version)


def is_small(file: RemoteFile) -> bool:
    """Return whether a file is downloaded when its model is opened."""
    patterns = SMALL_FILES.split()
    return file.size <= MAX_TOKENIZER and any(fnmatchcase(last_part(file.path), pattern) for pattern in patterns)


def last_part(path: str) -> str:
    return path.partition("?")[0].rstrip("/").rpartition("/")[2]


def _pin_commit(fs: Any, path: str) -> tuple[str, str | None]:
    """Return a Hub path with its commit, so that later commits do not change what is read."""
    resolved = fs.resolve_path(path)
    if not hasattr(resolved, "repo_id"):  # a bucket, which has no commits
        return path, None
    info = fs._api.repo_info(resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision)
    kind = "" if resolved.repo_type == "model" else f"{resolved.repo_type}s/"
    return f"{kind}{resolved.repo_id}@{info.sha}/{resolved.path_in_repo}".rstrip("/"), str(info.sha)


def protocol_of(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    options: dict[str, Any] = {}
    if url.startswith("hf://"):
        from huggingface_hub import constants

        options["endpoint"] = constants.ENDPOINT
    try:
        fs, path = url_to_fs(unredact(url), **options)
    except ImportError as error:
        command = "pip install 'gradmerge[remote]'" if url.startswith(("s3://", "s3a://")) else first_line(error)
        raise InputError(f"{url}: a package is not installed: {command}") from None
    except Exception as error:
        raise translate_fs_error(url, error) from None  # its text may contain secrets
    return fs, str(path)


def retry(url: str, request: Callable[[], T]) -> T:
    """Return what ``request`` returns. Repeat it if the network or the store fails."""
    for attempt in range(1, TRIES + 1):
        try:
            return request()
        except GradmergeError:
            raise
        except Exception as error:
            translated = translate_fs_error(url, error)
            if isinstance(translated, InputError):
                raise translated from None
            if attempt == TRIES:
                raise MachineError(f"{translated} (tried {TRIES} times)") from None
            time.sleep(PAUSE * 2 ** (attempt - 1))
    raise AssertionError


def translate_fs_error(url: str, error: Exception) -> GradmergeError:
    """Return an InputError if the request is wrong, and a MachineError if the network or the store failed."""
    cause = error.__cause__
    if isinstance(cause, Exception) and type(cause).__module__.startswith("aiohttp"):  # fsspec: FileNotFoundError
        return translate_fs_error(url, cause)
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    kind = type(error).__name__
    reason = redact(first_line(error) or kind)
    if isinstance(error, FileNotFoundError) or status == 404 or kind in ("RepositoryNotFoundError", "NoSuchBucket"):
        return InputError(f"{url}: does not exist, or you may not see it ({reason})")
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in kind or "Token" in kind:
        missing = f" Records and messages do not contain the secrets that {REDACTED} replaces." * (REDACTED in url)
        return InputError(
            f"{url}: access denied ({reason}). Set the credentials of this file system, for example in the "
            f"environment or a profile.{missing}"
        )
    if isinstance(error, ValueError) and "range" in str(error):
        return _no_ranges(url)
    if isinstance(error, ValueError) and "Protocol not known" in str(error):
        return InputError(f"{url}: unknown protocol. Known are those of fsspec, such as s3://, gs:// and hf://.")
    if isinstance(error, NotImplementedError):
        return InputError(f"{url}: the file system does not support this ({reason})")
    if kind == "ParamValidationError":  # S3 has no `user:password@`
        return InputError(f"{url}: invalid S3 address. Set the keys in the environment or a profile.")
    return MachineError(f"{url}: the network or the store failed: {kind}: {reason}")


def _no_ranges(url: str) -> InputError:
    return InputError(f"{url}: the server does not support range requests. Download the file and pass its path.")
