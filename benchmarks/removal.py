"""Removal on the demonstration: how far each way ends from the model that never saw the task.

    for s in 0 1 2 3 4; do gradmerge demo -o demo$s --seed $s; done
    python -m benchmarks.removal demo0 demo1 demo2 demo3 demo4 --json benchmarks/results/removal.json

takes `tilted` out of the model trained on all four kinds of digits: by negation and by gradient matching (both from a
model tuned further on `tilted`), and by influence steps, which see the training rows alone. Each result is held against
the model trained without `tilted`: KL(target ‖ result), the mean over the test digits of `tilted`, beside the accuracy
on the other kinds. Negation is also shown at the strength that leaves the accuracy on the rest nearest to what
influence leaves, the largest of several; it is chosen by the test digits, which favours negation. The floor is a second
target, trained with other random numbers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.demo.demo_settings import BASE, REMOVED, TASKS, Settings
from gradmerge.demo.digits import read_array
from gradmerge.demo.training import train
from gradmerge.tasks import load_model

KEPT = (BASE, *(task for task in TASKS if task != REMOVED))
#: Options of gm.remove: as in the demonstration, the defaults, and several steps up to a loss on the forget set.
SETTINGS: Sequence[dict[str, Any]] = (
    {"budget": "40%"},
    {"budget": "2%"},
    {"budget": "40%", "steps": 8, "until": 1.0},
    {"budget": "2%", "steps": 8, "until": 1.0},
)
STRENGTHS = [0.05 * step for step in range(41)]
STREAM = 101
"""Of the second target: no training of the demonstration has it."""


class Judge:
    """Test digits of one demonstration, and what the target says of those that were removed."""

    def __init__(self, demo: Path) -> None:
        self.data = {task: self._digits(demo, task) for task in (REMOVED, *KEPT)}
        self.target = self._says(_loaded(demo / f"models/without-{REMOVED}"), REMOVED)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        said = {task: self._says(model, task) for task in self.data}
        right = {task: float((said[task].argmax(-1) == self.data[task][1]).double().mean()) for task in said}
        kl = (self.target.exp() * (self.target - said[REMOVED])).sum(-1).mean()
        rest = sum(right[task] for task in KEPT) / len(KEPT)
        return {"kl": round(float(kl), 4), REMOVED: round(right[REMOVED], 4), "rest": round(rest, 4)}

    def _says(self, model: nn.Module, task: str) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(self.data[task][0]).logits
        return logits.double().log_softmax(-1)

    @staticmethod
    def _digits(demo: Path, task: str) -> tuple[Tensor, Tensor]:
        path = demo / f"data/{task}.npz"
        images = torch.from_numpy(read_array(path, "x_test"))[:, None].float().div(255).sub(0.5).div(0.5)
        return images, torch.from_numpy(read_array(path, "y_test"))


def _loaded(folder: Path) -> nn.Module:
    return load_model(str(folder), "image", device="cpu")[0]


def negations(demo: Path, judge: Judge) -> dict[float, dict[str, float]]:
    """Strength → what negation comes to."""
    # From the modules, whose names are the same on both sides; files may name tensors otherwise.
    base, tuned = (_loaded(demo / f"models/{name}").state_dict() for name in ("joint", f"joint-{REMOVED}"))
    model = _loaded(demo / "models/joint")
    found = {}
    for strength in STRENGTHS:
        values: Mapping[str, Tensor] = {name: v - strength * (tuned[name] - v) for name, v in base.items()}
        model.load_state_dict(values)
        found[round(strength, 2)] = judge(model)
    return found


def matched(tried: Mapping[float, Mapping[str, float]], rest: float) -> dict[str, float]:
    """The strength that leaves the accuracy on the rest nearest to this one; of several the largest."""
    strength = min(tried, key=lambda one: (round(abs(tried[one]["rest"] - rest), 9), -one))
    return {"strength": strength, **tried[strength]}


def run(demo: Path, device: str, asked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return _run(demo, Path(folder), device, asked)


def _run(demo: Path, folder: Path, device: str, asked: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    judge = Judge(demo)
    settings = Settings(seed=json.loads((demo / "results.json").read_text("utf-8"))["seed"])
    second = folder / "second"
    train(str(demo / "models/base"), demo / "data/rest.npz", second, settings, stream=STREAM)
    tried = negations(demo, judge)
    found: dict[str, Any] = {
        "seed": settings.seed,
        "before": judge(_loaded(demo / "models/joint")),
        "target": judge(_loaded(demo / f"models/without-{REMOVED}")),
        "floor": judge(_loaded(second)),
        "negation": {"strength": 1.0, **tried[1.0]},
        "removal": judge(_loaded(demo / "removed/removal")),
        "influence": [],
    }
    for number, options in enumerate(asked):
        begun = time.process_time()
        out = folder / f"influence-{number}"
        done = gm.remove(
            demo / "models/joint",
            out,
            forget=f"{demo}/data/{REMOVED}.npz:train",
            retain=f"{demo}/data/rest.npz:train",
            batch_size=128,
            device=device,
            progress=False,
            **options,
        )
        scores = judge(_loaded(out))
        entry = {**options, **scores, "used": round(done.used, 4), "s": done.s, "steps_taken": len(done.steps)}
        entry |= {"forget_loss": round(done.after.forget, 4), "cpu_seconds": round(time.process_time() - begun, 1)}
        entry["negation_at_equal_rest"] = matched(tried, scores["rest"])
        found["influence"].append(entry)
        print(json.dumps({"seed": settings.seed, **entry}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demos", nargs="+", type=Path, metavar="DEMO", help="folders of `gradmerge demo`")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--device", default="cpu", help="where the influence steps are computed")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="demos at a time, on one thread each")
    given = parser.parse_args()
    with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
        rows = list(pool.map(partial(run, device=given.device, asked=SETTINGS), given.demos))
    if given.json:
        given.json.write_text(json.dumps({"removed": REMOVED, "seeds": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
