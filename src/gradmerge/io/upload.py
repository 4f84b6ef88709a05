"""Send a result to a URL: write each file locally, upload it, delete the local file.

Object stores have no folders that can be renamed. gradmerge.json is uploaded last: a result without it is incomplete.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import InputError
from ..urls import UrlPath, as_url, redact, url_of
from .atomic_dir import MARK
from .file_system import cache_folder, file_system, protocol_of, retry

#: Files of the local folder that are not uploaded, and the one that is uploaded last.
NOT_SENT, LAST = (MARK, "gradmerge.journal"), "gradmerge.json"
#: Protocols without folders. In other file systems, the folder of a file must exist.
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "hf", "memory", "az", "abfs", "abfss", "adl", "oss", "oci", "r2")


class Upload:
    """The files of one result on their way from a local folder to a URL."""

    def __init__(self, out: Path) -> None:
        url = as_url(out)
        assert url is not None
        if "?" in url or url.startswith(("http://", "https://")) or not url.partition("://")[2].strip("/"):
            raise InputError(f"{url}: cannot be written to. Pass a new folder in a store, such as s3://bucket/name.")
        self.url, self.out = url, UrlPath(url)
        self._fs, self._path = file_system(url)
        digest = hashlib.sha256(redact(url).encode()).hexdigest()[:16]
        self.parent = cache_folder() / "out" / digest
        """The folder in the cache where the result is written."""
        self._sent: set[str] = set()
        self._old: set[str] = set()
        """Files at the URL that are removed before the first upload."""
        self._lock = threading.Lock()

    def check_overlap(self, reads: Iterable[Path], inside: Iterable[Path]) -> None:
        """Raise if the URL overlaps an input. It may lie in the inputs in ``inside``."""
        allowed = {url_of(path) for path in inside}
        for path in reads:
            read = url_of(path)
            within = f"{self.url}/".startswith(f"{read}/") and (read == self.url or read not in allowed)
            if read is not None and (within or f"{read}/".startswith(f"{self.url}/")):
                raise InputError(f"{self.url}: overlaps the input {read}. Choose another output.")

    def names(self) -> set[str]:
        """Return the names of the files at the URL."""

        def find() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return list(self._fs.find(self._path))
            except FileNotFoundError:
                return []

        return {path.removeprefix(self._path).lstrip("/") for path in retry(self.url, find)}

    def replace(self, names: set[str]) -> None:
        """Remove these files before the first upload."""
        self._old = names

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
        self._remove([MARK])

    def discard(self) -> None:
        """Remove what was uploaded."""
        self._remove([*self._sent, MARK])

    def _put(self, folder: Path, name: str) -> None:
        with self._lock:
            self._remove(sorted(self._old, key=lambda old: old != LAST))
            if not self._sent:
                if protocol_of(self._fs) not in OBJECT_STORES:
                    self._fs.makedirs(self._path, exist_ok=True)
                self._fs.pipe_file(f"{self._path}/{MARK}", b"")
            self._old = set()
            self._sent.add(name)
        path = f"{self._path}/{name}"

        def put() -> None:
            if protocol_of(self._fs) not in OBJECT_STORES:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(folder / name), path)

        retry(f"{self.url}/{name}", put)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:

            def remove(path: str = f"{self._path}/{name}") -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)

            retry(f"{self.url}/{name}", remove)
