"""The data: the 1,797 handwritten digits of scikit-learn (8 × 8 pixels), unchanged and changed in three ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import InputError
from .demo_settings import BASE, REMOVED, TASKS, Settings

Array = np.ndarray[Any, np.dtype[Any]]
SPLITS = ("train", "valid", "test")


def load_digits() -> tuple[Array, Array]:
    """Return images as bytes, 1797 × 8 × 8, and their labels."""
    try:
        from sklearn import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise InputError("the demonstration needs scikit-learn: pip install 'gradmerge[demo]'") from error
    digits = datasets.load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64)


def tilted(images: Array) -> Array:
    """Rotate clockwise by 20 degrees."""
    return np.stack([np.asarray(Image.fromarray(i).rotate(-20, Image.Resampling.BILINEAR)) for i in images])


def thick(images: Array) -> Array:
    """Widen strokes by a pixel to the right and downwards: the maximum of four neighbors."""
    padded = np.pad(images, ((0, 0), (1, 0), (1, 0)))
    widest: Array = np.maximum.reduce([padded[:, y : y + 8, x : x + 8] for y in (0, 1) for x in (0, 1)])
    return widest


def blurred(images: Array) -> Array:
    """Average over 3 × 3 pixels, with the edge repeated."""
    padded = np.pad(images.astype(float), ((0, 0), (1, 1), (1, 1)), mode="edge")
    around = np.stack([padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)])
    mean: Array = np.rint(around.mean(0)).astype(np.uint8)
    return mean


CHANGES: Mapping[str, Callable[[Array], Array]]
CHANGES = {"upright": lambda images: images, "tilted": tilted, "thick": thick, "blurred": blurred}


def write_data(folder: Path, images: Array, labels: Array, settings: Settings) -> None:
    """Write an .npz file per task with arrays x_train, y_train, x_valid, …; a digit has the same split in every task.

    `rest.npz` holds the data of all tasks but the removed one, and `all.npz` those of every task.
    """
    folder.mkdir(exist_ok=True)
    order = np.random.default_rng(settings.seed).permutation(len(images))
    ends = np.cumsum([settings.train, settings.valid, settings.test])
    if ends[-1] > len(images):
        raise InputError(f"{ends[-1]} images are asked for, but there are {len(images)}")
    parts = dict(zip(SPLITS, np.split(order, ends)[:3], strict=True))
    kinds: dict[str, dict[str, Any]] = {}
    for name, change in CHANGES.items():
        changed = change(images)
        kinds[name] = {f"x_{split}": changed[rows] for split, rows in parts.items()}
        kinds[name] |= {f"y_{split}": labels[rows] for split, rows in parts.items()}
    every = (BASE, *TASKS)
    for name, members in (("rest", [t for t in every if t != REMOVED]), ("all", every)):
        kinds[name] = {key: np.concatenate([kinds[member][key] for member in members]) for key in kinds[BASE]}
    for name, arrays in kinds.items():
        np.savez_compressed(folder / f"{name}.npz", **arrays)


def read_array(path: Path, key: str) -> Array:
    with np.load(path, allow_pickle=False) as file:
        array: Array = file[key]
    return array
