"""Merging on a GPU against the CPU, and on more threads: the same bytes, and how long.

    python -m benchmarks.devices --data bench-data --device cuda --json devices.json

merges Llama-shaped checkpoints by every rule that works entry by entry, once per device, compares the weights byte by
byte, and times task arithmetic and TIES on 1, 2, 4, … threads. Models are made on the spot and stay in the data folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import torch

import gradmerge as gm

from .checkpoints import make_curvature, make_models

METHODS = [name for name, rule in gm.METHODS.items() if rule.fallback is None]


def recipe(method: str, models: list[Path], curvature: list[Path]) -> dict[str, Any]:
    needs = gm.METHODS[method].needs({})
    entries: list[dict[str, Any]] = [{"model": str(path)} for path in models]
    if "curvature" in needs:
        for entry, path in zip(entries, curvature, strict=True):
            entry["curvature"] = str(path)
    base, *tuned = entries
    return {"method": method, "base": base, "models": tuned[:1] if gm.METHODS[method].only_one_model else tuned}


def timed(settings: dict[str, Any], out: Path, **options: Any) -> tuple[float, str]:
    """(seconds, SHA-256 of the weights) of one merge."""
    begun = time.perf_counter()
    gm.merge(settings, out, force=True, accept_untrusted=True, **options)
    seconds = time.perf_counter() - begun
    with (out / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    shutil.rmtree(out)
    return seconds, digest


def main() -> None:
    parser = argparse.ArgumentParser(description="Merging on a GPU against the CPU, and on more threads.")
    parser.add_argument("--data", type=Path, required=True, help="folder for models and outputs")
    parser.add_argument("--device", default="cuda", help="the device to compare with the CPU")
    parser.add_argument("--layers", type=int, default=8, help="layers of the models that every rule merges")
    parser.add_argument(
        "--thread-layers", type=int, default=22, help="layers of the models for threads; 22 are 1.1 B parameters"
    )
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    options = parser.parse_args()

    folder = options.data / f"llama-{options.layers}-layers"
    models = make_models(folder, options.layers)
    curvature = list(make_curvature(folder, options.layers))
    rules = []
    for method in METHODS:
        settings = recipe(method, models, curvature)
        (cpu, one), (other, two) = (timed(settings, folder / "out", device=d) for d in ("cpu", options.device))
        rules.append({"method": method, "cpu_s": cpu, "device_s": other, "same_bytes": one == two})
        verdict = "same bytes" if one == two else "OTHER BYTES"
        print(f"{method:20} cpu {cpu:6.2f} s   {options.device} {other:6.2f} s   {verdict}", flush=True)

    folder = options.data / f"llama-{options.thread_layers}-layers"
    models = make_models(folder, options.thread_layers)
    threads = []
    for method in ("task-arithmetic", "ties"):
        count = 1
        while count <= (os.cpu_count() or 1):
            seconds, _ = timed(recipe(method, models, []), folder / "out", threads=count)
            threads.append({"method": method, "threads": count, "seconds": seconds})
            print(f"{method:20} {count:2} threads {seconds:6.2f} s", flush=True)
            count *= 2

    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.machine()
    report = {
        "device": name,
        "cores": os.cpu_count(),
        "versions": {"gradmerge": gm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "layers": options.layers,
        "thread_layers": options.thread_layers,
        "rules": rules,
        "threads": threads,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
