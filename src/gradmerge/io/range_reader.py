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
"""Pieces by file and first byte, the least recently used first."""


class RangeReader:
    """Random access to one remote file. Several threads may read at once."""

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        self._head = file.fetch(0, min(HEAD, file.size))
        self._last = 0

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the bytes from ``offset`` on."""
        done = min(len(buffer), max(0, len(self._head) - offset))
        buffer[:done] = self._head[offset : offset + done]
        jumps = abs(offset - self._last) > JUMP
        self._last = offset + len(buffer)
        if jumps and done == 0 and len(buffer) <= SAMPLE and (self, self._start_of(offset)) not in _pieces:
            buffer[:] = self.file.fetch(offset, offset + len(buffer))
            return
        while done < len(buffer):
            start = self._start_of(offset + done)
            part = memoryview(self._piece(start))[offset + done - start :][: len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def close(self) -> None:
        with _lock:
            for key in [key for key in _pieces if key[0] is self]:
                _pieces.pop(key).cancel()

    def _start_of(self, offset: int) -> int:
        """Return the first byte of the piece with a byte."""
        return offset - (offset - len(self._head)) % PIECE

    def _piece(self, start: int) -> bytes:
        with _lock:
            piece = self._request(start)
            for following in range(start + PIECE, min(start + (1 + AHEAD) * PIECE, self.file.size), PIECE):
                self._request(following)
            excess = len(_pieces) - max(MIN_PIECES, PIECES_PER_COPY * count_local_copies())
            for key in [key for key, other in _pieces.items() if other.done()][: max(0, excess)]:
                del _pieces[key]
        try:
            return piece.result()
        except BaseException:
            with _lock:
                _pieces.pop((self, start), None)  # the next read tries again
            raise

    def _request(self, start: int) -> Future[bytes]:
        """Return a piece, and mark it as recently used. Requires the lock."""
        piece = _pieces.pop((self, start), None)
        if piece is None or piece.cancelled():
            piece = _pool.submit(self.file.fetch, start, min(start + PIECE, self.file.size))
        _pieces[self, start] = piece
        return piece
