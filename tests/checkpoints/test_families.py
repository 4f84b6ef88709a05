"""Merging checkpoints of well-known families, as transformers writes and reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from tests.making import assert_close, random_curvature, read_model

from . import slow
from .families import FAMILIES, double, load, make, moved, save

WEIGHTS = [0.7, -0.4]


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
    assert_close(read_model(tmp_path / "out"), slow.task_arithmetic(base, tuned, WEIGHTS), 1e-6)
    load(trio.family, tmp_path / "out")


def test_gradient_matching_reads_curvature_files_by_the_stored_names(trio: Trio, tmp_path: Path) -> None:
    curvatures = [random_curvature(10 + i, s, examples=50 * (i + 1)) for i, s in enumerate(trio.stored)]
    for curvature, name, size in zip(curvatures, ("c0", "c1", "c2"), (4000, 10**9, 9000), strict=True):
        curvature.save(tmp_path / name, shard_size=size)
    recipe = trio.recipe("gradient-matching", damping=1e-3, reduction="mean")
    recipe["base"] = {"model": recipe["base"], "curvature": str(tmp_path / "c0")}
    for i, model in enumerate(recipe["models"]):
        model["curvature"] = str(tmp_path / f"c{i + 1}")
        model["weight"] = [1.0, 0.5][i]
    gm.merge(recipe, tmp_path / "out")
    base, *tuned = map(double, trio.stored)
    means = [{n: c[n].double() / c.examples for n in c} for c in curvatures]
    want = slow.gradient_matching(base, tuned, [1.0, 0.5], means[0], means[1:], 1e-3)
    assert_close(read_model(tmp_path / "out"), want, 2e-6)
    load(trio.family, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_result_keeps_the_type_of_the_base_and_is_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    family = "llama-tied"
    trio = make_trio(tmp_path, family, dtype)
    gm.merge(trio.recipe("task-arithmetic"), tmp_path / "out")
    base, *tuned = map(double, trio.stored)
    want = slow.task_arithmetic(base, tuned, WEIGHTS)
    got = read_model(tmp_path / "out")
    assert_rounded(got, want, dtype)
    if dtype == torch.float64:
        assert_close(got, want, 1e-14)
    assert next(load(family, tmp_path / "out", dtype="auto").parameters()).dtype == dtype


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
    merged = slow.task_arithmetic(double(base), [double(t) for t in tuned], WEIGHTS)
    rest = {n: v for n, v in got.items() if n not in left_out}
    assert_rounded(rest, {n: merged[n] for n in rest}, torch.float32)
