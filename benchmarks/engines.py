"""Engines: a merge on Ray, on this one machine, against the same merge by the local engine.

    python -m benchmarks.engines --data bench-data

makes three Llama checkpoints of 1.1 B parameters in bf16 (once; they stay in the data folder), merges them in turn by
both engines on warm files, checks that the weights have the same bytes, and writes every run as JSON. What starting and
ending Ray takes is stated apart: it is the same for a model of any size. Speed never decides the exit status.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .merge import RunFailed, apart, compiled, make_small, say, timed, warm, weights

RESULTS = Path(__file__).parent / "results"
METHODS = ("task-arithmetic", "ties")
#: What a merge on Ray may take beside the local one, once Ray has started.
BAR = 1.25
GIB = 2**30


def command_of(method: str, models: Path, engine: str, workers: int | None) -> list[str]:
    words = [sys.executable, "-m", "gradmerge", "merge", "--method", method, "--base", str(models / "base")]
    words += ["--model", str(models / "tuned-1"), "--model", str(models / "tuned-2"), "--json", "--engine", engine]
    return [*words, *(["--workers", str(workers)] if workers else []), "--out"]


def measure(name: str, command: list[str], out: Path) -> dict[str, Any]:
    wall, peak, _, output = timed(name, [*command, str(out)], out)
    timings = json.loads((out / "gradmerge.json").read_text("utf-8"))["timings"]
    found = {"wall_s": wall, "merging_s": timings["total"]}
    found["driver_peak_rss_bytes"] = peak
    found["moved_bytes"] = sum(json.loads(output)[key] for key in ("bytes_read", "bytes_written"))
    say(f"{name}: {wall:.1f} s, of which {found['merging_s']:.1f} s merging")
    return found


def digests(out: Path) -> dict[str, str]:
    found = {}
    for path in weights(out):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "blake2b").hexdigest()
    return found


def compare(method: str, models: Path, data: Path, workers: list[int], repeats: int) -> dict[str, Any]:
    """Both engines in turn; medians, and Ray's time beyond its start over the local one."""
    warm(models / name for name in ("base", "tuned-1", "tuned-2"))
    engines: dict[str, int | None] = {"local": None} | {f"ray, {number} workers": number for number in workers}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    out, wanted = data / "out", {}
    try:
        # All write to one place, whose old files are gone: what lies in the page cache is the same for all.
        for _ in range(repeats):
            for name, number in engines.items():
                command = command_of(method, models, "local" if number is None else "ray", number)
                runs[name].append(measure(f"{method}, {name}", command, out))
                found = digests(out)
                wanted = wanted or found
                if found != wanted:
                    raise RunFailed(f"{method}, {name}: the weights are not those of the local engine")
    finally:
        shutil.rmtree(out, ignore_errors=True)
    rows = {
        name: {key: statistics.median(run[key] for run in found) for key in ("wall_s", "merging_s")}
        for name, found in runs.items()
    }
    plain = rows["local"] | {"start_s": 0.0}
    rows["local"] = plain
    for name in list(rows)[1:]:
        row = rows[name]
        row["start_s"] = (row["wall_s"] - row["merging_s"]) - (plain["wall_s"] - plain["merging_s"])
        row["over_local_beyond_start"] = (row["wall_s"] - row["start_s"]) / plain["wall_s"]
        row["merging_over_local"] = row["merging_s"] / plain["merging_s"]
        say(f"{method}, {name}: {row['over_local_beyond_start']:.2f} times local beyond Ray's start (bar: {BAR})")
    return {"medians": rows, "runs": runs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("bench-data"), help="where models and results of merges go")
    parser.add_argument("--models", type=Path, help="a folder with base, tuned-1 and tuned-2, in place of making them")
    parser.add_argument("--layers", type=int, default=22, help="of the models; 22 are 1.1 B parameters")
    parser.add_argument("--workers", default="1,2", help="numbers of workers, with commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "engines.json")
    options = parser.parse_args()
    data = options.data.absolute()
    data.mkdir(parents=True, exist_ok=True)
    models = options.models or data / f"llama-{options.layers}-layers"
    if options.models is None:
        say("making the models, unless they are there")
        apart(make_small, models, options.layers)
    compiled()
    workers = [int(number) for number in options.workers.split(",")]
    report = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "system": platform.platform()},
        "versions": {name: version(name) for name in ("torch", "ray", "numpy")},
        "bytes_of_a_model": sum(path.stat().st_size for path in weights(models / "base")),
        "bar": BAR,
        "methods": {method: compare(method, models, data, workers, options.repeats) for method in METHODS},
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    say(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
