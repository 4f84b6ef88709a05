"""Merging on disk: this version against an earlier one, in turn and on the same warm files.

    git worktree add ../before v0.1.0
    python -m benchmarks.versions --before ../before --data bench-data

A ratio is one of medians: of the time by the clock, and of the processors' time, which other work on the machine
disturbs less. Both versions must write the same bytes of weights.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
from pathlib import Path
from typing import Any

from .checkpoints import make_curvature, make_models
from .timing import Timed, parser_of, say, timed, warm, weights, write_report

HERE = Path(__file__).resolve().parent.parent
CASES = ("average", "task-arithmetic", "ties", "gradient-matching")


def command_of(case: str, models: list[Path], curvature: list[Path], out: Path) -> list[str]:
    words = [sys.executable, "-m", "gradmerge", "merge", "--method", case, "--base", str(models[0])]
    words += [word for model in models[1:] for word in ("--model", str(model))]
    if case == "gradient-matching":
        words += [word for path in curvature for word in ("--curvature", str(path))]
    return [*words, "--quiet", "-o", str(out)]


def digests(out: Path) -> dict[str, str]:
    """Return a hash of every file of weights."""
    found = {}
    for path in weights(out):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "blake2b").hexdigest()
    return found


def compare(case: str, command: list[str], sides: dict[str, Path], out: Path, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[Timed]] = {side: [] for side in sides}
    for repeat in range(repeats):
        written = []
        for side in sorted(sides, reverse=repeat % 2 == 1):
            tree = sides[side]
            runs[side].append(timed(side, command, out, cwd=tree, PYTHONPATH=str(tree / "src")))
            written.append(digests(out))
        if written[0] != written[1]:
            raise SystemExit(f"{case}: the versions wrote different weights")
    medians = {
        kind: {side: statistics.median(getattr(run, kind) for run in found) for side, found in runs.items()}
        for kind in ("wall_s", "cpu_s")
    }
    ratios = {kind: round(values["after"] / values["before"], 4) for kind, values in medians.items()}
    say(f"{case}: after over before: {ratios}")
    return {"case": case, "medians": medians, "after over before": ratios}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the earlier version")
    parser.add_argument("--data", type=Path, required=True, help="folder for models and outputs")
    parser.add_argument("--layers", type=int, default=22, help="layers of the model; 22 are 1.1 B parameters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    args = parser.parse_args()
    data, cases = args.data.resolve(), args.cases.split(",")
    models = make_models(data, args.layers)
    curvature = list(make_curvature(data, args.layers)) if "gradient-matching" in cases else []
    warm([*models, *curvature])
    sides, out = {"before": args.before.resolve(), "after": HERE}, data / "out"
    results = [compare(case, command_of(case, models, curvature, out), sides, out, args.repeats) for case in cases]
    write_report(args.json, layers=args.layers, results=results)


if __name__ == "__main__":
    main()
