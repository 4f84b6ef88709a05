"""Runs the cases in processes of their own: one that crashes or hangs for good is counted and replaced."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import re
import resource
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from .kinds import KINDS
from .trial import CRASH, GOOD, HANG, OUTCOMES, Kind, Result, run_case

#: Seconds after which a process that does not answer is killed: it hangs where no signal is heard.
PATIENCE = 120.0
#: Address space that a process may take beyond what it begins with, so that a bomb ends the case and not the machine.
ROOM = 8 << 30
CHUNK = 50
#: Failures of a kind that are kept as files; one mistake may be met a thousand times.
MOST_KEPT = 30

_context = multiprocessing.get_context("fork")


class Worker:
    """A process, the cases that it was given, and the one that it is at."""

    def __init__(self, root: Path, seed: int) -> None:
        self.at = _context.Value("i", -2, lock=False)
        self.since = _context.Value("d", 0.0, lock=False)
        self.connection, other = _context.Pipe()
        self.process = _context.Process(target=self._work, args=(other, root, seed), daemon=True)
        self.process.start()
        other.close()
        self.chunk: tuple[str, int, int] | None = None

    def give(self, chunk: tuple[str, int, int] | None) -> None:
        self.chunk = chunk
        self.at.value, self.since.value = -2, time.monotonic()
        self.connection.send(chunk)

    def _work(self, connection: Connection, root: Path, seed: int) -> None:
        torch.set_num_threads(1)
        faulthandler.disable()  # a crash is counted, and found again by its number
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Path("/proc/self/statm").open() as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
        kinds: dict[str, Kind] = {}
        while (chunk := connection.recv()) is not None:
            name, start, stop = chunk
            if name not in kinds:
                kinds[name] = KINDS[name](root / str(os.getpid()) / name)
                connection.send(_valid(kinds[name], seed))
            for number in range(start, stop):
                self.at.value, self.since.value = number, time.monotonic()
                connection.send(run_case(kinds[name], number, seed))
            connection.send(None)


def _valid(kind: Kind, seed: int) -> Result:
    """The inputs as they are: were they refused, so would be every case, and nothing be tried."""
    run_case(kind, -1, seed)  # what comes with the first case of a process is not a case's doing
    return run_case(kind, -1, seed)


def run_inputs(
    names: list[str], total: int, seed: int, processes: int, root: Path, failures: Path
) -> dict[str, dict[str, Any]]:
    """Counts by kind."""
    chunks = _chunks(names, total, seed)
    results: dict[str, dict[str, Any]] = {
        n: dict.fromkeys(["cases", *OUTCOMES, "slowest s", "slowest", "most MB"], 0) for n in names
    }
    workers: list[Worker] = []
    last = time.monotonic()
    done = 0

    def hand_out(worker: Worker) -> None:
        chunk = next(chunks, None)
        worker.give(chunk)
        if chunk is None:
            workers.remove(worker)
            worker.process.join()

    def count(result: Result) -> None:
        nonlocal done, last
        row = results[result.kind]
        done += 1
        row["cases"] += 1
        row[result.outcome] += 1
        if result.seconds > row["slowest s"]:
            row["slowest s"], row["slowest"] = round(result.seconds, 2), result.number
        row["most MB"] = max(row["most MB"], result.memory // 1_000_000)
        if result.outcome not in GOOD:
            keep(result, failures, sum(row[o] for o in OUTCOMES if o not in GOOD))
        if time.monotonic() - last > 30:
            last = time.monotonic()
            print(f"{done} of {total} inputs", flush=True)

    for _ in range(processes if total else 0):
        workers.append(Worker(root, seed))
        hand_out(workers[-1])
    while workers:
        ready = wait([worker.connection for worker in workers], timeout=5)
        for worker in list(workers):
            assert worker.chunk is not None
            name, start, stop = worker.chunk
            if worker.connection in ready:
                try:
                    result = worker.connection.recv()
                except EOFError:
                    result = CRASH
            elif time.monotonic() - worker.since.value > PATIENCE:
                worker.process.kill()
                result = HANG
            else:
                continue
            if result is None:
                hand_out(worker)
            elif isinstance(result, Result) and result.number < 0:
                if result.outcome != GOOD[0]:
                    raise SystemExit(f"{name}: the valid inputs do not work: {result.message}\n{result.trace}")
            elif isinstance(result, Result):
                count(result)
            else:
                worker.process.join()
                at = max(worker.at.value, start)
                count(Result(name, at, result, f"exit code {worker.process.exitcode}"))
                workers[workers.index(worker)] = fresh = Worker(root, seed)
                fresh.give((name, at + 1, stop))
    return results


def _chunks(names: list[str], total: int, seed: int) -> Iterator[tuple[str, int, int]]:
    """Numbers of cases by kind, in proportion to the shares, in some order."""
    whole = sum(KINDS[name].share for name in names)
    chunks = []
    for name in names:
        cases = max(1, round(total * KINDS[name].share / whole))
        chunks += [(name, start, min(start + CHUNK, cases)) for start in range(0, cases, CHUNK)]
    random.Random(seed).shuffle(chunks)
    return iter(chunks)


def keep(result: Result, failures: Path, so_far: int) -> None:
    """Print a failure, and keep its files."""
    if so_far > MOST_KEPT:
        return
    print(f"{result.kind}:{result.number}: {result.outcome}: {result.message[:200]!a}", flush=True)
    folder = failures / f"{result.kind}-{result.number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "what.txt").write_text(f"{result.outcome}\n{result.message!a}\n{result.trace}", errors="backslashreplace")
    for name, content in result.files.items():
        (folder / re.sub(r"[^\w.-]", "_", name)).write_bytes(content)


def counts_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The row of all kinds together."""
    rows = list(results.values())
    return {key: (max if key in ("slowest s", "most MB") else sum)(row[key] for row in rows) for key in rows[0]}
