"""Keeping freed memory for the next block."""

from __future__ import annotations

import ctypes
import functools
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@functools.cache
def keep_freed_memory() -> None:
    """Tell glibc to reuse freed blocks instead of returning them to the system.

    By default an allocation of a megabyte is mapped anew every time, and the page faults cost several times as much as
    the arithmetic. Elsewhere than on glibc this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 28)
    mallopt(_M_TRIM_THRESHOLD, 1 << 28)
