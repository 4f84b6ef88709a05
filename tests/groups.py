"""Several processes as torchrun starts them, but forked from this one: nothing has to be imported again."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Ended(NamedTuple):
    """How one process ended."""

    status: int
    said: str
    """What it wrote to standard output and error."""
    gave: Any
    """What its function returned, if it did."""


def launch(
    count: int, run: Callable[[int], Any], folder: Path, timeout: float = 120, end_others: bool = True
) -> list[Ended]:
    """Call a function with its rank in as many processes; what it returns goes through JSON.

    Like torchrun, end the other processes when one fails, unless ``end_others`` is False.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [_fork(rank, count, port, run, folder) for rank in range(count)]
    deadline = time.monotonic() + timeout
    ended: dict[int, int] = {}
    try:
        while len(ended) < count and time.monotonic() < deadline:
            for rank, pid in enumerate(started):
                if rank not in ended:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        ended[rank] = os.waitstatus_to_exitcode(status)
                        if ended[rank] != 0 and end_others:
                            for other, started_pid in enumerate(started):
                                if other not in ended:
                                    os.kill(started_pid, signal.SIGTERM)
            time.sleep(0.01)
    finally:
        for rank, pid in enumerate(started):
            if rank not in ended:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
    found = []
    for rank in range(count):
        gave = folder / f"{rank}.json"
        value = json.loads(gave.read_text()) if gave.exists() else None
        found.append(Ended(ended.get(rank, -99), (folder / f"{rank}.txt").read_text(), value))
    assert len(ended) == count, f"still running after {timeout} s: {found}"
    return found


def _fork(rank: int, count: int, port: int, run: Callable[[int], Any], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status: Any = 1
    try:
        out = os.open(folder / f"{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        tempfile.tempdir = str(folder)  # what a process that is killed leaves behind
        os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_PORT": str(port)}
        (folder / f"{rank}.json").write_text(json.dumps(run(rank)))
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
