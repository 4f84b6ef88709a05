"""Several processes against one while curvature is estimated: memory of each, and speed.

    python -m benchmarks.processes memory --parameters 0.3e9 --processes 2
    python -m benchmarks.processes speed --parameters 0.05e9 --rows 96 --repeats 3

A Llama with random weights, whose parameters dominate, is made in a folder that is removed at the end.

`memory`: the same short rows are measured by one process, by one that keeps sums on disk, and under torchrun with
`--shard`. Peak memory is the system's (VmHWM), as the command tells it in JSON. What a process holds that has only
imported everything is told apart. The bar: at most 0.65 of one process's for each of two.

`speed`: one process and two, of one thread each, take turns, so that noise hits both; the median counts. `seconds` is
what the command says of itself, with loading the model; `wall` has the start of Python, and of torchrun, in it. Speed
never decides the exit status; a result that differs by more than rounding does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BAR = 0.65
#: Sums of float32 in another order differ by about this, relative to a tensor's largest entry.
ROUNDING = 1e-4
TOKENS = 64
MIB = 2**20
RESULTS = Path(__file__).parent / "results" / "processes.json"
WORDS = [f"w{number}" for number in range(500)]


def make_model(folder: Path, parameters: float) -> int:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    width = 1024
    layers = max(1, round(parameters / (16 * width * width)))
    words = {"<s>": 0, "<pad>": 1} | {word: number + 2 for number, word in enumerate(WORDS)}
    sizes = {
        "vocab_size": len(words),
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
    }
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **special))  # type: ignore[arg-type]
    model.save_pretrained(folder, max_shard_size="500MB")
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    named = {"eos_token": "<s>", "bos_token": "<s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def estimate(place: Path, processes: int, name: str, *options: str, **environment: str) -> dict[str, Any]:
    """The command's own numbers, and the seconds that it took from outside."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    given = ["model", "--data", "rows.txt", "-o", name, "--device", "cpu", "--force", "--json", *options]
    command = [sys.executable, *torchrun, "-m", "gradmerge", "curvature", "estimate", *given]
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, env=os.environ | environment)
    wall = time.perf_counter() - begun
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["processes"] == processes
    return {"mib": [one["peak_rss_bytes"] / MIB for one in found["memory"]], "seconds": found["seconds"], "wall": wall}


def differs(place: Path, one: str, other: str) -> float:
    """The largest difference of two results, relative to each tensor's largest entry."""
    from safetensors import safe_open

    worst = 0.0
    index = [json.loads(p.read_text())["weight_map"] for p in (place / one).glob("*.index.json")]
    names = index[0] if index else None
    files = sorted(set(names.values())) if names else ["curvature.safetensors"]
    for file in files:
        with safe_open(place / one / file, "pt") as first, safe_open(place / other / file, "pt") as second:
            for name in first.keys():  # noqa: SIM118
                want = first.get_tensor(name)
                gap = float((second.get_tensor(name) - want).abs().max())
                worst = max(worst, gap / max(float(want.max()), 1e-30))
    return worst


def write_rows(place: Path, rows: int, words: int) -> None:
    lines = [" ".join(WORDS[(7 * n + k) % len(WORDS)] for k in range(words)) for n in range(rows)]
    (place / "rows.txt").write_text("".join(f"{line}\n" for line in lines))


def memory(place: Path, processes: int) -> dict[str, Any]:
    imports = "import gradmerge.api.estimating as e, transformers.models.llama.modeling_llama; "
    imports += "from gradmerge.api.large_models import peak_memory; print(peak_memory()['peak_rss_bytes'])"
    shown = subprocess.run([sys.executable, "-c", imports], check=True, capture_output=True, text=True).stdout
    write_rows(place, processes, 8)
    runs = {
        "one": estimate(place, 1, "one", "--batch-size", "1"),
        "one, sums on disk": estimate(place, 1, "disk", "--batch-size", "1", "--sums", "disk"),
        "shared out": estimate(place, processes, "shared", "--batch-size", "1", "--shard"),
    }
    for run, numbers in runs.items():
        print(f"{run:20} {', '.join(f'{mib:,.0f} MiB' for mib in numbers['mib'])}; {numbers['seconds']:.1f} s")
    alone, most, baseline = runs["one"]["mib"][0], max(runs["shared out"]["mib"]), int(shown) / MIB
    found = {
        "processes": processes,
        "imports_mib": baseline,
        "runs": runs,
        "ratio": most / alone,
        "ratio_beyond_imports": (most - baseline) / (alone - baseline),
        "bar": BAR,
        "largest_difference": differs(place, "one", "shared"),
        "sums_on_disk_same_bits": differs(place, "one", "disk") == 0.0,
    }
    print(f"imports alone {baseline:,.0f} MiB; ratio {found['ratio']:.3f} (bar {BAR}), beyond imports", end=" ")
    print(f"{found['ratio_beyond_imports']:.3f}; largest difference {found['largest_difference']:.1e}")
    return found


def speed(place: Path, rows: int, repeats: int) -> dict[str, Any]:
    write_rows(place, rows, TOKENS)
    kinds: dict[str, Any] = {}
    for kind in ("diagonal", "kronecker"):
        runs: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
        for _ in range(repeats):
            for count, found in runs.items():
                options = ("--kind", kind, "--batch-size", "8")
                found.append(estimate(place, count, f"{kind}-{count}", *options, OMP_NUM_THREADS="1"))
        medians = {
            str(count): {key: statistics.median(one[key] for one in found) for key in ("seconds", "wall")}
            for count, found in runs.items()
        }
        one, two = (medians[count]["seconds"] for count in ("1", "2"))
        gap = differs(place, f"{kind}-1", f"{kind}-2")
        kinds[kind] = {"processes": medians, "times_as_fast": one / two, "largest_difference": gap}
        print(
            f"{kind:10} one {one:.1f} s, two {two:.1f} s: {one / two:.2f} times as fast; largest difference {gap:.1e}"
        )
    return {"rows": rows, "tokens": TOKENS, "threads_of_each": 1, "repeats": repeats, "kinds": kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description="Several processes against one while curvature is estimated.")
    parser.add_argument("what", choices=("memory", "speed"), help="also the key of the JSON file that is written")
    parser.add_argument("--parameters", type=float, help="0.3e9 for memory, 0.05e9 for speed")
    parser.add_argument("--processes", type=int, default=2, help="of memory")
    parser.add_argument("--rows", type=int, default=96, help="of speed")
    parser.add_argument("--repeats", type=int, default=3, help="of speed")
    parser.add_argument("--folder", type=Path, help="where the model is made; by default a temporary folder")
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        place = Path(name)
        parameters = make_model(place / "model", options.parameters or (0.3e9 if options.what == "memory" else 0.05e9))
        if options.what == "memory":
            found = memory(place, options.processes)
            missed = found["ratio"] > BAR or not found["sums_on_disk_same_bits"]
        else:
            found = speed(place, options.rows, options.repeats)
            missed = any(one["largest_difference"] > ROUNDING for one in found["kinds"].values())
    facts = {"parameters": parameters, "backend": "gloo", "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    options.json.write_text(json.dumps({**known, options.what: {**facts, **found}}, indent=2) + "\n")
    if missed:
        raise SystemExit("the bar is missed, or the results are not the same")


if __name__ == "__main__":
    main()
