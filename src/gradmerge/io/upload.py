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
from .atomic_dir import MARK, PARTIAL, are_ours
from .file_system import cache_folder, file_system, protocol_of, retry

#: Files of the local folder that are not uploaded, and those that are uploaded last, in this order.
NOT_SENT, LAST = (MARK, "gradmerge.journal"), ("README.md", "gradmerge.json")
#: Protocols without folders. In other file systems, the folder of a file must exist.
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "hf", "memory", "az", "abfs", "abfss", "adl", "oss", "oci", "r2")


class Upload:
    """The files of one result on their way from a local folder to a URL."""

    def __init__(self, out: Path) -> None:
        url = as_url(out)
        assert url is not None
        if "?" in url or not url.partition("://")[2].strip("/"):
            raise InputError(f"{url}: is not a folder name. Pass a new folder, such as s3://bucket/name.")
        if url.startswith(("http://", "https://")):
            raise InputError(f"{url}: cannot be written to. Pass the address of a store, such as s3://bucket/name.")
        self.url, self.out = url, UrlPath(url)
        self._fs, self._path = file_system(url)
        digest = hashlib.sha256(redact(url).encode()).hexdigest()[:16]
        self.folder = cache_folder() / "out" / digest / f"{self.out.name}{PARTIAL}"
        """Where the files are written. It exists until the result is complete."""
        self.uploaded: set[str] = set()
        """Files that this run uploaded, or the run that it resumes."""
        self._old: set[str] = set()
        """Files at the URL that are removed before the first upload."""
        self._replaces_complete = False
        self._lock = threading.Lock()

    def check_overlap(self, reads: Iterable[Path], inside: Iterable[Path]) -> None:
        """Raise if the URL overlaps an input. It may lie in the inputs in ``inside``."""
        allowed = {url_of(path) for path in inside}
        for path in reads:
            read = url_of(path)
            within = f"{self.url}/".startswith(f"{read}/") and (read == self.url or read not in allowed)
            if read is not None and (within or f"{read}/".startswith(f"{self.url}/")):
                raise InputError(f"{self.url}: overlaps the input {read}. Choose another output.")

    def check_replaceable(self, force: bool, resume: bool) -> None:
        """Raise if the URL holds files that may not be replaced."""
        names = set(self._sizes())
        ours = are_ours({name.partition("/")[0] for name in names})
        was_started_here = self.folder.exists()
        if names and not (ours and force) and not (was_started_here and (force or resume)):
            if ours:
                advice = "or pass force=True to replace it"
            elif was_started_here:
                advice = "or pass resume=True or force=True to finish or replace an unfinished result"
            else:
                advice = "resume an unfinished result on the machine where it was started, or remove the files"
            raise InputError(f"{self.url}: exists already. Choose another output, {advice}.")
        self._old = names if force or ours else set()
        self._replaces_complete = ours

    def resume(self, sizes: dict[str, int]) -> bool:
        """Return whether the URL has all files of these sizes that an earlier run uploaded and deleted."""
        missing = {name for name in sizes if not (self.folder / name).exists()}
        there = {} if self._replaces_complete else self._sizes()
        self.uploaded = {name for name in missing if there.get(name) == sizes[name]}
        self._old -= self.uploaded
        return self.uploaded == missing

    def send(self, name: str) -> None:
        """Upload a complete file and delete the local one. Several threads may send at once."""
        self._put(name)
        (self.folder / name).unlink()

    def finish(self) -> None:
        """Upload the remaining files, gradmerge.json last."""
        local = [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()]
        names = [name for name in local if not name.startswith(NOT_SENT)]
        with ThreadPoolExecutor(4, "gradmerge-upload") as pool:
            list(pool.map(self._put, sorted({*names} - {*LAST})))
        for name in LAST:
            if name in names:
                self._put(name)

    def discard(self) -> None:
        """Remove what was uploaded."""
        self._remove(self.uploaded)

    def _put(self, name: str) -> None:
        with self._lock:
            self._remove(sorted(self._old, key=lambda old: old != "gradmerge.json"))
            self._old = set()
            self.uploaded.add(name)
        path = f"{self._path}/{name}"

        def put() -> None:
            if protocol_of(self._fs) not in OBJECT_STORES:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(self.folder / name), path)

        retry(f"{self.url}/{name}", put)

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of every file at the URL."""

        def find() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                files = self._fs.find(self._path, detail=True)
            except FileNotFoundError:
                return {}
            return {path.removeprefix(self._path).lstrip("/"): info["size"] for path, info in files.items()}

        return retry(self.url, find)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:

            def remove(path: str = f"{self._path}/{name}") -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)

            retry(f"{self.url}/{name}", remove)
