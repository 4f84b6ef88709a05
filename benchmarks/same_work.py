"""The same recipes by mergekit and by gradmerge: equal tensors out, and how long each took.

    python -m benchmarks.same_work --data bench-data --mergekit .venv-mergekit/bin/mergekit-yaml

Every recipe is a file of mergekit's that gradmerge runs unchanged. A case counts only if the results agree: every entry
within two units of bfloat16 of its largest operand, but for those on a threshold, which may fall either way. Both
compute in float32 and write bfloat16. Random methods draw other entries: there the share of entries that moved, and how
far, has to agree within one in a hundred. mergekit runs at its faster setting (`--out-shard-size 500M`).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .merge import BEST_FLAGS, make_small, parameters_of
from .timing import (
    GIB,
    RunFailed,
    Timed,
    apart,
    compiled,
    machine,
    mergekit_versions,
    parser_of,
    say,
    timed,
    versions,
    warm,
    write_report,
)

#: Recipes, each with whether it is random.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "linear": ({"weight": 0.5}, False),
    "task_arithmetic": ({"weight": 0.7}, False),
    "slerp": ({"t": 0.4}, False),
    "nuslerp": ({"weight": 0.5}, False),
    "multislerp": ({"weight": 0.5}, False),
    "karcher": ({}, False),
    "ties": ({"weight": 1.0, "density": 0.5}, False),
    "dare_linear": ({"weight": 0.5, "density": 0.5}, True),
    "dare_ties": ({"weight": 0.5, "density": 0.5}, True),
    "della": ({"weight": 0.5, "density": 0.5, "epsilon": 0.1}, True),
    "della_linear": ({"weight": 0.5, "density": 0.5, "epsilon": 0.1}, True),
    "breadcrumbs": ({"weight": 0.7, "density": 0.9, "gamma": 0.01}, False),
    "breadcrumbs_ties": ({"weight": 0.7, "density": 0.9, "gamma": 0.01}, False),
    "model_stock": ({}, False),
    "nearswap": ({"t": 0.001}, False),
    "arcee_fusion": ({}, False),
    "sce": ({"select_topk": 0.5}, False),
    "passthrough": ({}, False),
}
MODELS = ("base", "tuned-1", "tuned-2")
WITHOUT_BASE = {"linear", "nuslerp", "multislerp", "karcher"}
ONE_MODEL = {"slerp", "nearswap", "arcee_fusion"}
OF_MODELS = {"weight", "density", "gamma", "epsilon"}


def recipe(method: str, folder: Path, layers: int) -> dict[str, Any]:
    parameters = CASES[method][0]
    own = {name: value for name, value in parameters.items() if name in OF_MODELS}
    found: dict[str, Any] = {"merge_method": method, "dtype": "float32", "out_dtype": "bfloat16"}
    if method == "passthrough":
        half = layers // 2
        ranges = [("tuned-1", [0, half + 1]), ("tuned-2", [half - 1, layers])]
        return found | {"slices": [{"sources": [{"model": str(folder / m), "layer_range": r}]} for m, r in ranges]}
    tuned = ["tuned-1"] if method in ONE_MODEL else ["tuned-1", "tuned-2"]
    found["models"] = [{"model": str(folder / name), **({"parameters": own} if own else {})} for name in tuned]
    if method not in WITHOUT_BASE:
        found["base_model"] = str(folder / "base")
    shared = {name: value for name, value in parameters.items() if name not in OF_MODELS}
    return found | ({"parameters": shared} if shared else {})


def on_threshold(inputs: list[Any], parameters: dict[str, Any]) -> Any:
    """Which entries are as large as the last, or the first, that a density keeps: differences of bfloat16 numbers have
    few values, and mergekit keeps so many of the equal ones that the count is exact, gradmerge all of them."""
    import torch

    if "density" not in parameters:
        return torch.tensor(False)
    base, *tuned = (values.float().reshape(-1) for values in inputs)
    found = torch.zeros(len(base), dtype=torch.bool)
    kept, above = int(parameters["density"] * len(base)), int(parameters.get("gamma", 0) * len(base))
    for size in ((values - base).abs() for values in tuned):
        for rank in (above, above + 1, above + kept):
            if 1 <= rank <= len(size):
                found |= size == size.kthvalue(len(size) - rank + 1).values
    return found.reshape(inputs[0].shape)


def agreement(ours: Path, theirs: Path, models: Path, method: str) -> float:
    """The share of entries that agree; for random methods, 1 minus the relative difference of what moved."""
    parameters, random = CASES[method]
    agree = total = 0
    moved = [[0.0, 0.0], [0.0, 0.0]]
    for name, one, other, *inputs in _tensors(ours, theirs, *(models / name for name in MODELS)):
        start = inputs[0]
        if one.shape != other.shape:
            raise RunFailed(f"{name}: {list(one.shape)} from gradmerge, {list(other.shape)} from mergekit")
        total += one.numel()
        if random:
            for sums, values in zip(moved, (one, other), strict=True):
                change = (values.double() - start.double()).abs()
                sums[0] += float((change > 0).sum())
                sums[1] += float(change.sum())
        else:
            one, other = one.float(), other.float()
            largest = one.abs().maximum(other.abs())
            for values in inputs:
                if values is not None and values.shape == largest.shape:
                    largest = largest.maximum(values.float().abs())
            unit = largest * 2.0**-8  # bfloat16 has 8 significant bits
            fine = (one - other).abs() <= 2 * unit + 1e-12
            agree += int((fine | on_threshold(inputs, parameters)).sum())
    if random:
        return 1 - max(abs(a - b) / max(a, b, 1e-30) for a, b in zip(*moved, strict=True))
    return agree / total


def _tensors(*folders: Path) -> Iterator[tuple[Any, ...]]:
    from safetensors import safe_open

    places: list[dict[str, Path]] = []
    for folder in folders:
        found = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        places.append(found)
    if places[0].keys() != places[1].keys():
        raise RunFailed(f"other tensors: {sorted(places[0].keys() ^ places[1].keys())[:5]}")
    for name in places[0]:
        values = []
        for place in places:
            if name in place:
                with safe_open(place[name], "pt") as file:
                    values.append(file.get_tensor(name))
            else:
                values.append(None)
        yield name, *values


def compared(ours: Path, theirs: Path, models: Path, method: str, out: Path) -> None:
    out.write_text(json.dumps(agreement(ours, theirs, models, method)))


def measure(method: str, folder: Path, data: Path, mergekit: Path, repeats: int, recipe: dict[str, Any]) -> Any:
    """Run both programs in turn on one recipe."""
    random = CASES[method][1]
    file = data / f"{method}.yml"
    file.write_text(json.dumps(recipe, indent=2), "utf-8")  # JSON is YAML
    outs = {"gradmerge": data / "ours", "mergekit": data / "theirs"}
    commands = {
        "gradmerge": [sys.executable, "-m", "gradmerge", "merge", str(file), "--quiet", "-o", str(outs["gradmerge"])],
        "mergekit": [str(mergekit), *BEST_FLAGS, "--no-copy-tokenizer", "--quiet", str(file), str(outs["mergekit"])],
    }
    warm(folder / name for name in MODELS)
    runs: dict[str, list[Timed]] = {program: [] for program in commands}
    for _ in range(repeats):
        for program, command in commands.items():
            runs[program].append(timed(program, command, outs[program]))
    apart(compared, *outs.values(), folder, method, data / "agreement.json")
    agree = json.loads((data / "agreement.json").read_text("utf-8"))
    wall = {program: statistics.median(run.wall_s for run in found) for program, found in runs.items()}
    row = {
        "method": method,
        "runs": repeats,
        "wall_s": wall,
        "peak_rss_gib": {program: max(run.peak_rss_bytes for run in found) / GIB for program, found in runs.items()},
        "times_as_fast": wall["mergekit"] / wall["gradmerge"],
        "random": random,
        "agreement": agree,
        "equal": agree >= (0.99 if random else 0.999),
    }
    say(f"{method}: {row['times_as_fast']:.1f} times as fast, agreement {agree:.6f}")
    return row


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder for models and outputs")
    parser.add_argument("--mergekit", type=Path, required=True, help="mergekit-yaml of an environment of its own")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model; 4 are 0.31 B parameters, 22 1.1 B")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each program")
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}")
    data, mergekit, layers = options.data.absolute(), options.mergekit.absolute(), options.layers
    folder = data / f"llama-{layers}-layers"
    apart(make_small, folder, layers)
    compiled()
    rows, failures = [], []
    for case in cases:
        try:
            rows.append(measure(case, folder, data, mergekit, options.repeats, recipe(case, folder, layers)))
        except (RunFailed, OSError) as error:
            failures.append(f"{case}: {error}")
            say(f"FAILED: {failures[-1]}")
    failures += [f"{row['method']}: the results differ" for row in rows if not row["equal"]]
    write_report(
        options.json or data / "same_work.json",
        cores=machine()["cores"],
        versions=versions() | {"mergekit": mergekit_versions(mergekit)},
        layers=layers,
        parameters=parameters_of(folder / "base"),
        rows=rows,
        failures=failures,
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
