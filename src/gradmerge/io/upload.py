"""Send a result to a URL: write each file locally, upload it, delete the local file.

Object stores have no folders that can be renamed. A result at a URL is complete when gradmerge.json exists, which is
sent last, and the object `gradmerge.unfinished`, which is written first, is gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import InputError
from ..urls import UrlPath, as_url, url_of
from .atomic_dir import MARK, are_ours
from .remote import cache_folder, file_system, protocol_of, retry

UNFINISHED = "gradmerge.unfinished"
#: Files of a staged folder that are not sent, and those that are sent last, in this order.
NOT_SENT, LAST = (MARK, "gradmerge.journal"), ("README.md", "gradmerge.json")
#: Protocols without folders. In other file systems, the folder of a file must exist.
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "hf", "memory", "az", "abfs", "abfss", "adl", "oss", "oci", "r2")


class Upload:
    """The files of one result on their way from a staged folder to a URL."""

    def __init__(self, out: Path) -> None:
        url = as_url(out)
        assert url is not None
        if "?" in url or not url.partition("://")[2].strip("/"):
            raise InputError(f"{url}: is not a folder name. Pass a new folder, such as s3://bucket/name.")
        if url.startswith(("http://", "https://")):
            raise InputError(f"{url}: cannot be written to. Pass the address of a store, such as s3://bucket/name.")
        self.url, self.out = url, UrlPath(url)
        self._fs, self._path = file_system(url)
        self.local = self._folder = (
            cache_folder() / "out" / hashlib.sha256(url.encode()).hexdigest()[:16] / self.out.name
        )
        """Where the result is staged, without the suffix of staged folders."""
        self.sent: set[str] = set()
        """Files that were sent, by this run or by the run that it resumes."""
        self._old: set[str] = set()
        """Files of an older result at the URL. They are removed before the first file is sent."""
        self._reserved = False
        self._lock = threading.Lock()

    def check_overlap(self, reads: Iterable[Path], inside: Iterable[Path]) -> None:
        """Raise if the URL overlaps an input. It may lie in the inputs in ``inside``."""
        allowed = {url_of(path) for path in inside}
        for path in reads:
            read = url_of(path)
            within = f"{self.url}/".startswith(f"{read}/") and (read == self.url or read not in allowed)
            if read is not None and (within or f"{read}/".startswith(f"{self.url}/")):
                raise InputError(f"{self.url}: overlaps the input {read}. Choose another output.")

    def check_replaceable(self, folder: Path, force: bool, resume: bool) -> None:
        """Raise if the URL holds files that may not be replaced. ``folder`` is where the result is staged."""
        self._folder = folder
        names = set(self._sizes())
        ours = are_ours({name.partition("/")[0] for name in names})
        unfinished = UNFINISHED in names
        if unfinished and not force and not (resume and folder.exists()):
            raise InputError(
                f"{self.url}: contains an unfinished result, or another process is writing to it. Resume it on the "
                "machine where it was started (resume=True), choose another output, or pass force=True to replace it."
            )
        if names and not unfinished and not force:
            raise InputError(f"{self.url}: exists already. Choose another output, or pass force=True to replace it.")
        if names and not unfinished and not ours:
            raise InputError(
                f"{self.url}: was not written by gradmerge, so force=True does not replace it. Choose another output, "
                "or remove the files yourself."
            )
        # A resumed run keeps what the earlier run sent, unless a complete old result is still there.
        self._old = names - {UNFINISHED} if force or ours else set()

    def reserve(self) -> None:
        """Mark the URL as unfinished. This fails early if it cannot be written to."""
        path = f"{self._path}/{UNFINISHED}"

        def put() -> None:
            self._make_folder(path)
            self._fs.pipe_file(path, b"gradmerge is writing here\n")

        retry(self.url, put)
        self._reserved = True

    def resume(self, sizes: dict[str, int]) -> bool:
        """Note the files of these sizes that an earlier run sent and deleted. Return False if one has disappeared."""
        missing = {name for name in sizes if not (self._folder / name).exists()}
        there = self._sizes()
        self.sent = {name for name in missing if there.get(name) == sizes[name]}
        self._old -= self.sent
        return self.sent == missing

    def send(self, name: str) -> None:
        """Send a complete file and delete the local one. Several threads may send at once."""
        self._put(name)
        (self._folder / name).unlink()

    def finish(self) -> None:
        """Send the remaining files, gradmerge.json last."""
        local = [path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file()]
        names = [name for name in local if not name.startswith(NOT_SENT)]
        with ThreadPoolExecutor(4, "gradmerge-upload") as pool:
            list(pool.map(self._put, sorted({*names} - {*LAST})))
        for name in LAST:
            if name in names:
                self._put(name)
        self._remove([UNFINISHED])

    def discard(self) -> None:
        """Remove what was sent."""
        if self._reserved:
            self._remove([*self.sent, UNFINISHED])

    def _put(self, name: str) -> None:
        with self._lock:
            self._remove(sorted(self._old, key=lambda old: old not in LAST))
            self._old = set()
            self.sent.add(name)
        path = f"{self._path}/{name}"

        def put() -> None:
            self._make_folder(path)
            self._fs.put_file(str(self._folder / name), path)

        retry(f"{self.url}/{name}", put)

    def _sizes(self) -> dict[str, int]:
        """Return the files at the URL by name."""

        def find() -> dict[str, int]:
            self._fs.invalidate_cache()
            try:
                files = self._fs.find(self._path, detail=True)
            except FileNotFoundError:
                return {}
            return {path.removeprefix(self._path).lstrip("/"): info["size"] for path, info in files.items()}

        return retry(self.url, find)

    def _make_folder(self, path: str) -> None:
        if protocol_of(self._fs) not in OBJECT_STORES:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:

            def remove(path: str = f"{self._path}/{name}") -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)

            retry(f"{self.url}/{name}", remove)
