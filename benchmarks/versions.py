"""Merging on disk: this version against an earlier one, in turn and on the same warm files.

    git worktree add ../before v0.1.0
    python -m benchmarks.versions --before ../before --data bench-data

Each repeat runs every case once per version, and the versions take turns at going first. A ratio is one of medians:
of the time by the clock, and of the processors' time, which other work on the machine disturbs less. Both versions must
write the same bytes of weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .checkpoints import make_curvature, make_models

HERE = Path(__file__).resolve().parent.parent
CASES = ("average", "task-arithmetic", "ties", "gradient-matching")


def command(case: str, models: list[Path], curvature: list[Path], out: Path) -> list[str]:
    words = [sys.executable, "-m", "gradmerge", "merge", "--method", case, "--base", str(models[0])]
    for model in models[1:]:
        words += ["--model", str(model)]
    if case == "gradient-matching":
        for path in curvature:
            words += ["--curvature", str(path)]
    return [*words, "--quiet", "-o", str(out)]


def timed(words: list[str], tree: Path, out: Path) -> tuple[float, float, dict[str, bytes]]:
    """Run a command with the code of a tree: seconds by the clock, seconds of the processors, and ends of its files."""
    shutil.rmtree(out, ignore_errors=True)
    begun, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree / "src")})
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    weights = {path.name: path.read_bytes()[-(1 << 20) :] for path in sorted(out.glob("*.safetensors"))}
    return seconds, busy, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier version")
    parser.add_argument("--data", type=Path, required=True, help="folder for models and outputs")
    parser.add_argument("--layers", type=int, default=22, help="layers of the model; 22 are 1.1 B parameters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    args = parser.parse_args()
    models = make_models(args.data.resolve(), args.layers)
    cases = args.cases.split(",")
    curvature = list(make_curvature(args.data.resolve(), args.layers)) if "gradient-matching" in cases else []
    out = args.data.resolve() / "out"
    sides = {"before": args.before.resolve(), "after": HERE}
    results: list[dict[str, Any]] = []
    for case in cases:
        words = command(case, models, curvature, out)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        processor: dict[str, list[float]] = {side: [] for side in sides}
        timed(words, HERE, out)  # the files are warm from here on
        for repeat in range(args.repeats):
            written = {}
            for side in sorted(sides, reverse=repeat % 2 == 1):
                wall, busy, written[side] = timed(words, sides[side], out)
                seconds[side].append(round(wall, 4))
                processor[side].append(round(busy, 4))
            if any(content != written["after"] for content in written.values()):
                raise SystemExit(f"{case}: the versions wrote different weights")
        result: dict[str, Any] = {"case": case, "seconds": seconds, "processor seconds": processor}
        for what, measured in (("", seconds), (", processor", processor)):
            for side in sides:
                if side != "before":
                    ratio = statistics.median(measured[side]) / statistics.median(measured["before"])
                    result[f"{side} over before{what}"] = round(ratio, 4)
        results.append(result)
        medians = {side: round(statistics.median(values), 3) for side, values in seconds.items()}
        print(case, medians, {k: v for k, v in result.items() if "over" in k}, flush=True)
    shutil.rmtree(out, ignore_errors=True)
    if args.json:
        facts = {"layers": args.layers, "cores": os.cpu_count(), "results": results}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
