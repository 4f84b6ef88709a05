"""Peak memory of `gradmerge calibrate --curvature none` against the depth of the model.

    python -m benchmarks.calibration_memory --data bench-data --json benchmarks/results/calibration-memory.json

Makes Llama-shaped models with random weights, of one width and two depths (0.3 and 1.2 billion parameters): a merge and
three fine-tuned models of each. The folder of the models is deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import gradmerge as gm

WIDTH, INNER, HEADS, KEY_HEADS, VOCABULARY = 1024, 2816, 16, 4, 8000
ROWS, TOKENS = 16, 64
TASKS = ("one", "two", "three")
OPTIONS = "curvature='none', check=False, progress=False"


def write_model(folder: Path, layers: int, seed: int) -> None:
    """A Llama-shaped model in bfloat16, one file per layer."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    keys = WIDTH // HEADS * KEY_HEADS
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "outside": {
            "model.embed_tokens.weight": (VOCABULARY, WIDTH),
            "model.norm.weight": (WIDTH,),
            "lm_head.weight": (VOCABULARY, WIDTH),
        }
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes[at] = {
            f"{at}.self_attn.q_proj.weight": (WIDTH, WIDTH),
            f"{at}.self_attn.k_proj.weight": (keys, WIDTH),
            f"{at}.self_attn.v_proj.weight": (keys, WIDTH),
            f"{at}.self_attn.o_proj.weight": (WIDTH, WIDTH),
            f"{at}.mlp.gate_proj.weight": (INNER, WIDTH),
            f"{at}.mlp.up_proj.weight": (INNER, WIDTH),
            f"{at}.mlp.down_proj.weight": (WIDTH, INNER),
            f"{at}.input_layernorm.weight": (WIDTH,),
            f"{at}.post_attention_layernorm.weight": (WIDTH,),
        }
    weight_map = {}
    for number, part in enumerate(shapes.values(), 1):
        name = f"model-{number:05d}-of-{len(shapes):05d}.safetensors"
        tensors = {
            key: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
            for key, shape in part.items()
        }
        save_file({key: value.bfloat16() for key, value in tensors.items()}, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_tokenizer(folder: Path) -> None:
    """A tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="0", eos_token="2", pad_token="2").save_pretrained(folder)


def write_rows(path: Path, seed: int) -> None:
    numbers = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text("".join(json.dumps({"text": " ".join(map(str, row))}) + "\n" for row in numbers))


def measure(data: Path, layers: int) -> dict[str, float]:
    """Calibrate models of a depth in a process of its own."""
    place = data / f"llama-{layers}"
    for seed, name in enumerate(("merged", *TASKS)):
        write_model(place / name, layers, seed)
        write_tokenizer(place / name)
    for seed, name in enumerate(TASKS):
        write_rows(data / f"{name}.jsonl", seed)
    out = data / "calibrated"
    shutil.rmtree(out, ignore_errors=True)
    data_paths = {name: f"{data / name}.jsonl" for name in TASKS}
    teachers = {name: str(place / name) for name in TASKS}
    call = f"gm.calibrate({str(place / 'merged')!r}, {data_paths}, teachers={teachers}, out={str(out)!r}, {OPTIONS})"
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", f"import gradmerge as gm; {call}"])
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begun
    if status:
        raise SystemExit(f"calibrate ended with status {os.waitstatus_to_exitcode(status)}")
    record = json.loads((out / "gradmerge.json").read_text())
    size = sum(path.stat().st_size for path in (place / "merged").glob("*.safetensors"))
    shutil.rmtree(out)
    shutil.rmtree(place)
    return {
        "layers": layers,
        "parameters": size // 2,
        "model_bytes": size,
        "model_bytes_float32": 2 * size,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "seconds": seconds,
        "solved_layers": record["calibration"]["layers"],
        "chosen": record["calibration"]["chosen"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("bench-data"), help="new folder for the models (10 GB)")
    parser.add_argument("--layers", default="25,105", help="depths of the models")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.data.mkdir(parents=True)
    found = []
    for layers in map(int, options.layers.split(",")):
        found.append(measure(options.data, layers))
        one = found[-1]
        print(
            f"{layers} layers, {one['parameters'] / 1e9:.2f} B: peak {one['peak_rss_bytes'] / 2**30:.2f} GiB, "
            f"one model in float32 {one['model_bytes_float32'] / 2**30:.2f} GiB, {one['seconds']:.0f} s",
            flush=True,
        )
    shutil.rmtree(options.data)
    if options.json:
        facts = {
            "command": f"python -m benchmarks.calibration_memory --layers {options.layers}",
            "rows": {"per task": ROWS, "tokens": TOKENS, "tasks": len(TASKS)},
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "gradmerge": gm.__version__},
            "runs": found,
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
