"""How much of the gap between a merge and joint training refinement closes, and what it costs.

    python -m benchmarks.refine --demo demo --seeds 0,1,2,3,4 --json benchmarks/results/refine.json

takes the folders DEMO-SEED of `gradmerge demo --seed SEED`, and makes those that are not there. Of every task 200 rows
of the training data are given, of which refine holds back a tenth; losses and accuracies are of the test data. Besides:
the base tuned on the same rows, rows whose labels are noise, the time beside one pass of fine-tuning, and memory.

    python -m benchmarks.refine --merged DIR --joint DIR --base DIR --data NAME=SRC --test NAME=SRC --device cuda

does the same for any models and data.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gradmerge as gm
from gradmerge.demo.demo_settings import BASE, TASKS
from gradmerge.refinement.saving import opened_start
from gradmerge.refinement.splitting import RowBatches
from gradmerge.tasks import complete, load_task

ROWS = 200
EVERY = (BASE, *TASKS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="beginning of the folders' names")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--merged", help="the start")
    parser.add_argument("--joint", help="the model trained on everything")
    parser.add_argument("--base", help="tuned on the same rows, for comparison")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=SRC")
    parser.add_argument("--test", action="append", default=[], metavar="NAME=SRC")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--passes", type=int, default=12, help="of adamw at most")
    parser.add_argument("--only", default="newton,adamw,base tuned,newton on noise", help="what is run")
    parser.add_argument("--limit", type=int, help="rows of each task")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(torch.get_num_threads() if args.demo is None else 1)
    cases: dict[str, Any] = {}
    if args.demo is not None:
        for seed in args.seeds.split(","):
            cases[f"demo, seed {seed}"] = on_demo(args, int(seed))
    else:
        data, test = pairs(args.data), pairs(args.test)
        cases[args.merged] = compare(args, args.merged, args.joint, args.base, data, test)
    result = {
        "command": "python -m benchmarks.refine",
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "unit": "loss: nats, mean over test examples and tasks; share: of the gap to joint training",
        "rounds": args.rounds,
        "passes": args.passes,
        "cases": cases,
    }
    if len(cases) > 1:
        result["mean"] = {
            name: {
                what: statistics.mean(case[name][what] for case in cases.values())
                for what in ("share_of_loss", "share_of_accuracy")
            }
            for name in args.only.split(",")
        }
    print(json.dumps(result.get("mean", cases), indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def on_demo(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One demonstration, with the first rows of every task's training data."""
    folder = args.demo.with_name(f"{args.demo.name}{seed}")
    if not (folder / "results.json").is_file():
        call = [sys.executable, "-m", "gradmerge", "demo", "-o", str(folder), "--seed", str(seed), "--quiet"]
        subprocess.run(call, check=True)
    with tempfile.TemporaryDirectory() as temporary:
        data, noise, test = {}, {}, {}
        random = np.random.default_rng(seed)
        for task in EVERY:
            with np.load(folder / "data" / f"{task}.npz") as arrays:
                x, y = arrays["x_train"][:ROWS], arrays["y_train"][:ROWS]
            data[task], noise[task] = f"{temporary}/{task}.npz", f"{temporary}/{task}-noise.npz"
            np.savez(data[task], x=x, y=y)
            np.savez(noise[task], x=x, y=random.integers(0, 10, len(y)))
            test[task] = f"{folder}/data/{task}.npz:test"
        merged, joint, base = folder / "merged/gradient-matching", folder / "models/joint", folder / "models/base"
        return compare(args, str(merged), str(joint), str(base), data, test, noise)


def compare(
    args: argparse.Namespace,
    merged: str,
    joint: str,
    base: str | None,
    data: Mapping[str, str],
    test: Mapping[str, str],
    noise: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The merge, joint training, and what lies between them."""
    loading: Any = {"batch_size": args.batch_size, "device": args.device, "limit": args.limit}
    start, goal = score(merged, test, args), score(joint, test, args)
    found: dict[str, Any] = {"merge": start, "joint": goal}
    with tempfile.TemporaryDirectory() as temporary:
        runs = [("newton", merged, data, "newton", args.rounds), ("adamw", merged, data, "adamw", args.passes)]
        runs += [("base tuned", base, data, "adamw", args.passes)] if base else []
        runs += [("newton on noise", merged, noise, "newton", args.rounds)] if noise else []
        for name, model, rows, method, rounds in (one for one in runs if one[0] in args.only.split(",")):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            out = f"{temporary}/{name}"
            done = gm.refine(model, rows, out=out, method=method, rounds=rounds, progress=False, **loading)
            after = score(out, test, args)
            found[name] = {
                **after,
                "share_of_loss": (start["loss"] - after["loss"]) / (start["loss"] - goal["loss"]),
                "share_of_accuracy": (after["accuracy"] - start["accuracy"]) / (goal["accuracy"] - start["accuracy"]),
                "rounds": len(done.rounds) - 1,
                "held_back": [one.judged for one in done.rounds],
                "seconds": round(sum(one.seconds for one in done.rounds), 2),
                "passes": dict(done.passes),
                "stopped": done.stopped,
                "peak_bytes": peak(),
            }
            print(merged, name, json.dumps(found[name]), flush=True)
    found["seconds_of_one_epoch"] = round(one_epoch(merged, data, loading), 2)
    return found


def score(model: str, test: Mapping[str, str], args: argparse.Namespace) -> dict[str, float]:
    """Mean over tasks of the loss of an example and of the accuracy, on test data."""
    numbers = [
        gm.evaluate(model, source, batch_size=256, device=args.device, progress=False) for source in test.values()
    ]
    loss = statistics.mean(float(one["loss_per_example"]) for one in numbers)
    return {"loss": loss, "accuracy": statistics.mean(float(one.get("accuracy") or 0) for one in numbers)}


def one_epoch(model: str, data: Mapping[str, str], loading: Any) -> float:
    """Seconds of one pass of fine-tuning over the same rows."""
    with opened_start(model, complete(loading, load_task)) as start:
        loaded = [start.with_data(source) for source in data.values()]
        batches = [(one, batch) for one in loaded for batch in RowBatches(one, range(one.examples))]
        optimizer = torch.optim.AdamW(start.model.parameters(), lr=1e-6)
        begun = time.perf_counter()
        for one, batch in batches:
            on_device = {name: value.to(one.device) for name, value in batch.items()}
            labels = on_device.pop("labels")
            one.output.losses(start.model(**on_device).logits, labels).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun


def peak() -> int:
    """Bytes: of the GPU, or resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pairs(given: list[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in given)


if __name__ == "__main__":
    main()
