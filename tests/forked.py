"""Processes that need not import torch again: forked off one that has imported it, and has computed nothing."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

# A process as Python begins one: its own folder, environment, arguments and streams; nothing but `gradmerge.merge` and
# the command line is imported yet, so transformers and the Hub's library read the environment that it is given.
SERVER = """
import json, os, signal, sys, traceback
import torch
torch.set_num_threads(1)
import gradmerge, gradmerge.cli
gradmerge.merge

def run(order):
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    streams = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        place = os.open(order[name], os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(place, number)
        streams.append(open(number, "r" if number == 0 else "w", closefd=False, encoding="utf-8"))
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.argv = order["argv"]
    sys.path[0] = ""
    status = 0
    try:
        if order["code"] is None:
            gradmerge.cli.script()
        else:
            exec(compile(order["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in streams[1:]:
        stream.flush()
    os._exit(status)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        run(json.loads(line))
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(status, flush=True)
"""


@cache
def _server() -> subprocess.Popen[str]:
    """One for all tests of this process."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )

    def end() -> None:
        server.communicate(timeout=60)

    atexit.register(end)
    return server


def forked(
    *arguments: str | Path, code: str | None = None, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line with arguments, or a program's code, and wait for its end."""
    server = _server()
    argv: Sequence[str] = ["gradmerge" if code is None else "-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        streams = {"stdin": os.devnull} | {name: str(Path(folder) / name) for name in ("stdout", "stderr")}
        for name in ("stdout", "stderr"):
            Path(streams[name]).touch()
        order = {"argv": argv, "code": code, "cwd": str(cwd or Path.cwd()), "env": dict(env or os.environ), **streams}
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, "the server of processes has died"
        said = [Path(streams[name]).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(argv, int(answer), *said)
