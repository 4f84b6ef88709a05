"""A process that kills itself before a change that it makes on disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


def kill_before_change(out: str, at: int | None) -> Callable[[], int]:
    """Count this process's changes in the folder of ``out``, and kill it before the ``at``-th; returns a counter."""
    seen, folder = 0, os.path.dirname(out)  # noqa: PTH120 - inside a hook, nothing that opens files

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event not in CHANGES and not writes:
            return
        if isinstance(arguments[0], int) or str(arguments[0]).startswith(folder) or out in str(arguments[0]):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(listen)
    return lambda: seen
