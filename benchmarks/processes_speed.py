"""Two processes against one, one thread each: the same rows by `gradmerge curvature estimate`, and under torchrun.

    python -m benchmarks.processes_speed --parameters 0.05e9 --rows 96 --repeats 3

A Llama with random weights is made in a folder that is removed at the end. One process and two take turns, so that
noise hits both; the median counts. `seconds` is what the command says of itself, with loading the model; `wall` has
the start of Python, and of torchrun, in it. Every result is compared with that of one process. Speed never decides the
exit status; a result that differs by more than rounding does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .processes import RESULTS, WORDS, differs, make_model

KINDS = ("diagonal", "kronecker")
TOKENS = 64
#: Sums of float32 in another order differ by about this, relative to a tensor's largest entry.
ROUNDING = 1e-4


def timed(place: Path, processes: int, kind: str) -> dict[str, float]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    words = ["curvature", "estimate", "model", "--data", "rows.txt", "--kind", kind, "-o", f"{kind}-{processes}"]
    command = [*(launcher if processes > 1 else [sys.executable]), "-m", "gradmerge", *words]
    command += ["--device", "cpu", "--batch-size", "8", "--force", "--json"]
    begun = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, env=environment)
    wall = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{kind}, {processes} processes: {done.stderr[-2000:]}")
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["processes"] == processes
    return {"seconds": found["seconds"], "wall": wall}


def main() -> None:
    parser = argparse.ArgumentParser(description="Two processes against one, one thread each.")
    parser.add_argument("--parameters", type=float, default=0.05e9)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS, help="the key `speed` of this file is written")
    options = parser.parse_args()
    kinds: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        parameters = make_model(place / "model", options.parameters)
        lines = [" ".join(WORDS[(7 * n + k) % len(WORDS)] for k in range(TOKENS)) for n in range(options.rows)]
        (place / "rows.txt").write_text("".join(f"{line}\n" for line in lines))
        for kind in KINDS:
            runs: dict[int, list[dict[str, float]]] = {1: [], 2: []}
            for _ in range(options.repeats):
                for processes, found in runs.items():
                    found.append(timed(place, processes, kind))
            gap = differs(place, f"{kind}-1", f"{kind}-2")
            medians = {
                str(processes): {key: statistics.median(one[key] for one in found) for key in ("seconds", "wall")}
                for processes, found in runs.items()
            }
            ratio = medians["1"]["seconds"] / medians["2"]["seconds"]
            kinds[kind] = {"processes": medians, "times_as_fast": ratio, "largest_difference": gap}
            print(f"{kind:10} one {medians['1']['seconds']:.1f} s, two {medians['2']['seconds']:.1f} s", end=": ")
            print(f"{ratio:.2f} times as fast; largest difference {gap:.1e} of a tensor's largest entry")
    found = {
        "parameters": parameters,
        "rows": options.rows,
        "tokens": TOKENS,
        "threads_of_each": 1,
        "repeats": options.repeats,
        "backend": "gloo",
        "kinds": kinds,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    options.json.write_text(json.dumps({**known, "speed": found}, indent=2) + "\n")
    if any(one["largest_difference"] > ROUNDING for one in kinds.values()):
        raise SystemExit("the results are not the same")


if __name__ == "__main__":
    main()
