"""Runs the cases in processes of their own: one that crashes or hangs for good is counted and replaced."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import random
import re
import resource
import signal
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers  # noqa: F401 - some cases need it, and importing it takes longer than a case may

from .kinds import KINDS
from .mutate import generate
from .trial import CRASH, GOOD, HANG, OUTCOMES, Case, Kind, Result, run_case

#: Seconds after which a process that does not answer is killed: it hangs where no signal is heard.
PATIENCE = 120.0
#: Address space that a process may take beyond what it begins with, so that a bomb ends the case and not the machine.
ROOM = 8 << 30
CHUNK = 50
#: Failures of a kind that are kept as files; one mistake may be met a thousand times.
MOST_KEPT = 30

_context = multiprocessing.get_context("fork")


class Chunk(NamedTuple):
    """Cases of a kind that are generated together: those with numbers from ``first`` on, of which ``done`` are run."""

    kind: str
    first: int
    size: int
    done: int = 0


def cases_of(kind: Kind, chunk: Chunk, seed: int) -> list[Case]:
    with contextlib.chdir(kind.place.inputs):
        return generate(kind.cases(), chunk.size, f"{seed}/{chunk.kind}/{chunk.first}")


class Worker:
    """A process and the cases that it was given."""

    def __init__(self, root: Path, seed: int) -> None:
        self.chunk: Chunk | None = None
        self.since = 0.0
        self.connection, other = _context.Pipe()
        self.process = _context.Process(target=self._work, args=(other, root, seed), daemon=True)
        self.process.start()
        other.close()

    def give(self, chunk: Chunk | None) -> None:
        self.chunk, self.since = chunk, time.monotonic()
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
            if chunk.kind not in kinds:
                kinds[chunk.kind] = KINDS[chunk.kind](root / str(os.getpid()) / chunk.kind)
                run_case(kinds[chunk.kind])  # what comes with the first case of a process is not a case's doing
                connection.send(run_case(kinds[chunk.kind]))
            cases = cases_of(kinds[chunk.kind], chunk, seed)
            for place in range(chunk.done, len(cases)):
                connection.send(run_case(kinds[chunk.kind], cases[place], chunk.first + place))
            connection.send(None)


def run_inputs(
    names: list[str], total: int, seed: int, processes: int, root: Path, failures: Path
) -> dict[str, dict[str, Any]]:
    """Counts by kind."""
    chunks = _chunks(names, total, seed)
    results = {n: dict.fromkeys(["cases", *OUTCOMES, "slowest s", "slowest", "most MB"], 0) for n in names}
    workers: list[Worker] = []
    last = time.monotonic()

    def hand_out(worker: Worker) -> None:
        worker.give(chunks.pop() if chunks else None)
        if worker.chunk is None:
            workers.remove(worker)
            worker.process.join()

    def count(result: Result) -> None:
        row: dict[str, Any] = results[result.kind]
        row["cases"] += 1
        row[result.outcome] += 1
        if result.seconds > row["slowest s"]:
            row["slowest s"], row["slowest"] = round(result.seconds, 2), result.number
        row["most MB"] = max(row["most MB"], result.memory // 1_000_000)
        if result.outcome not in GOOD:
            keep(result, failures, sum(row[o] for o in OUTCOMES if o not in GOOD))

    for _ in range(processes if total else 0):
        workers.append(Worker(root, seed))
        hand_out(workers[-1])
    while workers:
        ready = wait([worker.connection for worker in workers], timeout=5)
        for worker in list(workers):
            chunk, result = worker.chunk, None
            assert chunk is not None
            ended = ""
            if worker.connection in ready:
                try:
                    result = worker.connection.recv()
                except EOFError:
                    ended = CRASH
            elif time.monotonic() - worker.since > PATIENCE:
                worker.process.kill()
                ended = HANG
            else:
                continue
            worker.since = time.monotonic()
            if ended:
                worker.process.join()
                number = chunk.first + chunk.done
                count(Result(chunk.kind, number, ended, f"exit code {worker.process.exitcode}"))
                workers[workers.index(worker)] = fresh = Worker(root, seed)
                fresh.give(chunk._replace(done=chunk.done + 1))
            elif result is None:
                hand_out(worker)
            elif result.number >= 0:
                worker.chunk = chunk._replace(done=result.number - chunk.first + 1)
                count(result)
            elif result.outcome != GOOD[0]:  # were the valid inputs refused, nothing would be tried
                raise SystemExit(f"{chunk.kind}: the valid inputs do not work: {result.message}\n{result.trace}")
        if time.monotonic() - last > 30:
            last = time.monotonic()
            print(f"{sum(row['cases'] for row in results.values())} of {total} inputs", flush=True)
    return results


def _chunks(names: list[str], total: int, seed: int) -> list[Chunk]:
    """Cases by kind, in proportion to the shares, in some order."""
    whole = sum(KINDS[name].share for name in names)
    counts = {name: max(1, round(total * KINDS[name].share / whole)) for name in names}
    chunks = [Chunk(n, i, min(CHUNK, count - i)) for n, count in counts.items() for i in range(0, count, CHUNK)]
    random.Random(seed).shuffle(chunks)
    return chunks


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
