"""Measure how much of joint training's gain merges, calibration and distillation keep.

    python -m experiments.recovery language-model --model SmolLM2-135M --data data/text -o runs/recovery
    python -m experiments.recovery sentiment --model all-mpnet-base-v2 --data data/text -o runs/recovery
    python -m experiments.recovery images --model deit-tiny --data data/images -o runs/recovery
    python -m experiments.recovery --report runs/recovery

Every seed writes one JSON file. A file with the same settings is not computed again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import gradmerge as gm

from .report import write_report
from .run import run_seed
from .settings import ALL, SCALES
from .workloads import WORKLOADS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", choices=list(ALL))
    parser.add_argument("--model", type=Path, help="folder of the pre-trained model")
    parser.add_argument("--data", type=Path, help="folder with the data sets")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--sweep", action="store_true", help="also other hyperparameters of calibrate and distill")
    parser.add_argument("--robustness", action="store_true", help="also other rows, merges to start from, and bfloat16")
    parser.add_argument("--scale", choices=list(SCALES), default="full", help="small: for a CPU; tiny: to try it")
    parser.add_argument("--report", type=Path, metavar="DIR", help="print the tables of a folder of results")
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/recovery"))
    options = parser.parse_args()
    if options.report:
        print(write_report(options.report))
        return
    if not (options.workload and options.model and options.data):
        parser.error("give a workload, --model and --data")
    settings = SCALES[options.scale](ALL[options.workload])
    flags = {"sweep": options.sweep, "robustness": options.robustness}
    for seed in map(int, options.seeds.split(",")):
        name = options.workload if options.scale == "full" else f"{options.workload}-{options.scale}"
        path = options.out / f"{name}-{seed}.json"
        described = json.loads(json.dumps(dataclasses.asdict(settings) | flags))
        if path.exists() and json.loads(path.read_text("utf-8")).get("complete") == described:
            print(f"{path}: exists, with the same settings")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        torch.manual_seed(seed)
        workload = WORKLOADS[options.workload](settings, seed, options.model, options.data)
        facts = {
            "command": "python -m experiments.recovery " + shlex.join(sys.argv[1:]),
            "workload": name,
            "metric": workload.metric,
            "seed": seed,
            "settings": described,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "gradmerge": gm.__version__,
            },
        }

        def save(results: dict[str, Any], complete: Any = None, path: Path = path, facts: Any = facts) -> None:
            text = json.dumps({**facts, "complete": complete, "results": results}, indent=1)
            path.write_text(text + "\n", "utf-8")

        results = run_seed(workload, settings, save, **flags)
        facts["seconds"] = time.perf_counter() - begun
        save(results, described)


if __name__ == "__main__":
    main()
