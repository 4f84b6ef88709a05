"""What the benchmarks share: timed commands and functions, the machine, and reports."""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import multiprocessing
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GIB = 2**30


class RunFailed(Exception):
    """A command ended with an error, or without the output that it should have written."""


@dataclass
class Timed:
    """One run of one command."""

    wall_s: float
    cpu_s: float
    peak_rss_bytes: int
    disk_read_bytes: int
    """Read from the disk and not from the page cache; near 0 if the files were warm."""
    output: str


def timed(program: str, command: Sequence[str], out: Path, cwd: Path | None = None, **environment: str) -> Timed:
    """Run a command that writes a folder anew.

    Linux counts the memory of the process that starts a command towards the peak of the command, so a benchmark
    of memory makes its models in a process of its own (:func:`apart`).
    """
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, cwd=cwd)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        output, errors = stdout.read().decode(), stderr.read().decode()
    if process.returncode != 0:
        raise RunFailed(f"{program} ended with status {process.returncode}: {errors[-2000:].strip()}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Timed(wall, usage.ru_utime + usage.ru_stime, peak, usage.ru_inblock * 512, output)


def seconds(action: Callable[[], Any], device: str = "cpu") -> float:
    """Return how long a function takes, its work on a GPU included."""

    def now() -> float:
        if device != "cpu":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    begun = now()
    action()
    return now() - begun


def in_turn(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure every side once per repeat, in turn, so that noise hits all of them; each returns its seconds."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name, side in sides.items():
            found[name].append(side())
            say(f"repeat {repeat + 1} of {repeats}: {name}: {found[name][-1]:.4f} s")
    return found


def apart(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a process of its own, whose memory is free when it ends."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(function, *arguments).result()
    os.sync()


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def size(folder: Path) -> int:
    """Return the bytes of the weights in a folder."""
    return sum(path.stat().st_size for path in weights(folder))


def warm(folders: Iterable[Path]) -> None:
    """Read weights once, so that the program that comes first does not pay for the disk."""
    buffer = memoryview(bytearray(1 << 20))
    for path in (path for folder in folders for path in weights(folder)):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def compiled() -> None:
    """Write gradmerge's bytecode beside its sources, as pip does; other programs that are timed have theirs."""
    spec = find_spec("gradmerge")
    assert spec is not None and spec.origin is not None
    compileall.compile_dir(Path(spec.origin).parent, quiet=1)


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return the facts of the machine that results depend on."""
    import torch

    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [
            line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if line.startswith("model name")
        ]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name() if device != "cpu" else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of Python, gradmerge and packages; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("gradmerge", "torch", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def mergekit_versions(script: Path | None) -> dict[str, str] | None:
    """Return the versions of mergekit and of its torch, from the environment of its script."""
    if script is None:
        return None
    code = "import json; from importlib.metadata import version as v; "
    code += "print(json.dumps({name: v(name) for name in ('mergekit', 'torch')}))"
    python = [str(script.parent / "python"), "-c", code]
    found: dict[str, str] = json.loads(subprocess.run(python, capture_output=True, check=True, timeout=60).stdout)
    return found


def write_report(path: Path | None, **report: Any) -> None:
    """Write a report as JSON, with the command that made it and the time."""
    command = f"python -m benchmarks.{Path(sys.argv[0]).stem} {shlex.join(sys.argv[1:])}"
    report = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "command": command, **report}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", "utf-8")
        say(f"written to {path}")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal; all columns but the first are aligned to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the module's text and ``--json``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    return parser


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
