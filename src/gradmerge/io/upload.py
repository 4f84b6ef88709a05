"""A result at a URL: staged on this machine, sent file by file, complete when its record is there.

An object store has no folders that could be renamed, but an object appears whole or not at all. So a file is sent when
it is complete, weights first and the record last. Until then an object beside them says that the result is unfinished.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import GradmergeError, InputError, MachineError
from ..text import some
from ..urls import UrlPath, as_url
from .atomic_dir import MARK, SENT
from .download import cache_folder
from .remote import file_system, protocol_of, retry, url_of

#: The object that lies beside a result until that is complete.
UNFINISHED = "gradmerge.unfinished"
#: What of a staged folder is not sent, and what is sent last, in this order.
KEPT_HERE, LAST = (SENT, MARK, "gradmerge.journal"), ("README.md", "gradmerge.json")
#: Protocols whose objects appear whole. Elsewhere a file is sent under another name, and renamed.
ATOMIC = ("s3", "s3a", "gs", "gcs", "hf", "memory", "az", "abfs", "abfss", "adl", "oss", "oci", "r2")
#: Files on their way, or waiting to be sent, at a time.
WAITING = 3


class Upload:
    """Files that go to a URL from the folder in which a result is staged."""

    def __init__(self, out: Path) -> None:
        url = as_url(out)
        assert url is not None
        if "?" in url or not url.partition("://")[2].strip("/"):
            raise InputError(f"{url}: not a place to write to; name a new folder, as s3://bucket/name")
        if url.startswith(("http://", "https://")):
            raise InputError(f"{url}: cannot be written to; give the address of a store, such as s3://bucket/name")
        self.url, self.out = url, UrlPath(url)
        self._fs, self._path = file_system(url)
        self._atomic = protocol_of(self._fs) in ATOMIC
        self.beside = cache_folder() / "out" / hashlib.sha256(url.encode()).hexdigest()[:16] / self.out.name
        """Where the result is staged on this machine."""
        self.sent: dict[str, int] = {}
        """Name → bytes of what is at the URL already."""
        self._stale: set[str] = set()
        """What was sent in an earlier run, which may have been of another merge."""
        self._replaced: set[str] = set()
        """What lay at the URL before, and goes in the end."""
        self._reserved = self._begun = False
        self._folder = self.beside
        self._pool = ThreadPoolExecutor(2, "gradmerge-send")
        self._room = threading.Semaphore(WAITING)
        self._under_way: list[Future[None]] = []
        self._lock = threading.Lock()

    def check(self, reads: Iterable[Path], inside: Iterable[Path] = ()) -> None:
        """Stop if the result would replace something that is read, or become part of it, but for those ``inside``."""
        fine = {url_of(path) for path in inside}
        for path in reads:
            read = url_of(path)
            lies_in = f"{self.url}/".startswith(f"{read}/") and (read == self.url or read not in fine)
            if read is not None and (lies_in or f"{read}/".startswith(f"{self.url}/")):
                raise InputError(f"{self.url}: is, holds or lies in {read}, which is read. Choose another place.")

    def names(self) -> list[str]:
        """What lies at the URL, by the names below it."""

        def ask() -> list[str]:
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._path)
            except FileNotFoundError:
                return []
            return [name.removeprefix(self._path).lstrip("/") for name in found]

        return retry(self.url, "listing", ask)

    def check_replaceable(self, force: bool, folder: Path, ours: Any) -> None:
        """Stop if there is something at the URL that may not be replaced, or that cannot be told."""
        self._folder = folder
        with contextlib.suppress(OSError, ValueError, KeyError):
            noted = json.loads((folder / SENT).read_text())
            self.sent, self._stale, self._replaced = dict(noted["sent"]), *map(set, (noted["stale"], noted["replaced"]))
        found = self.names()
        unfinished = UNFINISHED in found
        others = set(found) - {*self.sent, *self._stale, *self._replaced, UNFINISHED}
        if unfinished and not (folder / SENT).exists() and not force:
            raise InputError(
                f"{self.url}: holds an unfinished result, or one that another process is writing. Go on with it where "
                "it was begun (--resume), choose another place, or pass --force to replace it."
            )
        if others and not force:
            raise InputError(f"{self.url}: exists already. Choose another place, or pass --force to replace it.")
        if others and not unfinished and not ours({name.partition("/")[0] for name in others}):
            raise InputError(
                f"{self.url}: was not written by gradmerge, and --force replaces only what was. Choose another place, "
                "or, if all that it holds may go, remove it yourself first."
            )
        self._replaced |= others

    def is_there(self, names: Collection[str]) -> bool:
        """Whether what was sent of these files in an earlier run is still there."""
        return all(self._size(name) == nbytes for name, nbytes in self.sent.items() if name in names)

    def forget(self) -> None:
        """Start over: what an earlier run has sent is written anew, or removed."""
        self._stale |= self.sent.keys()
        self.sent = {}
        self._note()

    def send(self, name: str) -> None:
        """Send a complete file of the staged folder in the background, and remove it there; waits if others are due."""
        self._room.acquire()
        with self._lock:
            self._under_way = [one for one in self._under_way if not one.done() or one.exception() is not None]
            failed = next((one for one in self._under_way if one.done()), None)
            if failed is not None:
                self._room.release()
                failed.result()
            self._under_way.append(self._pool.submit(self._send, name, keep=False))

    def _send(self, name: str, keep: bool) -> None:
        """In a thread of the pool: send a staged file, and delete it here unless it is kept."""
        try:
            self.send_file(self._folder / name, name)
            if not keep:
                (self._folder / name).unlink()
        finally:
            self._room.release()

    def send_file(self, path: Path, name: str) -> None:
        """Put a file at the URL under a name: whole, and with the size that it has here."""
        self._begin()
        nbytes = path.stat().st_size
        target = f"{self._path}/{name}"
        place = target if self._atomic else target + ".gradmerge-partial"

        def put() -> None:
            self._make_folder(target)
            self._fs.put_file(str(path), place)
            if not self._atomic:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(target)
                self._fs.mv(place, target)

        retry(f"{self.url}/{name}", "sending", put)
        if (there := self._size(name)) != nbytes:
            raise MachineError(f"{self.url}/{name}: {there} bytes arrived of {nbytes}. Run again.")
        with self._lock:
            self.sent[name] = nbytes
            self._note()

    def _make_folder(self, target: str) -> None:
        if not self._atomic:  # such file systems have folders, which must be there
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)

    def _note(self) -> None:
        partial = self._folder / f"{SENT}.new"
        noted = {"sent": self.sent, "stale": sorted(self._stale), "replaced": sorted(self._replaced)}
        partial.write_text(json.dumps(noted))
        partial.replace(self._folder / SENT)

    def _size(self, name: str) -> int | None:
        def ask() -> int | None:
            self._fs.invalidate_cache()
            try:
                return int(self._fs.info(f"{self._path}/{name}")["size"])
            except FileNotFoundError:
                return None

        return retry(f"{self.url}/{name}", "its size", ask)

    def reserve(self) -> None:
        """Say that the result is unfinished; fails before any work is done if nothing can be written there."""
        self._note()  # before, so that the mark is known for our own after a kill
        mark = f"{self._path}/{UNFINISHED}"

        def put() -> None:
            self._make_folder(mark)
            self._fs.pipe_file(mark, b"gradmerge is writing here\n")

        retry(self.url, "writing", put)
        self._reserved = True

    def _begin(self) -> None:
        """Take away the record of the result that is replaced, if there is one: from now on it is a mixture."""
        with self._lock:
            if not self._begun:
                self._remove([name for name in LAST if name in self._replaced | self._stale])
                self._begun = True

    def finish(self) -> None:
        """Send all that is left, the record last, and remove what does not belong to the result."""
        self.wait()
        left = [path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file()]
        left = [name for name in left if not name.startswith(KEPT_HERE)]
        order = sorted(left, key=lambda name: (LAST.index(name) if name in LAST else -1, "safetensors" not in name))
        early, late = (part for part in ([n for n in order if n not in LAST], [n for n in order if n in LAST]))
        for name in early:
            self._room.acquire()
            self._under_way.append(self._pool.submit(self._send, name, keep=True))
        self.wait()
        self._remove(sorted((self._replaced | self._stale) - {*left, *self.sent, *LAST}))
        for name in late:
            self.send_file(self._folder / name, name)
        self._remove([UNFINISHED])
        self._pool.shutdown()

    def wait(self) -> None:
        """Wait for what is on its way; raise what went wrong with it."""
        under_way, self._under_way = self._under_way, []
        errors = [error for one in under_way if (error := one.exception()) is not None]
        if errors:
            raise errors[0]

    def discard(self) -> None:
        """Take back what was sent."""
        with contextlib.suppress(GradmergeError):
            self.wait()
        with contextlib.suppress(GradmergeError):
            if self.sent or self._reserved or self._stale:
                self._remove([*self.sent, *self._stale, UNFINISHED])
        self._pool.shutdown()

    def leave(self) -> None:
        """Let what is on its way arrive, for a later run to go on from."""
        with contextlib.suppress(GradmergeError):
            self.wait()
        self._pool.shutdown()

    def _remove(self, names: Sequence[str]) -> None:
        def ask() -> None:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(f"{self._path}/{name}")

        if names:
            retry(self.url, f"removing {some(names, 3)}", ask)
