"""Read a file at a URL by position.

A merge reads small blocks in the order of the file, from several threads. RangeReader downloads pieces of some
megabytes, the next ones in the background, and keeps the most recent pieces of all files.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from ..urls import count_local_copies
from .remote import RemoteFile

#: Bytes of a piece, and of the first download, which contains the header.
PIECE, HEAD = 8 << 20, 1 << 16
#: A read of at most SAMPLE bytes at least JUMP bytes after the last one downloads only these bytes.
SAMPLE, JUMP = 1 << 17, 1 << 20
#: Pieces downloaded ahead of a read, and at the same time.
AHEAD, PARALLEL = 2, 12
#: Pieces of all files kept in memory: at least MIN_PIECES, or PIECES_PER_COPY for each model.
MIN_PIECES, PIECES_PER_COPY = 24, 6

_pool = ThreadPoolExecutor(PARALLEL, "gradmerge-ranges")
_lock = threading.Lock()
_pieces: dict[tuple[RangeReader, int], Future[bytes]] = {}
"""Pieces by file and number, the least recently used first."""


class RangeReader:
    """Random access to one remote file. Several threads may read at once."""

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self._head = file.fetch(0, min(HEAD, file.size))
        self._count = -(-(file.size - len(self._head)) // PIECE)
        self._last = 0

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the bytes from ``offset`` on."""
        done = min(len(buffer), max(0, len(self._head) - offset))
        buffer[:done] = self._head[offset : offset + done]
        jumps = abs(offset - self._last) > JUMP
        self._last = offset + len(buffer)
        if jumps and done == 0 and len(buffer) <= SAMPLE and (self, self._number(offset)) not in _pieces:
            buffer[:] = self.file.fetch(offset, offset + len(buffer))
            return
        while done < len(buffer):
            number = self._number(offset + done)
            begin = offset + done - self._start(number)
            part = memoryview(self._piece(number))[begin : begin + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def will_need(self, offset: int) -> None:
        """Start to download the bytes at ``offset`` in the background."""
        if offset >= len(self._head):
            with _lock:
                self._request(self._number(offset))

    def close(self) -> None:
        with _lock:
            for key in [key for key in _pieces if key[0] is self]:
                _pieces.pop(key).cancel()

    def _number(self, offset: int) -> int:
        return (offset - len(self._head)) // PIECE

    def _start(self, number: int) -> int:
        return len(self._head) + number * PIECE

    def _piece(self, number: int) -> bytes:
        with _lock:
            piece = self._request(number)
            for following in range(number + 1, min(number + 1 + AHEAD, self._count)):
                self._request(following)
            excess = len(_pieces) - max(MIN_PIECES, PIECES_PER_COPY * count_local_copies())
            for key in [key for key, other in _pieces.items() if other.done()][: max(0, excess)]:
                del _pieces[key]
        try:
            return piece.result()
        except BaseException:
            with _lock:
                _pieces.pop((self, number), None)  # the next read tries again
            raise

    def _request(self, number: int) -> Future[bytes]:
        """Return a piece, and mark it as recently used. Requires the lock."""
        piece = _pieces.pop((self, number), None)
        if piece is None or piece.cancelled():
            stop = min(self._start(number + 1), self.file.size)
            piece = _pool.submit(self.file.fetch, self._start(number), stop)
        _pieces[self, number] = piece
        return piece
