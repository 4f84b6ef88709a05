"""The data of the studies: scikit-learn's digits, rotated and relabeled, and one case per value of a factor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import Tensor

from ..common.training import Training
from .models import Shape
from .settings import GENTLE, Settings


class Rows(NamedTuple):
    pixels: Tensor
    """rows × 64, from −1 to 1."""
    labels: Tensor

    def select(self, index: Tensor) -> Rows:
        return Rows(self.pixels[index], self.labels[index])


Transform = Callable[[Rows], Rows]


def concatenate(*parts: Rows) -> Rows:
    return Rows(torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]))


@cache
def digits() -> Rows:
    """Return all 1,797 digits."""
    dataset = datasets.load_digits()
    return Rows(torch.from_numpy(dataset.data).float() / 8 - 1, torch.from_numpy(dataset.target).long())


def rotate(rows: Rows, degrees: float) -> Rows:
    """Rotate every image clockwise about its center; the corners that appear are empty."""
    angle = math.radians(degrees)
    matrix = torch.tensor([[math.cos(angle), math.sin(angle), 0.0], [-math.sin(angle), math.cos(angle), 0.0]])
    images = rows.pixels.view(-1, 1, 8, 8) + 1
    grid = F.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return Rows(F.grid_sample(images, grid, align_corners=False).flatten(1) - 1, rows.labels)


def relabel(rows: Rows, count: int) -> Rows:
    """Permute the labels of the first ``count`` digits cyclically."""
    labels = torch.where(rows.labels < count, (rows.labels + 1) % max(count, 1), rows.labels)
    return Rows(rows.pixels, labels)


def mix(parts: Sequence[Rows], share: float, seed: int) -> list[Rows]:
    """Keep a share of the rows of every part, and distribute the others randomly over the parts."""
    generator = torch.Generator().manual_seed(seed)
    kept, pool = [], []
    for part in parts:
        order = torch.randperm(len(part.labels), generator=generator)
        first, others = order.tensor_split([round(share * len(part.labels))])
        kept.append(part.select(first))
        pool.append(part.select(others))
    mixed = concatenate(*pool)
    order = torch.randperm(len(mixed.labels), generator=generator)
    parts_of_pool = order.split([len(part.labels) for part in pool])
    return [concatenate(part, mixed.select(index)) for part, index in zip(kept, parts_of_pool, strict=True)]


@dataclass(frozen=True)
class Case:
    """The rows and the training of one base and two tasks."""

    base_rows: Rows
    held_out: Rows
    """Rows of the base's kind that no model was trained on."""
    tasks: Sequence[Rows]
    tests: Mapping[str, Rows]
    """Kind of rows (of the base and of each task) → test rows."""
    validation: Mapping[str, Rows]
    trained_on: Mapping[str, int]
    """Kind → number of training rows."""
    base_training: Training
    fine_tuning: Training
    shape: Shape
    penalty_strength: float = 0.0
    """Strength of the penalty in fine-tuning; 0 is plain Adam."""


def make_case(settings: Settings, seed: int, factor: str, value: Any) -> Case:
    """Return the case with one factor at a value, and all others at their default."""
    order = torch.randperm(len(digits().labels), generator=torch.Generator().manual_seed(seed))
    sizes = [settings.test, settings.validation, settings.base_rows, settings.rows]
    test, validation, base, pool = (digits().select(part) for part in order[: sum(sizes)].split(sizes))
    kinds = _kinds(settings.degrees, factor, value)
    first = round(settings.rows * value / (1 + value)) if factor == "sizes" else settings.rows // 2
    parts = [pool.select(index) for index in torch.arange(settings.rows).split([first, settings.rows - first])]
    tasks = [transform(part) for transform, part in zip(list(kinds.values())[1:], parts, strict=True)]
    if factor == "kinds":
        tasks = mix(tasks, value / 100, seed)
    case = Case(
        base,
        validation,
        tasks,
        tests={name: transform(test) for name, transform in kinds.items()},
        validation={name: transform(validation) for name, transform in kinds.items()},
        trained_on=dict(zip(kinds, (settings.base_rows, *(len(part.labels) for part in parts)), strict=True)),
        base_training=replace(settings.base_training, epochs=value) if factor == "base" else settings.base_training,
        fine_tuning=replace(settings.fine_tuning, epochs=value) if factor == "epochs" else settings.fine_tuning,
        shape=settings.shape,
        penalty_strength=value if factor == "penalty" else 0.0,
    )
    if factor != "network":
        return case
    if isinstance(value, str):
        fine_tuning = settings.gentle_fine_tuning if value == GENTLE else case.fine_tuning
        return replace(case, shape=None, base_training=settings.transformer_training, fine_tuning=fine_tuning)
    first, *_, last = settings.shape
    return replace(case, shape=(first, *[settings.shape[1]] * int(value), last))


def _kinds(degrees: float, factor: str, value: Any) -> dict[str, Transform]:
    """Return the transformations of the base's rows and of both tasks' rows."""
    upright: dict[str, Transform] = {"upright": lambda rows: rows}
    right: dict[str, Transform] = {"right": lambda rows: rotate(rows, degrees)}
    if factor == "labels":
        return upright | right | {"relabelled": lambda rows: relabel(rotate(rows, degrees), int(value))}
    if factor == "base":  # if the tasks were left and right, they would keep the upright rows between them
        return upright | right | {"farther right": lambda rows: rotate(rows, 2 * degrees)}
    return upright | {"left": lambda rows: rotate(rows, -degrees)} | right
