"""The small files of a model that go with its weights: config, tokenizer, templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from .lora import AdapterCheckpoint
from .model import Checkpoint

MAX_BYTES = 100_000_000
#: Weights in any format, and what belongs to a training run or a repository rather than to the model.
NOT_COPIED = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".onnx",
    ".gguf",
    ".ot",
    ".npz",
    ".lock",
}
NOT_COPIED_NAMES = {"README.md", "gradmerge.json", "trainer_state.json", "model.safetensors.index.json", "pytorch_model.bin.index.json",
                    "adapter_config.json", "all_results.json", "train_results.json", "eval_results.json"}  # fmt: skip


def sidecars(checkpoint: Checkpoint) -> list[Path]:
    """The files of a model's folder that a merged model needs as well."""
    while isinstance(checkpoint, AdapterCheckpoint):
        checkpoint = checkpoint.base
    if checkpoint.folder is None:
        return []
    return sorted(
        path
        for path in checkpoint.folder.iterdir()
        if path.is_file()
        and path.suffix not in NOT_COPIED
        and path.name not in NOT_COPIED_NAMES
        and not path.name.startswith(".")
        and path.stat().st_size <= MAX_BYTES
    )


def copy_sidecars(checkpoint: Checkpoint, folder: Path, dtype: str) -> None:
    """Copy them, and note the type of the weights in the config if the recipe changed it."""
    for path in sidecars(checkpoint):
        shutil.copyfile(path, folder / path.name)
    config_path = folder / "config.json"
    if dtype != "auto" and config_path.is_file():
        config = json.loads(config_path.read_text("utf-8"))
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        config_path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
