"""Memory of every process while curvature is estimated: one that has the whole model, and several that share it out.

    python -m benchmarks.processes --parameters 0.3e9 --processes 2

A Llama with random weights, whose parameters dominate, is made in a folder that is removed at the end. The same two
short rows are measured by one process, by one that keeps sums on disk, and under torchrun with `--shard`. Peak memory
is the system's (VmHWM), as the command tells it in JSON. What a process holds that has only imported everything is
told apart. The bar: at most 0.65 of one process's for each of two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BAR = 0.65
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


def measured(place: Path, launcher: list[str], name: str, *options: str) -> dict[str, Any]:
    """The command's own numbers: memory of every process, seconds, device."""
    command = [
        *launcher,
        "-m",
        "gradmerge",
        "curvature",
        "estimate",
        "model",
        "--data",
        "rows.txt",
        "--batch-size",
        "1",
    ]
    given = ["-o", name, "--device", "cpu", "--json", *options]
    done = subprocess.run([*command, *given], cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return {"mib": [one["peak_rss_bytes"] / MIB for one in found["memory"]], "seconds": found["seconds"]}


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory per process while curvature is estimated.")
    parser.add_argument("--parameters", type=float, default=0.3e9)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the model is made; by default a temporary folder")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the key `memory` of this file is written")
    options = parser.parse_args()
    imports = "import gradmerge.api.estimating as e, transformers.models.llama.modeling_llama; "
    imports += "from gradmerge.api.large_models import peak_memory; print(peak_memory()['peak_rss_bytes'])"
    shown = subprocess.run([sys.executable, "-c", imports], check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        place = Path(name)
        made = "import sys; from pathlib import Path; from benchmarks.processes import make_model; "
        made += "print(make_model(Path(sys.argv[1]), float(sys.argv[2])))"
        script = [sys.executable, "-c", made, str(place / "model"), str(options.parameters)]
        parameters = int(subprocess.run(script, check=True, capture_output=True, text=True).stdout.split()[-1])
        (place / "rows.txt").write_text(
            "".join(f"{' '.join(WORDS[5 * n : 5 * n + 8])}\n" for n in range(options.processes))
        )
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.processes)]
        runs = {
            "one": measured(place, [sys.executable], "one"),
            "one, sums on disk": measured(place, [sys.executable], "disk", "--sums", "disk"),
            "shared out": measured(place, torchrun, "shared", "--shard"),
        }
        same_bits, gap = differs(place, "one", "disk") == 0.0, differs(place, "one", "shared")
    alone, most = runs["one"]["mib"][0], max(runs["shared out"]["mib"])
    baseline = int(shown) / MIB
    found = {
        "parameters": parameters,
        "processes": options.processes,
        "backend": "gloo",
        "imports_mib": baseline,
        "runs": runs,
        "ratio": most / alone,
        "ratio_beyond_imports": (most - baseline) / (alone - baseline),
        "bar": BAR,
        "largest_difference": gap,
        "sums_on_disk_same_bits": same_bits,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    for run, numbers in runs.items():
        print(f"{run:20} {', '.join(f'{mib:,.0f} MiB' for mib in numbers['mib'])}; {numbers['seconds']:.1f} s")
    print(f"imports alone {baseline:,.0f} MiB; ratio {found['ratio']:.3f} (bar {BAR}), beyond imports", end=" ")
    print(f"{found['ratio_beyond_imports']:.3f}; largest difference {gap:.1e} of a tensor's largest entry")
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    options.json.write_text(json.dumps({**known, "memory": found}, indent=2) + "\n")
    if most / alone > BAR or not same_bits:
        raise SystemExit("the bar is missed")


if __name__ == "__main__":
    main()
