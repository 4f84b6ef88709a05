"""`make fuzz`: mutated inputs of every kind, and processes killed at work. Counts are printed and written as JSON.

`python -m tests.fuzz --only recipe:17` runs one case again and shows what it did.
"""

from __future__ import annotations

import os

# Before anything is imported that reads them: no case may ask the Hub, and two processes share the cores.
os.environ.update(
    {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
)
os.environ.setdefault("MPLBACKEND", "agg")

import argparse
import datetime
import json
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gradmerge._version import __version__

from .inputs import CHUNK, Chunk, cases_of, counts_of, run_inputs
from .kills import run_kills
from .kinds import KINDS
from .trial import GOOD, MOST_MEMORY, MOST_SECONDS, OUTCOMES, run_case


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Mutated inputs and killed processes.")
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="mutated inputs in all")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="processes to kill")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--kinds", metavar="A,B", help="only these kinds of input and of killed commands")
    parser.add_argument("--only", metavar="KIND:NUMBER", help="run one case, and show what it did")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the counts there")
    parser.add_argument(
        "--failures", type=Path, default=Path("fuzz-failures"), metavar="DIR", help="where failing inputs go"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="gradmerge-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        if given.only:
            return show_case(given.only, given.seed, root)
        return run_all(given, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def run_all(given: argparse.Namespace, root: Path) -> int:
    chosen = given.kinds.split(",") if given.kinds else list(KINDS)
    begun = time.monotonic()
    results = run_inputs(chosen, given.inputs, given.seed, given.processes, root, given.failures)
    between = time.monotonic()
    names = given.kinds.split(",") if given.kinds else []
    kills = run_kills(names, given.kills, given.seed, given.processes, root, given.failures)
    report: dict[str, Any] = {
        "gradmerge": __version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "seed": given.seed,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "limits": {"seconds_per_input": MOST_SECONDS, "bytes_per_input": MOST_MEMORY},
        "seconds": {"inputs": round(between - begun), "kills": round(time.monotonic() - between)},
        "inputs": results,
        "kills": kills,
    }
    report["failures"] = sum(counts[o] for counts in results.values() for o in OUTCOMES if o not in GOOD)
    report["failures"] += sum(row["failures"] for row in kills.values())
    print_table(results, counts_of)
    print_kills(kills)
    kept = f", kept in {given.failures}" if report["failures"] else ""
    print(f"{report['failures']} failures{kept}; {report['seconds']}")
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["failures"] else 0


def print_table(results: dict[str, Any], counts: Any) -> None:
    if not any(row["cases"] for row in results.values()):
        return
    columns = ["cases", *OUTCOMES, "slowest s", "most MB"]
    print(f"{'kind':20}" + "".join(f"{c.rpartition(' ')[0] or c:>10}" for c in columns))
    for name, row in [*results.items(), ("all", counts(results))]:
        print(f"{name:20}" + "".join(f"{row[c]:>10}" for c in columns))


def print_kills(kills: dict[str, Any]) -> None:
    """What was under OUT after a command was killed; `moved` is the old folder, set aside."""
    for number, (name, row) in enumerate(kills.items()):
        if number == 0:
            print(f"\n{'killed':20}" + "".join(f"{what:>13}" for what in row))
        print(f"{name:20}" + "".join(f"{count:>13}" for count in row.values()))


def show_case(which: str, seed: int, root: Path) -> int:
    name, _, number = which.rpartition(":")
    if name not in KINDS:
        print(f"{name}: no such kind; known are {', '.join(KINDS)}", file=sys.stderr)
        return 2
    kind = KINDS[name](root / name)
    first = int(number) // CHUNK * CHUNK
    case = cases_of(kind, Chunk(name, first, CHUNK), seed)[int(number) - first]
    for file, content in [*case.files.items(), *(case.left or {}).items()]:
        print(f"{str(file)!r}: {len(content)} bytes: {content[:2000]!r}")
    print(ascii(case.how))
    result = run_case(kind, case, int(number))
    print(f"{result.outcome} {result.message}\n{result.trace}")
    return 0 if result.outcome in GOOD else 1


if __name__ == "__main__":
    sys.exit(main())
