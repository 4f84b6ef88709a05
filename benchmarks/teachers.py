"""How much the tasks' own models add as teachers to a refinement with few labelled rows.

    python -m benchmarks.teachers --demo demo --seeds 0,1,2,3,4 --json benchmarks/results/teachers.json

takes the folders DEMO0, DEMO1, … of `gradmerge demo --seed SEED`, and makes those that are not there. The merge is
refined with 50 and with 200 rows of every task's training data, of which a tenth is held back: by labels alone
(teaching 0), by both in halves, and by the answers of the models that were merged alone (teaching 1). So is the base,
for comparison. Losses and accuracies are of the test data, and its labels. What the JSON file holds already is not run
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import gradmerge as gm
from gradmerge.demo.demo_settings import BASE, TASKS

from .refine import clock, score

SIZES = (50, 200)
SHARES = (0.0, 0.5, 1.0)
#: Method → rounds; for adamw passes.
ROUNDS = {"newton": 2, "adamw": 12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("demo"), help="beginning of the folders' names")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.device = "cpu"
    torch.set_num_threads(1)
    before = json.loads(args.json.read_text()) if args.json and args.json.is_file() else {}
    result: dict[str, Any] = {
        "command": "python -m benchmarks.teachers",
        "torch": torch.__version__,
        "unit": "loss: nats, mean over test examples and tasks; accuracy: mean over tasks; seconds of one core",
        "rounds": ROUNDS,
        "cases": before.get("cases", {}),
    }
    for seed in args.seeds.split(","):
        folder = args.demo.with_name(f"{args.demo.name}{seed}")
        if not (folder / "results.json").is_file():
            call = [sys.executable, "-m", "gradmerge", "demo", "-o", str(folder), "--seed", seed, "--quiet"]
            subprocess.run(call, check=True)
        found = result["cases"].setdefault(f"demo, seed {seed}", {})
        for name, one in runs(folder, args, found):
            found[name] = one
            print(seed, name, json.dumps(one), flush=True)
            if args.json:
                args.json.write_text(json.dumps(result, indent=2) + "\n")


def runs(folder: Path, args: argparse.Namespace, found: dict[str, Any]) -> Any:
    """Name and numbers of every model that is not in ``found``."""
    data = {task: f"{folder}/data/{task}.npz:train" for task in (BASE, *TASKS)}
    test = {task: f"{folder}/data/{task}.npz:test" for task in data}
    models = {task: f"{folder}/models/{'base' if task == BASE else task}" for task in data}
    merged = f"{folder}/merged/gradient-matching"
    for name, model in (("merge", merged), ("joint", f"{folder}/models/joint")):
        if name not in found:
            yield name, score(model, test, args)
    starts = {"": merged, "base, ": models[BASE]}
    for first, size, share, method in itertools.product(starts, SIZES, SHARES, ROUNDS):
        name = f"{first}{method}, {size} rows, teaching {share:g}"
        if name in found:
            continue
        taught: Any = {"teachers": models, "teaching": share} if share else {}
        how: Any = {"method": method, "rounds": ROUNDS[method], "limit": size, "batch_size": 64, **taught}
        with tempfile.TemporaryDirectory() as temporary:
            out, begun = f"{temporary}/out", clock()
            done = gm.refine(starts[first], data, out=out, progress=False, device="cpu", **how)
            seconds = clock() - begun
            yield name, {**score(out, test, args), "seconds": seconds, "rounds": len(done.rounds) - 1}


if __name__ == "__main__":
    main()
