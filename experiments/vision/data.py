"""Images as arrays of bytes, read in whole batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import gradmerge as gm

from ..common.data import folder_in
from .settings import Settings


def write_task(task: str, data_dir: Path, folder: Path, settings: Settings) -> dict[str, int]:
    """Write the splits of ``NAME.npz`` (x_train, y_train, x_test, y_test), and return their sizes and the classes.

    The validation rows are random training rows, the same for every seed. The remaining training rows are in random
    order, so that the first ones are a sample.
    """
    path = folder_in(data_dir, "images") / f"{task}.npz"
    if not path.is_file():
        raise gm.InputError(f"{path}: there is no such file")
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    order = {part: np.random.default_rng(0).permutation(len(arrays[f"y_{part}"])) for part in ("train", "test")}
    kept = order["train"][: settings.train_most]
    held_out = max(1, round(settings.validation_share * len(kept)))
    splits = {
        "train": ("train", kept[held_out:]),
        "validation": ("train", kept[:held_out]),
        "test": ("test", np.sort(order["test"][: settings.test_most])),
    }
    found = {"classes": int(arrays["y_train"].max()) + 1}
    for split, (part, rows) in splits.items():
        np.save(folder / f"{split}-x.npy", _squares(arrays[f"x_{part}"][rows], settings.image_size))
        np.save(folder / f"{split}-y.npy", arrays[f"y_{part}"][rows].astype(np.int64))
        found[split] = len(rows)
    return found


def _squares(images: Any, side: int) -> Any:
    """Return N × 3 × side × side bytes from grayscale or color images."""
    pixels = torch.from_numpy(images)
    pixels = pixels[:, None].expand(-1, 3, -1, -1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
    if pixels.shape[-2:] != (side, side):
        pixels = F.interpolate(pixels.contiguous(), (side, side), mode="bicubic", antialias=True)
    return pixels.contiguous().numpy()


class Images:
    """Images of several tasks, one task after the other."""

    def __init__(self, folder: Path, tasks: Sequence[tuple[int, str]], split: str, first: int | None = None) -> None:
        """``tasks`` are numbers and names; of every task, the ``first`` rows are taken, by default all."""
        parts = [(number, folder / name) for number, name in tasks]
        self.pixels = np.concatenate([np.load(path / f"{split}-x.npy", mmap_mode="r")[:first] for _, path in parts])
        labels = [np.load(path / f"{split}-y.npy")[:first] for _, path in parts]
        self.labels = torch.from_numpy(np.concatenate(labels))
        self.tasks = torch.cat([torch.full((len(y),), number) for (number, _), y in zip(parts, labels, strict=True)])

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return pixels, task numbers and labels of some rows."""
        index = torch.as_tensor(rows)
        return {
            "pixels": torch.from_numpy(self.pixels[index.numpy()]),
            "task": self.tasks[index],
            "labels": self.labels[index],
        }

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """Yield all rows in order, in batches."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))
