"""Time and peak memory of a merge, an estimate of curvature and a calibration, against the depth of the model.

    python -m benchmarks.scale --data bench-data --json benchmarks/results/scale.json

Makes Llama-shaped models of one width with random weights, from 0.1 to 1.2 billion parameters: a base and three
fine-tuned models. Every command runs in a process of its own. CPU seconds are compared, because they hardly depend on
what else the machine does. The models are deleted at the end. A step that --json already has is not measured again.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from .checkpoints import llama_config, llama_shapes, make_models
from .timing import GIB, apart, machine, parser_of, say, size, text_table, timed, versions, write_report

WIDTH, INNER, VOCABULARY = 1024, 2816, 8000
ROWS, TOKENS = 16, 64
TASKS = ("tuned-1", "tuned-2", "tuned-3")
STEPS = ("merge", "curvature", "calibrate")


def write_inputs(data: Path, layers: int) -> None:
    """Write the models, with a tokenizer whose words are numbers, and random rows of such words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="0", eos_token="2", pad_token="2")
    for folder in make_models(data, layers, len(TASKS), config=llama_config(layers, WIDTH, INNER, VOCABULARY)):
        tokenizer.save_pretrained(folder)
    for seed, task in enumerate(TASKS):
        numbers = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed)).tolist()
        lines = [json.dumps({"text": " ".join(map(str, row))}) for row in numbers]
        Path(f"{data / task}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def command_of(step: str, data: Path, out: Path, device: str) -> list[str]:
    """Return the command of a step."""
    gradmerge = [sys.executable, "-m", "gradmerge"]
    where = ["--device", device, "-o", str(out)]
    if step == "merge":
        models = [word for task in TASKS for word in ("--model", str(data / task))]
        return [*gradmerge, "merge", "--method", "average", "--base", str(data / "base"), *models, *where]
    if step == "curvature":
        rows = f"{data / TASKS[0]}.jsonl"
        return [*gradmerge, "curvature", "estimate", str(data / TASKS[0]), "--data", rows, "--batch-size", "4", *where]
    sources = {task: f"{data / task}.jsonl" for task in TASKS}
    teachers = {task: str(data / task) for task in TASKS}
    options = f"out={str(out)!r}, curvature='none', check=False, progress=False, device={device!r}"
    call = f"gm.calibrate({str(data / 'base')!r}, {sources}, teachers={teachers}, {options})"
    return [sys.executable, "-c", f"import gradmerge as gm; {call}"]


def measure(data: Path, layers: int, step: str, device: str) -> dict[str, Any]:
    """Run a step once."""
    run = timed("gradmerge", command_of(step, data, data / "out", device), data / "out")
    shutil.rmtree(data / "out")
    parameters = sum(
        torch.Size(shape).numel() for shape in llama_shapes(llama_config(layers, WIDTH, INNER, VOCABULARY)).values()
    )
    return {
        "step": step,
        "layers": layers,
        "parameters": parameters,
        "model_bytes": size(data / "base"),
        "device": device,
        "wall_s": run.wall_s,
        "cpu_s": run.cpu_s,
        "peak_rss_bytes": run.peak_rss_bytes,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, default=Path("bench-data/scale"), help="folder for the models (10 GB)")
    parser.add_argument("--layers", default="8,25,52,105", help="depths of the models")
    parser.add_argument("--steps", default=",".join(STEPS), help="what to run")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    known = options.json is not None and options.json.is_file()
    runs: list[dict[str, Any]] = json.loads(options.json.read_text("utf-8"))["runs"] if known else []
    for layers in map(int, options.layers.split(",")):
        measured = {run["step"] for run in runs if (run["layers"], run["device"]) == (layers, options.device)}
        steps = [step for step in options.steps.split(",") if step not in measured]
        if not steps:
            continue
        data = options.data / f"llama-{layers}"
        apart(write_inputs, data, layers)
        for step in steps:
            runs.append(measure(data, layers, step, options.device))
            say(f"{layers} layers, {step}: {runs[-1]['cpu_s']:.0f} CPU s, {runs[-1]['peak_rss_bytes'] / GIB:.2f} GiB")
            rows = {"per task": ROWS, "tokens": TOKENS, "tasks": len(TASKS)}
            write_report(options.json, machine=machine(options.device), versions=versions(), rows=rows, runs=runs)
        shutil.rmtree(data)
    header = ("step", "parameters", "CPU s", "wall s", "peak GiB", "model GiB")
    print(
        text_table(
            header,
            [
                (
                    run["step"],
                    f"{run['parameters'] / 1e9:.2f} B",
                    f"{run['cpu_s']:.0f}",
                    f"{run['wall_s']:.0f}",
                    f"{run['peak_rss_bytes'] / GIB:.2f}",
                    f"{run['model_bytes'] / GIB:.2f}",
                )
                for run in runs
            ],
        )
    )


if __name__ == "__main__":
    main()
