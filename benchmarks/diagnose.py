"""What `gradmerge diagnose` costs beside the merge that it looks at, on models of 1.1 B parameters with two tasks.

python -m benchmarks.diagnose --data bench-data --json benchmarks/results/diagnose.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from .checkpoints import make_curvature, make_models

LIMIT = 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("bench-data"), help="where models are, or are made")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = args.data / f"llama-{args.layers}-layers"
    base, *tuned = make_models(folder, args.layers)
    prior, *curvature = make_curvature(folder, args.layers)
    recipe = folder / "diagnose.yml"
    entries = [
        {"model": f"./{model.name}", "curvature": f"./{of.name}"}
        for model, of in zip([base, *tuned], [prior, *curvature], strict=True)
    ]
    recipe.write_text(json.dumps({"method": "gradient-matching", "base": entries[0], "models": entries[1:]}))
    seconds: dict[str, list[float]] = {"merge": [], "diagnose": []}
    for _ in range(args.repeats):
        for command in seconds:
            seconds[command].append(run(command, recipe, folder / f"out-{command}"))
    medians = {command: statistics.median(values) for command, values in seconds.items()}
    ratio = medians["diagnose"] / medians["merge"]
    result = {
        "command": "python -m benchmarks.diagnose",
        "layers": args.layers,
        "tasks": len(tuned),
        "seconds": seconds,
        "median_s": medians,
        "ratio": ratio,
        "limit": LIMIT,
        "holds": ratio <= LIMIT,
    }
    seconds_of = ", ".join(f"{command} {median:.2f} s" for command, median in medians.items())
    print(f"{seconds_of}: {ratio:.2f}× (at most {LIMIT:g}: {ratio <= LIMIT})")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def run(command: str, recipe: Path, out: Path) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "gradmerge", command, str(recipe), "-o", str(out), "--quiet"], check=True)
    taken = time.perf_counter() - begun
    shutil.rmtree(out)
    return taken


if __name__ == "__main__":
    main()
