"""How much of the gap between a merge and joint training refinement closes, and what it costs.

    python -m benchmarks.refine --demo demo --seeds 0,1,2,3,4 --json benchmarks/results/refine.json

takes the folders DEMO0, DEMO1, … of `gradmerge demo --seed SEED`, and makes those that are not there. Of every task 200
rows of the training data are given, of which refine holds back a tenth; losses and accuracies are of the test data.
Besides: the base tuned on the same rows, rows whose labels are noise, the time beside one pass of fine-tuning, and
memory.

    python -m benchmarks.refine --merged DIR --joint DIR --base DIR --data NAME=SRC --test NAME=SRC --device cuda

does the same for any models and data. What the JSON file holds already is not run again.
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
from collections.abc import Callable, Mapping
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
RUNS = ("newton", "adamw", "adamw longer", "base tuned", "newton on noise")


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
    parser.add_argument("--only", default=",".join(RUNS), help="what is run")
    parser.add_argument("--limit", type=int, help="rows of each task")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    before = json.loads(args.json.read_text()) if args.json and args.json.is_file() else {}
    cases: dict[str, Any] = before.get("cases", {})
    if args.demo is not None:
        for seed in args.seeds.split(","):
            on_demo(args, int(seed), cases.setdefault(f"demo, seed {seed}", {}), lambda: write(args, cases))
    else:
        data, test, found = pairs(args.data), pairs(args.test), cases.setdefault(args.merged, {})
        compare(args, found, lambda: write(args, cases), args.merged, args.joint, args.base, data, test)
    print(json.dumps(write(args, cases).get("mean", cases), indent=2))


def write(args: argparse.Namespace, cases: dict[str, Any]) -> dict[str, Any]:
    """All results so far, into the file if there is to be one."""
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
                for what in ("loss", "accuracy", "share_of_loss", "share_of_accuracy", "epochs")
            }
            for name in RUNS
            if all(name in case for case in cases.values())
        }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return result


def on_demo(args: argparse.Namespace, seed: int, found: dict[str, Any], told: Callable[[], Any]) -> None:
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
        compare(args, found, told, str(merged), str(joint), str(base), data, test, noise)


def compare(
    args: argparse.Namespace,
    found: dict[str, Any],
    told: Callable[[], Any],
    merged: str,
    joint: str,
    base: str | None,
    data: Mapping[str, str],
    test: Mapping[str, str],
    noise: Mapping[str, str] | None = None,
) -> None:
    """The merge, joint training, and what lies between them, into ``found``."""
    loading: Any = {"batch_size": args.batch_size, "device": args.device, "limit": args.limit}
    if "joint" not in found:
        found |= {"merge": score(merged, test, args), "joint": score(joint, test, args)}
        found["seconds_of_one_epoch"] = min(one_epoch(merged, data, loading) for _ in range(3))
    start, goal = found["merge"], found["joint"]
    runs = [("newton", merged, data, "newton", args.rounds), ("adamw", merged, data, "adamw", args.rounds)]
    runs += [("adamw longer", merged, data, "adamw", args.passes)]
    runs += [("base tuned", base, data, "adamw", args.passes)] if base else []
    runs += [("newton on noise", merged, noise, "newton", args.rounds)] if noise else []
    for name, model, rows, method, rounds in runs:
        if name in found or name not in args.only.split(","):
            continue
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as temporary:
            out, begun = f"{temporary}/out", clock()
            done = gm.refine(model, rows, out=out, method=method, rounds=rounds, progress=False, **loading)
            seconds, after = clock() - begun, score(out, test, args)
        found[name] = {
            **after,
            "share_of_loss": (start["loss"] - after["loss"]) / (start["loss"] - goal["loss"]),
            "share_of_accuracy": (after["accuracy"] - start["accuracy"]) / (goal["accuracy"] - start["accuracy"]),
            "rounds": len(done.rounds) - 1,
            "held_back": [one.judged for one in done.rounds],
            "seconds": seconds,
            "epochs": seconds / found["seconds_of_one_epoch"],
            "passes": dict(done.passes),
            "stopped": done.stopped,
            "peak_bytes": peak(),
        }
        print(merged, name, json.dumps(found[name]), flush=True)
        told()


def clock() -> float:
    """Seconds; on the CPU, with one thread, those that this process has computed, whatever else the machine does."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


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
        begun = clock()
        for one, batch in batches:
            on_device = {name: value.to(one.device) for name, value in batch.items()}
            labels = on_device.pop("labels")
            one.output.losses(start.model(**on_device).logits, labels).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return clock() - begun


def peak() -> int:
    """Bytes: of the GPU, or resident."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pairs(given: list[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in given)


if __name__ == "__main__":
    main()
