"""Small checkpoints, curvature and recipes, made on the spot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app
from gradmerge.progress import NoProgress

SHAPES = {
    "embed.weight": (50, 8),
    "layers.0.linear.weight": (16, 8),
    "layers.0.linear.bias": (16,),
    "layers.1.linear.weight": (8, 16),
    "layers.1.norm.weight": (8,),
    "classifier.weight": (3, 8),
}


def random_state(
    seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        for name, shape in shapes.items()
    }


def near(base: Mapping[str, Tensor], seed: int, scale: float = 0.1) -> dict[str, Tensor]:
    """A tuned model: the base, moved a little."""
    noise = random_state(seed, {n: tuple(t.shape) for n, t in base.items()}, torch.float64, scale)
    return {name: (tensor.double() + noise[name]).to(tensor.dtype) for name, tensor in base.items()}


def random_curvature(seed: int, like: Mapping[str, Tensor], examples: int = 100) -> gm.Curvature:
    values = random_state(seed, {n: tuple(t.shape) for n, t in like.items()}, torch.float64)
    return gm.Curvature({n: v.square().float() for n, v in values.items()}, examples, "empirical", "test")


def write_model(
    folder: Path, state: Mapping[str, Tensor], shards: int = 1, config: Mapping[str, Any] | None = None
) -> Path:
    """A Hugging Face folder, its tensors dealt out to some shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "test", **(config or {})}))
    names = list(state)
    if shards == 1:
        save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for shard in range(shards):
        filename = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[shard::shards]}
        save_file(part, folder / filename, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, filename)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_model(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read with the safetensors library."""
    state: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    return state


def weight_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a result but its record, which holds times."""
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != "gradmerge.json"
    }


def write_recipe(path: Path, recipe: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(recipe)))
    return path


def run(*arguments: str | Path | int, status: int = 0) -> Any:
    """The result of the command line in this process, which ends with this status, and without a traceback."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output and "internal error" not in result.output
    return result


def cli(*arguments: str | Path, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does, in a process of its own."""
    command = [sys.executable, "-m", "gradmerge", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


class Stop(NoProgress):
    """Progress that interrupts the work, at the first block or a later one."""

    def __init__(self, after: int = 1) -> None:
        self.left = after

    def advance(self, amount: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def assert_close(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    assert got.keys() == want.keys()
    for name in want:
        difference = (got[name].double() - want[name].double()).abs().max().item() if want[name].numel() else 0.0
        scale = max(1.0, want[name].double().abs().max().item() if want[name].numel() else 0.0)
        assert difference <= tolerance * scale, f"{name}: differs by {difference}"


def tuned_from(base: Path, out: Path, seed: int, scale: float = 0.1) -> Path:
    """A model near the base, with its small files."""
    shutil.copytree(base, out)
    save_file(near(read_model(base), seed, scale), out / "model.safetensors", {"format": "pt"})
    return out


def three_models(
    tmp_path: Path, dtype: torch.dtype = torch.float32, shards: Sequence[int] = (1, 2, 3), curvature: bool = False
) -> tuple[list[Path], list[dict[str, Tensor]]]:
    """A base and two tuned models in unequal shards, with curvature if wanted: folders and state dicts."""
    base = random_state(0, dtype=dtype)
    states = [base, near(base, 1), near(base, 2)]
    folders = [
        write_model(tmp_path / name, state, count)
        for name, state, count in zip(("base", "a", "b"), states, shards, strict=True)
    ]
    for seed, (folder, state) in enumerate(zip(folders, states, strict=True) if curvature else ()):
        random_curvature(seed, state).save(folder / "curvature")
    return folders, states
