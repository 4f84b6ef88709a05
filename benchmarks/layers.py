"""Whether weights that differ between layers merge better, on test rows that no search has seen.

    python -m benchmarks.layers demo0 demo1 demo2 --json benchmarks/results/layers.json

takes folders that `gradmerge demo --seed N -o DIR` made. For every method, `gm.suggest_weights(…, by="layers")` takes
curvature, and then the first rows of the validation data. The plain weights and the lists over the layers that it found
(on data, both without the rows held back), and what it suggests, are merged and evaluated on the test data. Runs
replace those of the same name in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import gradmerge as gm
from gradmerge.diagnostics.grid import Setting, recipe_with
from gradmerge.recipe import plain

DATA = {"base": "upright", "tilted": "tilted", "thick": "thick", "blurred": "blurred"}


def sources(demo: Path, split: str) -> dict[str, str]:
    return {task: f"{demo / 'data' / name}.npz:{split}" for task, name in DATA.items()}


def on_test(recipe: gm.Recipe, setting: Setting, demo: Path) -> dict[str, float]:
    """Accuracy and loss over the test data of all tasks, and of the worst task."""
    with tempfile.TemporaryDirectory() as place:
        merged = Path(place) / "merged"
        gm.merge(recipe_with(recipe, setting), merged, progress=False)
        found = [gm.evaluate(str(merged), source, batch_size=100) for source in sources(demo, "test").values()]
    losses = [one["loss_per_example"] for one in found]
    return {"accuracy": mean(one["accuracy"] for one in found), "loss": mean(losses), "worst loss": max(losses)}


def runs(demo: Path, method: str, rows: int, objective: str) -> Iterator[tuple[str, dict[str, Any]]]:
    recipe = gm.load_recipe(demo / "recipes" / "gradient-matching.yml")
    loading: dict[str, Any] = {"limit": rows, "batch_size": 100}
    searches = {"curvature": {}, **({f"{rows} rows": {"data": sources(demo, "valid"), **loading}} if rows else {})}
    for source, more in searches.items():
        start = time.perf_counter()
        found = gm.suggest_weights(recipe, methods=method, by="layers", objective=objective, progress=False, **more)
        over = found.over_layers
        assert over is not None
        chosen = over.layered if over.taken else over.plain
        pair = over.judged or over  # on data: both chosen without the rows held back
        cases = {"plain": pair.plain, "lists": pair.layered, "suggested": chosen}
        yield (
            f"{method}, {source}, {objective}, {demo.name}",
            {
                "method": method,
                "source": source,
                "objective": objective,
                "seconds": round(time.perf_counter() - start, 1),
                "taken": over.taken,
                "predicted": over.layered.score / over.plain.score if over.judged is None else None,
                "held back": {"gain": over.judged.gain, "error": over.judged.error} if over.judged else None,
                "weights": {name: list(map(plain, row.setting.weights)) for name, row in cases.items()},
                "test": {name: on_test(recipe, row.setting, demo) for name, row in cases.items()},
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demos", nargs="+", type=Path, metavar="DEMO")
    parser.add_argument("--methods", default="task-arithmetic,gradient-matching")
    parser.add_argument("--rows", type=int, default=100, help="of each task; 0: from curvature alone")
    parser.add_argument("--objective", default="worst")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    for demo in arguments.demos:
        for method in arguments.methods.split(","):
            for name, run in runs(demo.resolve(), method, arguments.rows, arguments.objective):
                kept = json.loads(arguments.json.read_text("utf-8")) if arguments.json.exists() else {}
                arguments.json.write_text(json.dumps(kept | {name: run}, indent=1, sort_keys=True) + "\n", "utf-8")
                print(name, run["seconds"], run["taken"], run["test"], flush=True)


if __name__ == "__main__":
    main()
