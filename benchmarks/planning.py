"""What merging and measuring cost at 8 B, 70 B and 405 B parameters by our arithmetic, and how that fares at 1 B.

    python -m benchmarks.planning --data DIR/llama-22-layers --json benchmarks/results/planning.json

Models of Llama 3.1's shapes are made as files that have headers and no data (holes), and as modules without values: the
plans are those that `--dry-run` makes. Rates of the processor are those of `results/merge.json`, and those of the GPU
of `results/curvature-cuda-llama-1b.json`. With `--data` (as `python -m benchmarks.merge` makes it), plans are held
against real merges: bytes that the system has counted, peak memory, and seconds; without it, the checks that the JSON
file has are kept. `python -m docs.pages` writes the tables into docs/large-models.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradmerge.api.merging import default_threads, planned
from gradmerge.curvature.files import metadata
from gradmerge.curvature.losses import LOSSES
from gradmerge.curvature.needs import Rate, activations_of, batch_needs, estimate_cost, shapes_of
from gradmerge.engine.calibration import USUAL_NETWORK, measure_speeds
from gradmerge.engine.costs import START, Speeds, cost_of
from gradmerge.storage.tensorfile import header_bytes

RESULTS = Path(__file__).parent / "results"
#: Llama 3.1: hidden size, layers, heads, key-value heads, intermediate size, vocabulary. From table 3 of "The Llama 3
#: Herd of Models" (arXiv 2407.21783); the intermediate sizes are those of the published configs.
LLAMA = {
    "8 B": (4096, 32, 32, 8, 14336, 128256),
    "70 B": (8192, 80, 64, 8, 28672, 128256),
    "405 B": (16384, 126, 128, 8, 53248, 128256),
}
SMALL = {"1.1 B": (2048, 22, 32, 4, 5632, 32000)}
METHODS = ("task-arithmetic", "ties", "gradient-matching")
#: Nodes, and GB/s of the storage for all of them and of each one's connection (0: a disk of its own).
CLUSTERS = ((1, 1.0, 0.0), (1, 5.0, 0.0), (8, 10.0, 1.25), (32, 50.0, 3.0))
#: Tokens of a batch's examples, and examples of all the data.
TOKENS, BATCH, EXAMPLES = 1024, 1, 1000
#: Devices: processes on how many nodes of how many, and whether they share the model.
FLEETS = {"8 B": (1, 1, False), "70 B": (1, 8, True), "405 B": (8, 8, True)}


def config_of(shape: tuple[int, ...]) -> Any:
    from transformers import LlamaConfig

    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return LlamaConfig(**dict(zip((*names, "vocab_size"), shape, strict=True)), max_position_embeddings=131072)


def outline(config: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, FakeTensorMode]:
    from transformers import AutoModelForCausalLM

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with mode:
        model.eval().to_empty(device="cpu")
        model.tie_weights()
    return model, mode


def hollow(folder: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], stem: str, facts: dict[str, str]) -> None:
    """A file that has a header, and a hole in place of its data."""
    folder.mkdir(parents=True)
    first, places = header_bytes(tensors, facts)
    last = list(places.values())[-1]
    with (folder / f"{stem}.safetensors").open("wb") as file:
        file.write(first)
        file.truncate(last.start + last.nbytes)


def hollow_recipe(root: Path, shape: tuple[int, ...], method: str, precision: str = "float32") -> dict[str, Any]:
    """A recipe of a base and two models, with curvature if the method needs some."""
    config = config_of(shape)
    model, _ = outline(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    folders = [root / name for name in ("base", "tuned-1", "tuned-2")]
    for folder in folders:
        if not folder.exists():
            hollow(folder, {name: ("BF16", own) for name, own in shapes.items()}, "model", {"format": "pt"})
            config.save_pretrained(folder)
    entries = []
    for folder in folders:
        entry: dict[str, Any] = {"model": str(folder)}
        if method == "gradient-matching":
            place = root / f"{folder.name}-{precision}"
            if not place.exists():
                stored = {name: ("F32" if precision == "float32" else "BF16", own) for name, own in shapes.items()}
                facts = {**metadata(EXAMPLES, "empirical", "", precision)}
                hollow(place, stored, "curvature", facts)
            entry["curvature"] = str(place)
        entries.append(entry)
    return {"method": method, "base": entries[0], "models": entries[1:]}


def measured_rates() -> dict[str, Rate]:
    """Entries a second of the methods at 1.1 B, on the machine of `results/merge.json`."""
    report = json.loads((RESULTS / "merge.json").read_text("utf-8"))
    entries, cores = report["settings"]["parameters"], report["machine"]["cores"]
    seconds = {row["case"]: row["wall_s"] - START for row in report["rows"] if row["program"] == "gradmerge"}
    return {name: Rate(entries / seconds[name], f"results/merge.json, {cores} cores") for name in METHODS}


def merge_rows() -> Iterator[dict[str, Any]]:
    rates = measured_rates()
    for name, shape in (SMALL | LLAMA).items():
        with tempfile.TemporaryDirectory() as place:
            for method in METHODS:
                with planned(hollow_recipe(Path(place), shape, method)) as plan:
                    for nodes, disk, network in CLUSTERS:
                        speeds = Speeds(Rate(disk * 1e9, "given"), Rate(network * 1e9, "given"), rates[method])
                        if not network:
                            speeds = Speeds(speeds.disk, None, rates[method])
                        away = (1.0, 1.0) if network else (0.0, 0.0)
                        # bfloat16 models: a sample tells the thresholds of TIES
                        cost = cost_of(plan, speeds, nodes=nodes, workers=nodes, threads=2, away=away, guessed=[""])
                        yield {
                            "model": name,
                            "method": method,
                            "nodes": nodes,
                            "disk_gb_s": disk,
                            "network_gb_s": network,
                            "model_bytes": sum(job.info.nbytes for job in plan.jobs),
                            "bytes_read": cost.read,
                            "bytes_written": cost.written,
                            "bytes_network": cost.network,
                            "memory": cost.memory,
                            "seconds": {key: round(value, 1) for key, value in cost.seconds.items()},
                            "limit": cost.limit,
                        }


def gpu() -> tuple[float, dict[str, Any]]:
    """Operations a second that a plain pass reaches at 1.1 B, and the measurement."""
    report = json.loads((RESULTS / "curvature-cuda-llama-1b.json").read_text("utf-8"))
    settings = report["settings"]
    config = config_of(SMALL["1.1 B"])
    multiplied = shapes_of(outline(config)[0]).multiplied
    work = 6 * multiplied * settings["batch_size"] * settings["tokens"]
    return work / report["methods"]["plain"]["seconds_per_batch"], report


def needs_of(config: Any, batch: int, tokens: int) -> tuple[Any, Any]:
    """The shapes of a model, and what a batch takes."""
    model, mode = outline(config)
    with mode:
        ids = torch.empty(batch, tokens, dtype=torch.long)
        needs = batch_needs(model, {"input_ids": ids, "labels": ids}, LOSSES["next-token"])
    return model, needs


def estimate_rows() -> Iterator[dict[str, Any]]:
    reached, _ = gpu()
    rates = {"compute": Rate(reached, "measured"), "disk": Rate(10e9, "assumed"), "network": Rate(50e9, "assumed")}
    for name, shape in LLAMA.items():
        config = config_of(shape)
        model, needs = needs_of(config, BATCH, TOKENS)
        nodes, per_node, shard = FLEETS[name]
        for kind in ("diagonal", "kronecker", "gram"):
            shapes = shapes_of(model, kind)
            between = BATCH * TOKENS * config.hidden_size * 2
            for together in sorted({False, shard}):
                at = (nodes, per_node) if together or not shard else (1, 1)
                cost = estimate_cost(
                    shapes,
                    rates,
                    examples=EXAMPLES,
                    tokens=EXAMPLES * TOKENS,
                    batch_size=BATCH,
                    activations=activations_of(shapes, needs, kind, between, together),
                    recomputed=together,
                    kind=kind,
                    device="cuda",
                    shard=together,
                    nodes=at[0],
                    per_node=at[1],
                )
                yield {
                    "model": name,
                    "kind": kind,
                    "shard": together,
                    "parameters": shapes.parameters,
                    "weights": shapes.weights,
                    "sums": shapes.sums,
                    "wide": shapes.wide,
                    "nodes": cost.nodes,
                    "processes": cost.processes,
                    "memory": cost.memory,
                    "bytes_network": cost.network,
                    "seconds": {key: round(value, 1) for key, value in cost.seconds.items()},
                }


def measuring_checks() -> list[dict[str, Any]]:
    """What was measured on a GPU, and what the arithmetic says of it."""
    reached, report = gpu()
    settings, batch, tokens = report["settings"], report["settings"]["batch_size"], report["settings"]["tokens"]
    config = config_of(SMALL["1.1 B"])
    model, needs = needs_of(config, batch, tokens)
    shapes = shapes_of(model)
    cost = estimate_cost(
        shapes,
        {"compute": Rate(reached, "measured"), "disk": Rate(1e12, "assumed")},
        examples=batch,
        tokens=batch * tokens,
        batch_size=batch,
        activations=activations_of(shapes, needs, "diagonal", 0),
        device="cuda",
    )
    rows = [
        {
            "what": f"{settings['model']}, diagonal, batch of {batch} × {tokens}, {report['machine']['gpu']}",
            "quantity": "peak memory",
            "unit": "GB",
            "planned": (cost.memory["total"] - cost.memory["process"]) / 1e9,
            "measured": report["memory"]["ours_peak_bytes"] / 1e9,
        },
        {
            "what": "the same, time from the rate of the plain pass there",
            "quantity": "seconds of a batch",
            "unit": "s",
            "planned": cost.seconds["compute"],
            "measured": report["methods"]["ours"]["seconds_per_batch"],
        },
    ]
    other = json.loads((RESULTS / "curvature-cuda-gpt2.json").read_text("utf-8"))
    from transformers import GPT2Config

    made = shapes_of(outline(GPT2Config())[0], "kronecker", 16384)
    rows.append(
        {
            "what": "gpt2, Kronecker factors",
            "quantity": "sums",
            "unit": "GB",
            "planned": made.sums / 1e9,
            "measured": other["memory"]["kronecker_sum_bytes"] / 1e9,
        }
    )
    return rows


def merging_checks(data: Path) -> Iterator[dict[str, Any]]:
    """Real merges of the models there, against their plans."""
    threads = default_threads()
    for method in ("task-arithmetic", "ties", "model-stock"):
        models = [{"model": str(data / name)} for name in ("tuned-1", "tuned-2")]
        recipe: dict[str, Any] = {"method": method, "base": str(data / "base"), "models": models}
        with planned(recipe) as plan:
            speeds, guessed = measure_speeds(plan, threads=threads)
            cost = cost_of(plan, speeds, threads=threads, guessed=guessed)
        with tempfile.TemporaryDirectory() as place:
            text, out = Path(place) / "recipe.json", Path(place) / "out"
            text.write_text(json.dumps(recipe))
            found = _merged(text, out)
        for quantity, unit, own, seen in (
            ("bytes read", "GB", cost.read / 1e9, found["read"] / 1e9),
            ("bytes written", "GB", cost.written / 1e9, found["written"] / 1e9),
            ("peak memory", "GB", cost.memory / 1e9, found["rss"] / 1e9),
            ("seconds, files in the page cache", "s", START + cost.seconds["cpu"], found["seconds"]),
        ):
            yield {
                "what": f"{method}, 1.1 B, {threads} threads",
                "quantity": quantity,
                "unit": unit,
                "planned": own,
                "measured": seen,
                "load": os.getloadavg()[0],
            }


#: Runs the command line, and prints what the system has counted of it.
WATCHED = """
import sys
from pathlib import Path
from gradmerge.cli.app import main
try:
    main()
finally:
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    most = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    print(counted["rchar"], counted["wchar"], most, file=sys.stderr)
"""


def _merged(recipe: Path, out: Path) -> dict[str, float]:
    command = [sys.executable, "-c", WATCHED, "merge", str(recipe), "-o", str(out), "--quiet"]
    begun = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - begun
    read, written, rss = map(int, done.stderr.splitlines()[-1].split())
    return {"seconds": seconds, "read": read, "written": written, "rss": rss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with base, tuned-1 and tuned-2, to merge and compare")
    parser.add_argument("--json", type=Path, default=RESULTS / "planning.json")
    given = parser.parse_args()
    before = json.loads(given.json.read_text("utf-8")) if given.json.is_file() else {}
    report = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "llama": {**SMALL, **LLAMA},
        "clusters": CLUSTERS,
        "data": {"examples": EXAMPLES, "tokens": TOKENS, "batch": BATCH},
        "reached_flop_s": gpu()[0],
        "network_gb_s": USUAL_NETWORK.amount / 1e9,
        "merges": list(merge_rows()),
        "estimates": list(estimate_rows()),
        "measuring_checks": measuring_checks(),
        "merging_checks": list(merging_checks(given.data)) if given.data else before.get("merging_checks", []),
    }
    given.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
