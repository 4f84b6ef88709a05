"""Llama-shaped checkpoints of any size, and curvature for them, made on the spot and one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradmerge.curvature.format import metadata
from gradmerge.io.reader import TensorInfo
from gradmerge.io.writer import ShardWriter


def llama_config(layers: int, hidden: int = 2048, intermediate: int = 5632, vocabulary: int = 32000) -> dict[str, Any]:
    """22 layers of the default width are 1,100,048,384 parameters."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 512),
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    key = 64 * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": (key, hidden),
            f"{prefix}.self_attn.v_proj.weight": (key, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def _random(shape: tuple[int, ...], scale: float, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(scale)


def _write(
    folder: Path,
    stem: str,
    dtype: str,
    shapes: dict[str, tuple[int, ...]],
    shard_size: int,
    header: dict[str, str],
    make: Callable[[int, tuple[int, ...]], Tensor],
) -> None:
    """Write a folder of tensors, or leave it alone if it is complete."""
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, stem, {n: TensorInfo(dtype, s) for n, s in shapes.items()}, shard_size, header)
    writer.open()
    for number, (name, shape) in enumerate(shapes.items()):
        values = make(number, shape).to(torch.bfloat16 if dtype == "BF16" else torch.float32)
        writer.write(name, 0, memoryview(values.reshape(-1).view(torch.uint8).numpy()))
    writer.finish()
    (folder / "done").touch()


def make_models(
    root: Path, layers: int, tuned: int = 2, shards: int = 3, config: dict[str, Any] | None = None
) -> list[Path]:
    """A base and some tuned models near it, bf16, in shards; by default of the default width."""
    config = config or llama_config(layers)
    shapes = llama_shapes(config)
    total = 2 * sum(torch.Size(s).numel() for s in shapes.values())
    folders = []
    for model in range(tuned + 1):
        folder = root / ("base" if model == 0 else f"tuned-{model}")

        def values(number: int, shape: tuple[int, ...], model: int = model) -> Tensor:
            base = _random(shape, 0.02, number)
            return base if model == 0 else base.add_(_random(shape, 0.002, 10_000 * model + number))

        _write(folder, "model", "BF16", shapes, -(-total // shards) + 1, {"format": "pt"}, values)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        folders.append(folder)
    return folders


def make_curvature(root: Path, layers: int, count: int = 3) -> Iterator[Path]:
    """float32 curvature files: squares of normal numbers."""
    shapes = llama_shapes(llama_config(layers))
    for number in range(count):
        folder = root / f"curvature-{number}"

        def squares(index: int, shape: tuple[int, ...], number: int = number) -> Tensor:
            return _random(shape, 1e-3, 77_000 * (number + 1) + index).square_()

        _write(
            folder,
            "curvature",
            "F32",
            shapes,
            5_000_000_000,
            dict(metadata(1000, "empirical", "benchmark")),
            squares,
        )
        yield folder
