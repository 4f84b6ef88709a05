"""Engines: a merge on Ray, on this one machine, against the same merge by the local engine.

    python -m benchmarks.engines --data bench-data --json benchmarks/results/engines.json

makes three Llama checkpoints of 1.1 B parameters in bf16 (once; they stay in the data folder), merges them in turn by
both engines on warm files, and checks that the weights have the same bytes. The time of starting and ending Ray is
reported separately: it does not depend on the size of the model.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from .merge import TUNED, make_small
from .timing import RunFailed, apart, compiled, machine, parser_of, say, size, timed, versions, warm, write_report
from .versions import command_of, digests

METHODS = ("task-arithmetic", "ties")


def compare(method: str, models: Path, out: Path, workers: list[int], repeats: int) -> dict[str, Any]:
    """Return medians of both engines, and Ray's time beyond its start over the local one."""
    folders = [models / name for name in ("base", *TUNED)]
    warm(folders)
    engines = {"local": ["--engine", "local"]}
    engines |= {f"ray, {n} workers": ["--engine", "ray", "--workers", str(n)] for n in workers}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    wanted: dict[str, str] = {}
    for _ in range(repeats):
        for name, options in engines.items():
            run = timed(name, [*command_of(method, folders, [], out), *options], out)
            merging = json.loads((out / "gradmerge.json").read_text("utf-8"))["timings"]["total"]
            runs[name].append({"wall_s": run.wall_s, "merging_s": merging})
            found = digests(out)
            wanted = wanted or found
            if found != wanted:
                raise RunFailed(f"{method}, {name}: the weights are not those of the local engine")
    rows = {n: {k: statistics.median(run[k] for run in found) for k in found[0]} for n, found in runs.items()}
    plain = rows["local"]
    for name, row in rows.items():
        row["start_s"] = (row["wall_s"] - row["merging_s"]) - (plain["wall_s"] - plain["merging_s"])
        if name != "local":
            row["over_local_beyond_start"] = (row["wall_s"] - row["start_s"]) / plain["wall_s"]
            say(f"{method}, {name}: {row['over_local_beyond_start']:.2f} times local beyond Ray's start")
    return {"medians": rows, "runs": runs}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, default=Path("bench-data"), help="folder for models and outputs")
    parser.add_argument("--layers", type=int, default=22, help="layers of the model; 22 are 1.1 B parameters")
    parser.add_argument("--workers", default="1,2", help="numbers of workers, comma-separated")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    data = options.data.absolute()
    models = data / f"llama-{options.layers}-layers"
    apart(make_small, models, options.layers)
    compiled()
    workers = [int(number) for number in options.workers.split(",")]
    methods = {method: compare(method, models, data / "out", workers, options.repeats) for method in METHODS}
    facts = {"machine": machine(), "versions": versions("ray"), "bytes_of_a_model": size(models / "base")}
    write_report(options.json, **facts, methods=methods)


if __name__ == "__main__":
    main()
