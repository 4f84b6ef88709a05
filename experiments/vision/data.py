"""Images as arrays of bytes: read once from files or the Hub, then taken in whole batches."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import gradmerge as gm

SPLITS = ("train", "validation", "test")


def source_of(task: str, data_dir: Path | None, hub: str | None) -> str:
    """Where a task is: the Hub, or ``NAME.npz`` or the folder ``NAME`` in the data folder or its ``images/``."""
    if data_dir is None:
        assert hub is not None
        return hub
    for folder in (data_dir, data_dir / "images"):
        for path in (folder / f"{task}.npz", folder / task):
            if path.exists():
                return str(path)
    raise gm.InputError(f"{data_dir}: there is neither {task}.npz nor a folder {task} with images by class")


def write_task(
    source: str,
    folder: Path,
    size: int,
    *,
    share: float,
    most: int,
    train_most: int | None,
    test_most: int | None,
    enlarge: bool,
) -> dict[str, Any]:
    """Write a task's three splits as arrays; how many rows each has, and the names of the classes.

    The validation rows are taken out of the training rows at random, the same for every seed: ``share`` of them, at
    most ``most``. What is left is in random order, so that its first rows are a sample of it. ``test`` is the source's
    own.
    """
    given = {name: gm.read_rows(f"{source}:{name}") for name in ("train", "test")}
    order = {name: np.random.default_rng(0).permutation(len(rows)) for name, rows in given.items()}
    kept = order["train"][: None if train_most is None else train_most]
    held_out = min(max(1, round(share * len(kept))), most)
    places = {
        "train": ("train", kept[held_out:]),
        "validation": ("train", kept[:held_out]),
        "test": ("test", np.sort(order["test"][:test_most])),
    }
    found: dict[str, Any] = {"classes": _classes(source, given["train"])}
    folder.mkdir(parents=True, exist_ok=True)
    side = size if enlarge else _common_side(given["train"].rows, kept, size)
    for split, (part, rows) in places.items():
        pixels = np.lib.format.open_memmap(folder / f"{split}-x.npy", "w+", np.uint8, (len(rows), side, side, 3))
        labels = np.empty(len(rows), np.int64)
        for place, number in enumerate(rows.tolist()):
            row = given[part].rows[number]
            pixels[place] = np.asarray(fitted(picture(row["image"]), side))
            labels[place] = int(row["label"])
        pixels.flush()
        np.save(folder / f"{split}-y.npy", labels)
        found[split] = len(rows)
        if labels.min() < 0 or labels.max() >= len(found["classes"]):
            raise gm.InputError(
                f"{source}: labels of {split} go from {labels.min()} to {labels.max()}, "
                f"but there are {len(found['classes'])} classes"
            )
    return found


def _classes(source: str, rows: Any) -> list[str]:
    """Names of the classes, as words."""
    if "label" in rows.class_names:
        names = list(rows.class_names["label"])
    elif source.endswith(".npz"):
        with np.load(source, allow_pickle=False) as file:
            if "classes" not in file.files:
                raise gm.InputError(f"{source}: there is no array `classes` with the names of the classes")
            names = file["classes"].tolist()
    else:
        raise gm.InputError(f"{source}: the column `label` does not say what the classes are called")
    return [words(str(name)) for name in names]


def words(name: str) -> str:
    """`SeaLake` and `sea_lake` as `Sea Lake` and `sea lake`: what a text encoder has seen."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").strip()


def _common_side(rows: Sequence[Any], numbers: np.ndarray, size: int) -> int:
    """The side of the images where all are squares of one size that is not above the model's; the model's otherwise."""
    shapes = {picture(rows[number]["image"]).size for number in numbers.tolist()}
    width, height = next(iter(shapes))
    return width if len(shapes) == 1 and width == height <= size else size


def picture(value: Any) -> Image.Image:
    """An image from an array, the bytes of a file, a path, or how the Hub stores either."""
    if isinstance(value, dict):
        value = value.get("bytes") or value["path"]
    if isinstance(value, np.ndarray):
        return Image.fromarray(value)
    return Image.open(io.BytesIO(value) if isinstance(value, bytes) else value)


def fitted(image: Image.Image, side: int) -> Image.Image:
    """A square of three colours as CLIP cuts it: the short side brought to ``side``, then the middle."""
    image = image.convert("RGB")
    width, height = image.size
    if min(width, height) != side:
        scale = side / min(width, height)
        wanted = max(side, round(width * scale)), max(side, round(height * scale))
        image = image.resize(wanted, Image.Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.crop((left, top, left + side, top + side))


@dataclass(frozen=True)
class Part:
    """Rows of one task."""

    task: int
    pixels: np.ndarray
    """N × side × side × 3, bytes; may lie on disk."""
    labels: np.ndarray


def load_part(folder: Path, task: int, split: str, first: int | None = None) -> Part:
    """A split of a task, or its first rows, without reading it."""
    pixels = np.load(folder / f"{split}-x.npy", mmap_mode="r")
    return Part(task, pixels[:first], np.load(folder / f"{split}-y.npy")[:first])


class Images:
    """Images of one or several tasks, one after the other, of one size."""

    def __init__(self, parts: Sequence[Part], size: int) -> None:
        self.parts = list(parts)
        self.size = size
        self._ends = np.cumsum([len(part.labels) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """``pixels`` (bytes, B × 3 × size × size), ``task`` and ``labels`` of some rows, in their order."""
        numbers = np.asarray(rows)
        which = np.searchsorted(self._ends, numbers, side="right")
        pixels = torch.empty(len(numbers), 3, self.size, self.size, dtype=torch.uint8)
        task = torch.empty(len(numbers), dtype=torch.long)
        labels = torch.empty(len(numbers), dtype=torch.long)
        for index in np.unique(which).tolist():
            part = self.parts[index]
            here = np.flatnonzero(which == index)
            own = numbers[here] - (self._ends[index] - len(part.labels))
            taken = torch.from_numpy(np.ascontiguousarray(part.pixels[own])).permute(0, 3, 1, 2)
            if taken.shape[-1] != self.size:
                taken = F.interpolate(taken, self.size, mode="bicubic", antialias=True)
            pixels[here] = taken
            task[here] = part.task
            labels[here] = torch.from_numpy(part.labels[own])
        return {"pixels": pixels, "task": task, "labels": labels}

    def batches(self, size: int) -> Iterator[dict[str, Tensor]]:
        """All rows in order, in batches."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))
