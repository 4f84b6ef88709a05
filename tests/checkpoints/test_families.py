"""Merging checkpoints of well-known families, as transformers writes and reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from tests.making import assert_close, read_model

from .families import FAMILIES, double, load, make, moved, save

WEIGHTS = [0.7, -0.4]
State = Mapping[str, Tensor]


@dataclass
class Trio:
    """A base and two fine-tuned models: on disk in unequal shards, as stored tensors, and as modules."""

    family: str
    folders: list[Path]
    stored: list[dict[str, Tensor]]
    models: list[Any]

    def recipe(self, method: str, **more: Any) -> dict[str, Any]:
        models = [{"model": str(f), "weight": w} for f, w in zip(self.folders[1:], WEIGHTS, strict=True)]
        return {"method": method, "base": str(self.folders[0]), "models": models, **more}


def make_trio(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Trio:
    base = make(family, **changes)
    models = [m.to(dtype) for m in (base, moved(base, 1), moved(base, 2))]
    shards = ("5GB", "3KB", "8KB")
    folders = [save(m, folder / n, s) for m, n, s in zip(models, ("base", "a", "b"), shards, strict=True)]
    return Trio(family, folders, [read_model(f) for f in folders], models)


@pytest.fixture(scope="module", params=FAMILIES)
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    return make_trio(tmp_path_factory.mktemp(request.param), request.param)


def task_arithmetic(base: State, tuned: Sequence[State], weights: Sequence[float]) -> State:
    pairs = list(zip(weights, tuned, strict=True))
    return {name: value + sum(w * (t[name] - value) for w, t in pairs) for name, value in base.items()}


def assert_rounded(got: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Every value is the exact one, rounded to a type once (and float32 arithmetic on the way)."""
    assert got.keys() == exact.keys()
    half_step = torch.finfo(dtype).eps / 2
    for name, value in got.items():
        assert value.dtype == dtype, name
        error = (value.double() - exact[name]).abs()
        assert bool((error <= exact[name].abs() * half_step * 1.01 + 1e-6).all()), f"{name}: off by {error.max()}"


def test_a_merge_of_unequal_shards_is_the_rule_in_float64_and_loads_with_every_weight(
    trio: Trio, tmp_path: Path
) -> None:
    gm.merge(trio.recipe("task-arithmetic"), tmp_path / "out")
    base, *tuned = map(double, trio.stored)
    assert_close(read_model(tmp_path / "out"), task_arithmetic(base, tuned, WEIGHTS), 1e-6)
    load(trio.family, tmp_path / "out")


def test_excluded_tensors_are_the_bases_bytes_whatever_the_output_type(tmp_path: Path) -> None:
    trio = make_trio(tmp_path, "bert", torch.bfloat16)
    exclude = ["classifier.*", "*.LayerNorm.*"]
    gm.merge(trio.recipe("task-arithmetic", exclude=exclude, output={"dtype": "float32"}), tmp_path / "out")
    got, (base, *tuned) = read_model(tmp_path / "out"), trio.stored
    left_out = {n for n in base if n.startswith("classifier.") or ".LayerNorm." in n}
    assert left_out and len(left_out) < len(base)
    for name in left_out:
        assert got[name].dtype == torch.bfloat16
        assert got[name].view(torch.int16).equal(base[name].view(torch.int16)), name
    merged = task_arithmetic(double(base), [double(t) for t in tuned], WEIGHTS)
    rest = {n: v for n, v in got.items() if n not in left_out}
    assert_rounded(rest, {n: merged[n] for n in rest}, torch.float32)
