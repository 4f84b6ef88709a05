"""`gradmerge curvature estimate` as a user runs it, and merging with what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm

from ..making import read_model, run, write_recipe
from ..tasks.making import (
    labelled,
    tiny_bert_checkpoint,
    write_jsonl,
)


def estimate(*arguments: str | Path | int, status: int = 0) -> Any:
    return run("curvature", "estimate", *arguments, "--device", "cpu", status=status)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two models, and data."""
    folder = tmp_path_factory.mktemp("estimate")
    for seed, name in enumerate(("base", "a", "b")):
        tiny_bert_checkpoint(folder / name, seed=seed)
    write_jsonl(folder / "labels.jsonl", labelled(7))
    return folder


def double(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in state.items()}


def assert_merged(out: Path, want: Mapping[str, Tensor]) -> None:
    got = read_model(out)
    assert got.keys() == want.keys()
    for name, value in want.items():
        scale = max(1.0, float(value.abs().max()))
        assert float((got[name].double() - value).abs().max()) <= 2e-6 * scale, name


def test_estimated_curvature_merges_by_gradient_matching(place: Path, tmp_path: Path) -> None:
    folder = place
    for name in ("base", "a", "b"):
        estimate(folder / name, "--data", place / "labels.jsonl", "--likelihood", "exact", "-o", tmp_path / name)
    base, *tuned = (double(read_model(folder / name)) for name in ("base", "a", "b"))
    h0, *h = (double(gm.Curvature.load(tmp_path / name)) for name in ("base", "a", "b"))
    weights = (0.6, 0.9)
    models = [
        {"model": str(folder / n), "curvature": str(tmp_path / n), "weight": w}
        for n, w in zip("ab", weights, strict=True)
    ]
    recipe: dict[str, Any] = {
        "method": "gradient-matching",
        "base": {"model": str(folder / "base"), "curvature": str(tmp_path / "base")},
        "models": models,
        "damping": 1e-3,
    }
    run("merge", write_recipe(tmp_path / "r.yml", recipe), "-o", tmp_path / "matched")
    want = {}
    for name, theta in base.items():
        prior = h0[name] + 1e-3
        whole = prior + sum(w * one[name] for w, one in zip(weights, h, strict=True))
        want[name] = theta + sum(
            w * (prior + one[name]) / whole * (model[name] - theta)
            for w, one, model in zip(weights, h, tuned, strict=True)
        )
    assert_merged(tmp_path / "matched", want)
