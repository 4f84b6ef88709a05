"""What Kronecker curvature does for gradient matching: accuracy and loss of merges, beside diagonals and other methods.

    python -m benchmarks.kronecker --demo demo0 --demo demo1 --small demo0 --json benchmarks/results/kronecker.json

takes folders that `gradmerge demo --seed N -o DIR` made (``--small`` tunes a network of 1,510 parameters on the data of
one, under the penalty and to the end, as the rule assumes). For other models:

    python -m benchmarks.kronecker --name sentiment --base B --model yelp=DIR --model sst2=DIR --joint DIR \\
        --data base=SRC --data yelp=SRC --data sst2=SRC --valid yelp=SRC … --test yelp=SRC … --limit 2000

``--data`` is what curvature is estimated on, ``--valid`` what task arithmetic's weight is chosen on. Estimates go to
``--work`` and are used again. A run's rows replace those of the same name in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.demo.digits import read_array

TASKS = ("tilted", "thick", "blurred")
LIKELIHOODS = ("empirical", "sampled", "exact")
#: Damping of a Kronecker merge, as shares of a layer's mean curvature; `auto` is one of them.
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
#: P · I of the small network.
PENALTY = 1.0


@dataclass
class Run:
    """Models, and data by the names of tasks; `base` is the base's."""

    name: str
    base: str
    models: dict[str, str]
    data: dict[str, str]
    valid: dict[str, str]
    test: dict[str, str]
    joint: str | None
    work: Path
    likelihoods: Sequence[str]
    loading: dict[str, Any]
    estimating: dict[str, Any]

    def places(self) -> dict[str, str]:
        return {"base": self.base, **self.models}

    def curvature(self, name: str, kind: str, likelihood: str = "empirical") -> str:
        out = self.work / f"{kind}-{likelihood}-{name}"
        if not out.is_dir():
            options = {**self.loading, **self.estimating}
            given = {} if kind == "gram" else {"likelihood": likelihood}
            gm.estimate_curvature(
                self.places()[name], self.data[name], out=out, kind=kind, progress=False, **given, **options
            )
        return str(out.absolute())

    def recipe(self, method: str, kind: str = "", likelihood: str = "empirical", **more: Any) -> dict[str, Any]:
        """All models at weight 1, with the curvature of one kind."""
        base: dict[str, Any] = {"model": self.base, **more.pop("base", {})}
        models: list[dict[str, Any]] = [{"model": place} for place in self.models.values()]
        if kind:
            for name, model in zip(self.models, models, strict=True):
                model["curvature"] = self.curvature(name, kind, likelihood)
        if method == "gradient-matching":
            base["curvature"] = self.curvature("base", kind, likelihood)
        return {"method": method, "base": base, "models": models, **more}

    def merged(self, recipe: Mapping[str, Any], device: str) -> dict[str, float]:
        begun = time.perf_counter()
        gm.merge(dict(recipe), self.work / "merged", force=True, progress=False, device=device)
        seconds = time.perf_counter() - begun
        return self.evaluated(str(self.work / "merged")) | {"merge_s": round(seconds, 2)}

    def evaluated(self, model: str) -> dict[str, float]:
        found = [gm.evaluate(model, source, progress=False, **self.loading) for source in self.test.values()]
        return {"accuracy": mean(m["accuracy"] for m in found), "loss": mean(m["loss_per_example"] for m in found)}

    def best_weight(self) -> float:
        """Of task arithmetic, by mean accuracy on validation rows."""
        recipe = self.recipe("task-arithmetic")
        seen = gm.preview(recipe, weights="0.1:1:0.1", data=self.valid, progress=False, **self.loading)
        return float(max(seen.rows, key=lambda row: row.score if row.score is not None else -1.0).setting.weights[0])


def cases(run: Run) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name → recipe, in the order of the table."""
    yield "average", lambda: run.recipe("average")
    if run.valid:
        weight = run.best_weight()
        tuned = run.recipe("task-arithmetic")
        yield (
            f"task-arithmetic, tuned: {weight:g}",
            lambda: tuned | {"models": [m | {"weight": weight} for m in tuned["models"]]},
        )
    yield "regmean", lambda: run.recipe("regmean", "gram")
    none = {"penalty": "none"}
    yield "diagonal", lambda: run.recipe("gradient-matching", "diagonal")
    yield "diagonal, penalty none", lambda: run.recipe("gradient-matching", "diagonal", base=none)
    for likelihood in run.likelihoods:
        yield (
            f"kronecker, {likelihood}",
            lambda how=likelihood: run.recipe("gradient-matching", "kronecker", how),  # type: ignore[misc]
        )
    last = run.likelihoods[-1]
    yield (
        f"kronecker, {last}, penalty none",
        lambda: run.recipe("gradient-matching", "kronecker", last, base=none),
    )


def measure(run: Run, device: str) -> dict[str, Any]:
    rows: dict[str, Any] = {"base": run.evaluated(run.base)}
    for name, recipe in cases(run):
        rows[name] = run.merged(recipe(), device)
        report(run.name, name, rows[name])
    last = run.likelihoods[-1]
    for share in SHARES:
        name = f"kronecker, {last}, damping {share:g} × mean"
        with mock.patch("gradmerge.engine.jobs.LAYER_DAMPING", share):
            rows[name] = run.merged(run.recipe("gradient-matching", "kronecker", last), device)
        report(run.name, name, rows[name])
    if run.joint:
        rows["joint training"] = run.evaluated(run.joint)
    return rows


def removals(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Taking `tilted` out of the model of all tasks: accuracy on it and, as mean, on the rest."""
    loading: Any = {"task": "image", "device": args.device, "batch_size": args.batch_size, "progress": False}
    work = args.work / folder.name
    models = {"rest": folder / "models" / "joint", "tilted": folder / "models" / "joint-tilted"}
    recipes: dict[str, dict[str, Any]] = {
        "negation": {
            "method": "task-arithmetic",
            "base": str(models["rest"]),
            "models": [{"model": str(models["tilted"]), "weight": -1.0}],
        }
    }
    for kind in ("diagonal", "kronecker"):
        made = {name: work / f"{kind}-removal-{name}" for name in models}
        for name, out in made.items():
            if not out.is_dir():
                data = f"{folder / 'data' / name}.npz:train"
                gm.estimate_curvature(models[name], data, "exact", out=out, kind=kind, **loading)
        base, tuned = ({"model": str(models[n]), "curvature": str(made[n].absolute())} for n in models)
        recipes[f"removal, {kind}"] = {"method": "removal", "base": base, "models": [tuned]}
    places = {"before": models["rest"]}
    for name, recipe in recipes.items():
        places[name] = work / "removed" / name.replace(", ", "-")
        places[name].parent.mkdir(parents=True, exist_ok=True)
        gm.merge(recipe, places[name], force=True, progress=False, device=args.device)
    places["never tuned on it"] = folder / "models" / "without-tilted"
    found = {}
    for name, place in places.items():
        right = {
            task: gm.evaluate(place, f"{folder / 'data' / task}.npz:test", **loading)["accuracy"]
            for task in ("upright", *TASKS)
        }
        removed = right.pop("tilted")
        found[name] = {"removed": removed, "rest": mean(right.values())}
        print(f"{folder.name:12} {name:44} {100 * removed:6.2f} {100 * found[name]['rest']:6.2f}", flush=True)
    return found


def report(run: str, name: str, row: Mapping[str, float]) -> None:
    print(f"{run:12} {name:44} {100 * row['accuracy']:6.2f} {row['loss']:8.4f}", flush=True)


def small_network(demo: Path, seed: int) -> dict[str, Any]:
    """64 → 20 → 10, tuned under ½ · PENALTY · ‖θ − θ_0‖² until nothing moves: what the rule takes for granted.

    The base is trained under the same penalty, from random weights. Joint training goes on from it, without its data.
    """

    def rows(task: str, split: str) -> tuple[Tensor, Tensor]:
        file = demo / "data" / f"{task}.npz"
        images = torch.from_numpy(read_array(file, f"x_{split}")).double().div(255).sub(0.5).div(0.5)
        return images.flatten(1), torch.from_numpy(read_array(file, f"y_{split}"))

    def trained(start: nn.Sequential, parts: Sequence[tuple[Tensor, Tensor]], strength: float) -> nn.Sequential:
        model = new_network()
        model.load_state_dict(start.state_dict())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        solver = torch.optim.LBFGS(
            model.parameters(), max_iter=1000, tolerance_grad=1e-7, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            solver.zero_grad()
            loss = sum(nn.functional.cross_entropy(model(x), y, reduction="sum") for x, y in parts)
            moved = sum((p - b).square().sum() for p, b in zip(model.parameters(), before, strict=True))
            total = torch.as_tensor(loss + 0.5 * strength * moved)
            total.backward()  # type: ignore[no-untyped-call]
            return total

        solver.step(closure)  # type: ignore[no-untyped-call]
        return model

    def evaluated(state: Mapping[str, Tensor]) -> dict[str, float]:
        model = new_network()
        model.load_state_dict(dict(state))
        outputs = [(model(x).detach(), y) for x, y in tests]
        return {
            "accuracy": mean(float((out.argmax(1) == y).double().mean()) for out, y in outputs),
            "loss": mean(float(nn.functional.cross_entropy(out, y)) for out, y in outputs),
        }

    torch.manual_seed(seed)
    tests = [rows(task, "test") for task in ("upright", *TASKS)]
    base = trained(new_network(), [rows("upright", "train")], PENALTY)
    tasks = [rows(task, "train") for task in TASKS]
    tuned = [trained(base, [part], PENALTY) for part in tasks]
    states = [dict(model.state_dict()) for model in tuned]
    found: dict[str, Any] = {"base": evaluated(base.state_dict())}
    start = dict(base.state_dict())
    by_weight = {
        weight / 20: evaluated(gm.merge_state_dicts(start, states, "task-arithmetic", weights=[weight / 20] * 3))
        for weight in range(1, 21)
    }
    best = min(by_weight, key=lambda weight: by_weight[weight]["loss"])
    found[f"task-arithmetic, best on the test rows: {best:g}"] = by_weight[best]
    for kind in ("diagonal", "kronecker"):
        prior, *curvature = (
            gm.estimate_curvature(model, [part], "exact", output="classes", kind=kind, progress=False)
            for model, part in zip([base, *tuned], [rows("upright", "train"), *tasks], strict=True)
        )
        settings: dict[str, dict[str, Any]] = {
            "H_0 = P = I": {"prior": PENALTY},
            "H_0 = F_0 + I, P = I": {"prior": prior, "penalty": PENALTY, "damping": PENALTY},
            "H_0 = F_0 + I, penalty none": {"prior": prior, "penalty": "none", "damping": PENALTY},
            "H_0 = F_0 + I = P": {"prior": prior, "damping": PENALTY},
            "H_0 = F_0 + δ = P, all by default": {"prior": prior},
        }
        for name, setting in settings.items():
            merged = gm.merge_state_dicts(start, states, curvature=curvature, **setting)
            found[f"{kind}, {name}"] = evaluated(merged)
    found["joint training"] = evaluated(trained(base, tasks, PENALTY).state_dict())
    for name, row in found.items():
        report(f"small {seed}", name, row)
    return found


def new_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10)).double()


def of_demo(folder: Path, args: argparse.Namespace) -> Run:
    def data(split: str) -> dict[str, str]:
        files = {"base": "upright", **{task: task for task in TASKS}}
        return {name: f"{folder / 'data' / file}.npz:{split}" for name, file in files.items()}

    models = {task: str(folder / "models" / task) for task in TASKS}
    places: Any = {"base": str(folder / "models" / "base"), "models": models, "joint": str(folder / "models" / "joint")}
    loading = {"task": "image", "device": args.device, "batch_size": args.batch_size}
    splits: Any = {"data": data("train"), "valid": data("valid"), "test": data("test")}
    work = args.work / folder.name
    return Run(folder.name, **places, **splits, work=work, likelihoods=LIKELIHOODS, loading=loading, estimating={})


def of_options(args: argparse.Namespace) -> Run:
    def named(texts: Sequence[str]) -> dict[str, str]:
        return dict(text.split("=", 1) for text in texts)

    loading: dict[str, Any] = {"device": args.device, "batch_size": args.batch_size}
    loading |= {"task": args.task} if args.task else {}
    return Run(
        name=args.name,
        base=args.base,
        models=named(args.model),
        data=named(args.data),
        valid=named(args.valid),
        test=named(args.test),
        joint=args.joint,
        work=args.work / args.name,
        likelihoods=args.likelihood or LIKELIHOODS,
        loading=loading,
        estimating={"limit": args.limit} if args.limit else {},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, action="append", default=[], help="folder of `gradmerge demo`")
    parser.add_argument("--small", type=Path, action="append", default=[], help="the same, for the small network")
    parser.add_argument("--name", help="of a run with models of your own; what follows is for it")
    parser.add_argument("--base")
    for option in ("model", "data", "valid", "test"):
        parser.add_argument(f"--{option}", action="append", default=[], metavar="NAME=…")
    parser.add_argument("--joint", help="a model trained on everything")
    parser.add_argument("--likelihood", action="append", choices=LIKELIHOODS, help="the last gets the sweeps")
    parser.add_argument("--limit", type=int, help="rows of each task that curvature is estimated on")
    parser.add_argument("--task")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=Path("bench-data/kronecker"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for seed, folder in enumerate(args.small):
        found[f"small network, {folder.name}"] = {"rows": small_network(folder, seed)}
    for run in [*(of_demo(folder, args) for folder in args.demo), *([of_options(args)] if args.name else [])]:
        run.work.mkdir(parents=True, exist_ok=True)
        found[run.name] = {"rows": measure(run, args.device)}
    for folder in args.demo:
        found[folder.name]["removals"] = removals(folder, args)
    if args.json:
        kept: dict[str, Any] = {"command": "python -m benchmarks.kronecker"}
        kept |= json.loads(args.json.read_text()) if args.json.is_file() else {}
        machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
        facts = {"device": machine, "torch": torch.__version__, "gradmerge": gm.__version__}
        kept.setdefault("runs", {}).update({name: facts | tables for name, tables in found.items()})
        args.json.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
