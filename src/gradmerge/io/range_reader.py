"""A file at a URL, read by position: in ranges of some megabytes, ahead of those who need them, each of them once.

A merge reads blocks of a third of a megabyte, in the order of the file, from several threads. Here the file is cut into
larger pieces at the bounds of its tensors. A piece is fetched when a byte of it is needed, with the next ones after it
in the background, and forgotten when all of it has been given out.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from ..urls import count_local_copies
from .remote import RemoteFile

#: Bytes of a piece, and of what is fetched first, which holds the header.
PIECE, HEAD = 8 << 20, 1 << 16
#: A read of no more than this, and this far from the last, takes no piece: somebody looks at a sample.
SAMPLE, FAR = 1 << 17, 1 << 20
#: Pieces that are fetched ahead of a read, and at one time; and those of all files that are kept, or six a model.
AHEAD, AT_ONCE, KEPT = 2, 12, 64

_pool = ThreadPoolExecutor(AT_ONCE, "gradmerge-ranges")
_lock = threading.Lock()
_pieces: dict[tuple[RangeReader, int], Future[bytes]] = {}
"""What is fetched or being fetched, by file and number; what was used last comes last."""


class RangeReader:
    """The bytes of one file at a URL. Several threads may read at once."""

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self._head = file.fetch(0, min(HEAD, file.size))
        self._starts = [len(self._head)] if file.size > len(self._head) else []
        self._last = 0
        self._left: dict[int, int] = {}
        """Piece → bytes that have not been given out."""
        self._spent: set[int] = set()
        """Pieces of this pass that are not fetched ahead again, for a thread that is behind the others."""

    def cut(self, starts: Iterable[int]) -> None:
        """Have pieces begin where tensors do: one that is large has pieces of its own, small ones share one."""
        bounds = [len(self._head)]
        for end in (*sorted(starts), self.file.size):
            while end - bounds[-1] >= 2 * PIECE:
                bounds.append(bounds[-1] + PIECE)
            if end - bounds[-1] >= PIECE:
                bounds.append(end)
        self._starts = [start for start in bounds if start < self.file.size]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the file's bytes from ``offset`` on, which must be there."""
        done = 0
        if offset < len(self._head):
            done = min(len(buffer), len(self._head) - offset)
            buffer[:done] = self._head[offset : offset + done]
        last, self._last = self._last, offset + len(buffer)
        if done == 0 and len(buffer) <= SAMPLE and abs(offset - last) > FAR and not self._has(offset, len(buffer)):
            buffer[:] = self.file.fetch(offset, offset + len(buffer))
            return
        while done < len(buffer):
            number = bisect.bisect_right(self._starts, offset + done) - 1
            begin = offset + done - self._starts[number]
            piece = memoryview(self._piece(number))
            part = piece[begin : begin + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            self._given(number, len(part), len(piece))

    def _has(self, offset: int, nbytes: int) -> bool:
        """Whether the pieces of some bytes are here, or on their way."""
        numbers = (bisect.bisect_right(self._starts, place) - 1 for place in (offset, offset + nbytes - 1))
        return all((self, number) in _pieces for number in numbers)

    def will_need(self, offset: int, nbytes: int) -> None:
        """Start to fetch these bytes, or the first of them."""
        if offset + nbytes > len(self._head) and self._starts:
            first = max(0, bisect.bisect_right(self._starts, offset) - 1)
            last = bisect.bisect_right(self._starts, offset + max(nbytes, 1) - 1) - 1
            with _lock:
                self._fetch_ahead(range(first, min(last + 1, first + AHEAD)))

    def close(self) -> None:
        with _lock:
            for key in [key for key in _pieces if key[0] is self]:
                _pieces.pop(key).cancel()

    def _piece(self, number: int) -> bytes:
        with _lock:
            if number in self._spent:  # the next pass
                self._spent.clear()
            found = self._fetch(number)
            self._fetch_ahead(range(number + 1, min(number + 1 + AHEAD, len(self._starts))))
        try:
            return found.result()
        except BaseException:
            with _lock:
                _pieces.pop((self, number), None)  # whoever asks again tries again
            raise

    def _fetch_ahead(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in self._spent:
                self._fetch(number)

    def _fetch(self, number: int) -> Future[bytes]:
        """The piece, on its way at least; the lock is held."""
        key = self, number
        found = _pieces.pop(key, None)
        if found is None or found.cancelled():
            stop = self._starts[number + 1] if number + 1 < len(self._starts) else self.file.size
            found = _pool.submit(self.file.fetch, self._starts[number], stop)
            self._left[number] = stop - self._starts[number]
            most = max(KEPT, 6 * count_local_copies())
            for old in [old for old, one in _pieces.items() if one.done()][: max(0, len(_pieces) + 1 - most)]:
                del _pieces[old]
        _pieces[key] = found
        return found

    def _given(self, number: int, nbytes: int, whole: int) -> None:
        """Count what was given out of a piece, and forget it when that is all of it."""
        with _lock, contextlib.suppress(KeyError):
            self._left[number] -= nbytes
            if self._left[number] <= 0:
                self._left[number] = whole
                self._spent.add(number)
                _pieces.pop((self, number), None)
