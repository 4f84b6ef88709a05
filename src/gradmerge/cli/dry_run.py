"""The plan of a merge, for people and for machines."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..api import merging
from ..checkpoints.published import all_published
from ..checkpoints.sidecars import sidecars
from ..curvature.needs import Rate
from ..engine.calibration import measure_speeds, share_away
from ..engine.coefficients import coefficient_notes
from ..engine.costs import MergeCost, checked_rate, cost_of
from ..engine.front_matter import licence_notes
from ..engine.penalties import used
from ..engine.plan import Plan
from ..engine.trust import trust_notes
from ..errors import InputError
from ..recipe import Recipe, in_words, plain
from ..storage.tensorwriter import split_into_shards
from ..text import count, duration, size
from ..urls import is_url
from .estimate import EstimatePlanning
from .merge import MergeOptions
from .options import PlanningOptions
from .output import continued, print_json, print_table
from .streams import say


def print_plan(
    recipe: Recipe, out: Path | None, device: str, options: MergeOptions, planning: PlanningOptions, as_json: bool
) -> None:
    """What a merge would read and write, and what it would cost."""
    disk = checked_rate("disk-rate", planning.disk_rate)
    network = checked_rate("network-rate", planning.network_rate)
    nodes, threads = planning.nodes or 1, options.threads or merging.default_threads()
    on_ray = nodes > 1 or options.engine == "ray"
    workers = (options.workers or nodes * max(1, merging.cores() // threads)) if on_ray else 1
    if workers < nodes:
        raise InputError(f"--workers {workers}: fewer than the {nodes} nodes; each has one or more")
    allowed = {key: options.as_keywords()[key] for key in ("allow_pickle", "allow_config", "dequantize")}
    adapter = recipe.output.format == "adapter"
    with merging.planned(recipe, **allowed) as plan:
        damping = plan.damping_read  # none any more once it is found
        plan.note(trust_notes(plan, threads))
        plan.note(coefficient_notes(recipe, plan, threads))
        plan.note(licence_notes(all_published(plan.inputs.checkpoints), recipe.output.license))
        rank = recipe.output.rank if adapter else None
        speeds, guessed = measure_speeds(plan, threads=threads, device=device, disk=disk, network=network, rank=rank)
        shared = nodes > 1 or network is not None
        cost = cost_of(
            plan,
            speeds,
            nodes=nodes,
            workers=workers,
            threads=threads,
            away=(1.0, 1.0) if shared else (share_away(plan), float(out is not None and is_url(out))),
            guessed=guessed,
            beside=sidecars(plan.inputs.template).nbytes,
            adapter=adapter,
            damping=damping,
        )
        facts = _facts(recipe, plan, cost, out, threads)
    if as_json:
        print_json(facts)
    else:
        _say(plan, facts, cost)


def _facts(recipe: Recipe, plan: Plan, cost: MergeCost, out: Path | None, threads: int) -> dict[str, Any]:
    inputs, adapter = plan.inputs, recipe.output.format == "adapter"
    outputs = [plan.tensors, *([plan.precision_tensors] if plan.write_precision else [])]
    files = 1 if adapter else sum(len(split_into_shards(t, recipe.output.shard_size)) for t in outputs)
    sources: list[dict[str, Any]] = [
        {"source": c.label, "kind": c.kind, "bytes": c.nbytes, "parameters": c.parameters} for c in inputs.checkpoints
    ]
    for c in inputs.curvatures:
        sources.append({"source": c.label, "kind": "curvature", "bytes": sum(c.nbytes(j.name) for j in plan.merged)})
    return {
        "method": recipe.method,
        "options": {name: plain(value) for name, value in inputs.options.items()},
        "inputs": sources,
        "merged_tensors": len(plan.merged),
        "copied_tensors": len(plan.jobs) - len(plan.merged),
        **used(recipe, plan),
        "bytes_read": cost.read,
        "bytes_written": None if adapter else plan.total_written,
        "output": str(out) if out else None,
        "output_files": files,
        "threads": threads,
        "memory": cost.memory,
        **cost.to_json(),
        "bytes_free": _free(out),
        "notes": plan.notes,
    }


def _free(out: Path | None) -> int | None:
    """Bytes that are free where the result would go."""
    if out is None or is_url(out):
        return None
    there = next((folder for folder in (out, *out.absolute().parents) if folder.is_dir()), None)
    return shutil.disk_usage(there).free if there else None


def _say(plan: Plan, facts: dict[str, Any], cost: MergeCost) -> None:
    say(f"{facts['method']}: {plan.rule.summary}")
    if plan.inputs.options:
        say("options: " + ", ".join(f"{k}={in_words(v)}" for k, v in plan.inputs.options.items()))
    rows = [
        [s["source"], s["kind"], count(s["parameters"]) if "parameters" in s else "", size(s["bytes"])]
        for s in facts["inputs"]
    ]
    print_table(["input", "kind", "parameters", "size"], rows, right=(2, 3))
    copied = f"{facts['copied_tensors']} copied from {plan.inputs.template.label}"
    say(f"tensors: {facts['merged_tensors']} merged, {copied}")
    if "damping" in facts:
        say(f"damping: {facts['damping']:g}")
    if "damping_of_layers" in facts:
        say(f"         {facts['damping_of_layers']}, where it has Kronecker curvature")
    for one in facts.get("penalty", ()):
        say(f"penalty: {one['penalty']} for {one['model']} ({one['from']})")
    passes, files = cost.passes, facts["output_files"]
    each = ", ".join(f"{size(one.read)} for {one.what}" for one in passes)
    say(f"reads:   {size(cost.read)}" + (f" in {len(passes)} passes: {each}" if len(passes) > 1 else " in one pass"))
    written = f"{size(plan.total_written)} in {files} file{'s' if files > 1 else ''}"
    place = f" → {facts['output']}" if facts["output"] else ""
    say(f"writes:  {'one LoRA adapter' if facts['bytes_written'] is None else written}{place}")
    threads, on = facts["threads"], f" in each of {cost.workers} worker processes" if cost.workers > 1 else ""
    say(f"memory:  about {size(cost.memory)} with {threads} thread{'s' if threads > 1 else ''}{on}")
    if facts["bytes_written"] is not None:
        free = f", of {size(facts['bytes_free'])} that are free" if facts["bytes_free"] is not None else ""
        say(f"disk:    {size(cost.disk)} for the result until it has its name{free}")
    if cost.network:
        say(f"network: {size(cost.network)}, {size(cost.network / cost.nodes)} through each node's connection")
    say_time(cost.seconds, cost.limit, f"{cost.nodes} node{'s' if cost.nodes > 1 else ''}")
    speeds = cost.speeds
    say(f"assumed: disk {size(speeds.disk.amount)}/s, {speeds.disk.source}")
    if cost.network and speeds.network is not None:
        say(f"         network {size(speeds.network.amount)}/s for each node, {speeds.network.source}")
    each = " for each worker" if cost.workers > 1 else ""
    for rate, what in ((speeds.entries, ""), (speeds.statistics, " for statistics")):
        if rate is not None:
            say(f"         cpu {count(round(rate.amount))} entries/s{what}{each}, {rate.source}")
    if (solving := speeds.solving) is not None:
        say(f"         cpu {count(round(solving.amount))} multiplications/s in whole layers, {solving.source}")
    for text in plan.notes:
        say(f"note: {continued(text)}")


def say_time(seconds: Mapping[str, float], limit: str, where: str) -> None:
    """The total, what each part would take alone, and which one decides."""
    alone = ", ".join(f"{name} {duration(seconds[name])}" for name in seconds if name not in ("total", "start"))
    say(f"time:    about {duration(seconds['total'])} on {where}; alone {alone}: the {limit} is the limit")


def print_forecast(
    model: str, data: str, out: Path | None, given: dict[str, Any], planning: EstimatePlanning, as_json: bool
) -> None:
    """What estimating curvature would need; ``given`` are all options of the estimate itself."""
    from ..api.forecasting import forecast_estimate

    nodes, per_node = planning.nodes or 1, planning.processes or 1
    if planning.memory is not None and not 0 < planning.memory < float("inf"):
        raise InputError(f"--memory {planning.memory:g}: GB that the device of a process has, more than 0")
    compute = checked_rate("compute-rate", planning.compute_rate, "TFLOP/s")
    kind, batch_size = given["kind"], given["batch_size"]
    found = forecast_estimate(
        model,
        data,
        nodes=nodes,
        per_node=per_node,
        compute=None if compute is None else Rate(compute.amount * 1e3, compute.source),
        disk=checked_rate("disk-rate", planning.disk_rate),
        network=checked_rate("network-rate", planning.network_rate),
        memory=None if planning.memory is None else round(planning.memory * 1e9),
        **{name: value for name, value in given.items() if name not in ("seed", "resume", "force", "durable")},
    )
    free = _free(out)
    if as_json:
        asked = {"model": model, "data": data, "out": str(out) if out else None, "kind": kind}
        print_json({**asked, **found.to_json(), "bytes_free": free})
        return
    cost, shapes = found.cost, found.cost.shapes
    say(f"model:   {count(shapes.parameters)} parameters to estimate, {size(shapes.weights)} in {found.dtype}")
    batches = f", {cost.batches:,} batch{'es' if cost.batches > 1 else ''} of {batch_size}"
    batches += f" for each of {cost.processes} processes" if cost.processes > 1 else ""
    tokens = f"{count(cost.tokens)} tokens with padding, " if cost.tokens != cost.examples else ""
    say(f"data:    {cost.examples:,} examples, {tokens}{found.task}{batches}")
    kinds = {"gram": "Gram matrices", "kronecker": "Kronecker factors, and diagonals of the rest"}
    say(f"sums:    {size(shapes.sums)}, {kinds.get(kind, '4 bytes for each parameter')}")
    parts = ", ".join(f"{name} {size(value)}" for name, value in cost.memory.items() if value and name != "total")
    say(f"memory:  {size(cost.memory['total'])} on {found.device} for each process: {parts}")
    room = f"the {size(found.available)} that are there ({found.available_from})"
    say(f"         {'fits into' if found.fits else 'does NOT fit into'} {room}")
    if cost.memory_cpu:
        say(f"         {size(cost.memory_cpu)} of the computer for each process, while it loads and writes")
    say(f"disk:    {size(cost.disk)}" + (f", of {size(free)} that are free" if free is not None else ""))
    if cost.network:
        say(f"network: {size(cost.network)}, {size(cost.network / cost.nodes)} through each node's connection")
    where = f"{nodes} node{'s' if nodes > 1 else ''} with {per_node} process{'es' if per_node > 1 else ''}"
    say_time(cost.seconds, cost.limit, where + (" each" if nodes > 1 else ""))
    for number, (name, rate) in enumerate(cost.rates.items()):
        shown = f"{rate.amount / 1e12:.3g} TFLOP/s" if name == "compute" else f"{size(rate.amount)}/s"
        each = " for each node" if name == "network" else ""
        say(f"{'         ' if number else 'assumed: '}{name} {shown}{each}, {rate.source}")
    if not found.fits:
        say(f"note: {WHAT_ELSE}")
    for text in found.notes:
        say(f"note: {continued(text)}")


WHAT_ELSE = (
    "what helps, from the cheapest: a smaller --batch-size, --max-length, --dtype bfloat16, sums that are kept "
    "elsewhere (--sums cpu), more processes that share the model (--shard)"
)
