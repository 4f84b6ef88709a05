"""One seed of the recovery experiment: train, merge, calibrate and distill, and evaluate everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import gradmerge as gm
from gradmerge.curvature.checkpoint_names import stored_sources

from .robustness import Variant, calibrate_variant, variants
from .settings import Settings
from .workloads import State, Workload

#: Settings that are compared with the defaults by ``--sweep``.
ALPHAS_AND_RIDGES = ((0.25, 0.05), (1.0, 0.3), (1.0, 0.05), (1.0, 0.01))


class Recorder:
    """Evaluates states, and collects what ``results.json`` holds."""

    def __init__(self, workload: Workload, save: Callable[[dict[str, Any]], None]) -> None:
        self.workload, self.save = workload, save
        self.results: dict[str, Any] = {}

    def add(self, name: str, make: Callable[[], State], tasks: Sequence[str] = (), **facts: Any) -> State:
        """Run, time and evaluate, by default on all tasks."""
        state, seconds, memory = self._measured(make)
        self.results[name] = {
            "tasks": self.workload.evaluate(state, tasks=tasks),
            "seconds": seconds,
            "peak_gpu_bytes": memory,
            **facts,
        }
        self.save(self.results)
        values = [task[self.workload.metric] for task in self.results[name]["tasks"].values()]
        print(f"{name:48} {sum(values) / len(values):8.4f}  {seconds:7.1f} s", flush=True)
        return state

    def _measured(self, make: Callable[[], State]) -> tuple[State, float, int | None]:
        cuda = self.workload.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        state = make()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        return state, seconds, torch.cuda.max_memory_allocated() if cuda else None


def run_seed(
    workload: Workload,
    settings: Settings,
    save: Callable[[dict[str, Any]], None],
    sweep: bool = False,
    robustness: bool = False,
) -> dict[str, Any]:
    """Return name → results of one seed."""
    record, tasks = Recorder(workload, save), list(settings.tasks)
    start, own = workload.state(), {}
    base = start
    if settings.base_learning_rate:
        base = workload.train(start, tasks[:1], settings.base_learning_rate)
    record.add("base", lambda: base)
    joint = record.add("joint training", lambda: workload.train(base, tasks))
    del joint
    tuned: dict[str, State] = {}
    for number, task in enumerate(tasks):
        known = settings.base_learning_rate > 0 and number == 0  # the base is the fine-tuned model of the first task
        name = f"fine-tuned on {task}"
        tuned[task] = record.add(name, lambda t=task, k=known: base if k else workload.train(base, [t]), [task])  # type: ignore[misc]
        own[task] = record.results[name]["tasks"][task]
    record.results["fine-tuned, each on its own task"] = {"tasks": own}
    record.results["fine-tuned, each on its own task"]["rms_change"] = {
        task: float(
            torch.cat([(state[n] - base[n]).flatten() for n in base if base[n].dim() > 1]).square().mean().sqrt()
        )
        for task, state in tuned.items()
    }
    merges = dict(_merges(record, workload, settings, base, tuned))
    anchor = merges[settings.anchor]
    _recover(record, workload, settings, anchor, tuned, sweep)
    if robustness:
        for variant in variants(settings):
            _add_variant(record, workload, settings, variant, merges, tuned)
    return record.results


def _add_variant(
    record: Recorder,
    workload: Workload,
    settings: Settings,
    variant: Variant,
    merges: Mapping[str, State],
    tuned: Mapping[str, State],
) -> None:
    facts: dict[str, Any] = {}

    def run() -> State:
        state, found = calibrate_variant(workload, settings, variant, merges, tuned)
        facts.update(found)
        return state

    name = f"robustness: {variant.name}"
    record.add(name, run)
    record.results[name].update(facts)


def _merges(
    record: Recorder, workload: Workload, settings: Settings, base: State, tuned: Mapping[str, State]
) -> Iterator[tuple[str, State]]:
    """Merge with several methods."""
    device, models = str(workload.device), list(tuned.values())
    states = [{name: value.cpu() for name, value in state.items()} for state in (base, *models)]

    def merged(method: str, weight: float = 1.0, **options: Any) -> State:
        found = gm.merge_state_dicts(
            states[0], states[1:], method, weights=[weight] * len(models), device=device, **options
        )
        return {name: value.to(workload.device) for name, value in found.items()}

    yield "average", record.add("average", lambda: merged("average"))
    scores = {}
    for weight in settings.task_arithmetic:
        found = workload.evaluate(merged("task-arithmetic", weight), "validation").values()
        values = [task[workload.metric] for task in found]
        scores[weight] = sum(values) / len(values) * (-1 if workload.metric == "loss" else 1)
    best = max(scores, key=scores.__getitem__)
    name = "task arithmetic, weight chosen on validation rows"
    yield name, record.add(name, lambda: merged("task-arithmetic", best), weight=best)
    for method in ("ties", "iso-c", "tsv"):
        yield method, record.add(method, lambda m=method: merged(m))  # type: ignore[misc]

    def regmean() -> State:
        return merged("regmean", curvature=[_gram(workload, state, task) for task, state in tuned.items()])

    yield "regmean", record.add("regmean", regmean)
    begun = time.perf_counter()
    curvature = [_fisher(workload, state, task) for task, state in tuned.items()]
    prior = _fisher(workload, base, next(iter(tuned)))
    seconds = time.perf_counter() - begun
    for method, options in (("fisher-averaging", {}), ("gradient-matching", {"prior": prior})):
        yield (
            method,
            record.add(
                method,
                lambda m=method, o=options: merged(m, curvature=curvature, **o),  # type: ignore[misc]
                curvature_seconds=seconds,
            ),
        )


def _labeled(workload: Workload, task: str) -> list[Any]:
    return workload.labeled(task, workload.settings.distillation_batch)


def _gram(workload: Workload, state: State, task: str) -> dict[str, Any]:
    """Estimate XᵀX of every linear layer, under the names of the module's parameters instead of the files'."""
    module = workload.module(state, task)
    names = stored_sources(module)
    found = gm.estimate_curvature(module, _labeled(workload, task), kind="gram", progress=False)
    return {names[name]: value for name, value in found.items()}


def _fisher(workload: Workload, state: State, task: str) -> Any:
    return gm.estimate_curvature(workload.module(state, task), _labeled(workload, task), progress=False)


def _recover(
    record: Recorder,
    workload: Workload,
    settings: Settings,
    anchor: State,
    tuned: Mapping[str, State],
    sweep: bool,
) -> None:
    """Calibrate and distill the anchor."""
    tasks = list(tuned)
    teachers = {task: workload.module(state, task) for task, state in tuned.items()}
    for teacher in teachers.values():
        teacher.requires_grad_(False)

    def rows(batch_size: int) -> dict[str, Any]:
        return {task: workload.unlabeled(task, batch_size) for task in tasks}

    def calibrate(**options: Any) -> Callable[[], State]:
        def run() -> State:
            done = gm.calibrate(
                workload.module(anchor, tasks[0]),
                rows(settings.calibration_batch),
                teachers=teachers,
                progress=False,
                **options,
            )
            facts.update(chosen=done.chosen, notes=list(map(str, done.notes)))
            return workload.state_of(done.model)

        return run

    def distill(start: State, **options: Any) -> Callable[[], State]:
        def run() -> State:
            done = gm.distill(
                workload.module(start, tasks[0]),
                rows(settings.distillation_batch),
                teachers=teachers,
                seed=workload.seed,
                progress=False,
                **options,
            )
            training = done.distillation
            facts.update(match=training.match, steps=training.steps, lr=training.lr, best_step=training.best_step)
            facts.update(held_out=training.mean_losses)
            return workload.state_of(done.model)

        return run

    facts: dict[str, Any] = {}

    def add(name: str, make: Callable[[], State]) -> State:
        facts.clear()
        state = record.add(name, make)
        record.results[name].update(facts)
        return state

    calibrated = add("calibrate --curvature none", calibrate(curvature="none"))
    if sweep:
        for alpha, ridge in ALPHAS_AND_RIDGES:
            name = f"calibrate --curvature none, alpha {alpha:g}, ridge {ridge:g}"
            add(name, calibrate(curvature="none", alpha=alpha, ridge=ridge))
        add("calibrate, alpha 1, ridge 0.05", calibrate(alpha=1.0, ridge=0.05))
    chosen = add("calibrate", calibrate())
    add("distill", distill(anchor))
    add("calibrate --curvature none, distill", distill(calibrated))
    rate = record.results["calibrate --curvature none, distill"]["lr"]
    add("calibrate, distill", distill(chosen))
    if sweep:
        for factor in settings.rate_factors:
            add(f"calibrate --curvature none, distill, lr x {factor:g}", distill(calibrated, lr=factor * rate))
