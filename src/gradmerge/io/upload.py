"""Send a result to a URL: write each file locally, upload it, delete the local file.

Object stores have no folders that can be renamed. gradmerge.json is uploaded last: a result without it is incomplete.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import InputError
from ..urls import UrlPath, redact, url_of
from .atomic_dir import MARK, are_ours
from .remote import cache_folder, file_system, retry

#: Files of the local folder that are not uploaded, and the one that is uploaded last.
NOT_SENT, LAST = (MARK, "gradmerge.journal"), "gradmerge.json"


class Upload:
    """The files of one result on their way from a local folder to a URL."""

    def __init__(self, out: UrlPath) -> None:
        self.url = url = str(out)
        if "?" in url or url.startswith(("http://", "https://")) or not url.partition("://")[2].strip("/"):
            raise InputError(f"{url}: cannot be written to. Pass a new folder in a store, such as s3://bucket/name.")
        self._fs, self._path = file_system(url)
        digest = hashlib.sha256(redact(url).encode()).hexdigest()[:16]
        self.folder = cache_folder() / "out" / f"{digest}-{out.name}"
        """The local folder in the cache that holds the result before the upload."""
        self._started = False
        self._lock = threading.Lock()

    def check(self, reads: Iterable[Path], inside: Iterable[Path], force: bool, resume: bool) -> None:
        """Raise if the URL overlaps an input, unless it lies in one of ``inside``, or holds what must not be replaced.

        Without ``force``, only a result that a killed process left may be replaced, and only with ``resume``.
        """
        allowed = {url_of(path) for path in inside}
        for path in reads:
            read = url_of(path)
            within = f"{self.url}/".startswith(f"{read}/") and (read == self.url or read not in allowed)
            if read is not None and (within or f"{read}/".startswith(f"{self.url}/")):
                raise InputError(f"{self.url}: overlaps the input {read}. Choose another output.")
        names = {path.removeprefix(self._path).strip("/").partition("/")[0] for path in self._find()}
        replaceable = are_ours(names)
        if names and not (replaceable and (force or (resume and MARK in names))):
            advice = "pass force=True to replace it" if replaceable else "remove the files"
            raise InputError(f"{self.url}: exists already. Choose another output, or {advice}.")

    def send(self, folder: Path, name: str) -> None:
        """Upload a complete file of a folder and delete it there. Several threads may send at once."""
        self._put(folder, name)
        (folder / name).unlink()

    def finish(self, folder: Path) -> None:
        """Upload the remaining files of a folder, gradmerge.json last, and remove the mark."""
        local = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        names = {name for name in local if not name.startswith(NOT_SENT)}
        with ThreadPoolExecutor(4, "gradmerge-upload") as pool:
            list(pool.map(lambda name: self._put(folder, name), sorted(names - {LAST})))
        if LAST in names:
            self._put(folder, LAST)
        self._remove(f"{self._path}/{MARK}")

    def discard(self) -> None:
        """Remove what was uploaded."""
        if self._started:
            for path in self._find():
                self._remove(path)

    def _put(self, folder: Path, name: str) -> None:
        with self._lock:
            if not self._started:
                for path in sorted(self._find(), key=lambda path: path != f"{self._path}/{LAST}"):
                    self._remove(path)
                self._retry(MARK, lambda path: self._fs.pipe_file(path, b""))
                self._started = True
        self._retry(name, lambda path: self._fs.put_file(str(folder / name), path))

    def _retry(self, name: str, write: Callable[[str], None]) -> None:
        path = f"{self._path}/{name}"

        def request() -> None:
            if not self._fs.async_impl:  # not an object store, so the folder must exist
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            write(path)

        retry(f"{self.url}/{name}", request)

    def _find(self) -> list[str]:
        """Return the paths of the files at the URL."""

        def find() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return list(self._fs.find(self._path))
            except FileNotFoundError:
                return []

        return retry(self.url, find)

    def _remove(self, path: str) -> None:
        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)

        retry(self.url, remove)
