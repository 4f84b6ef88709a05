"""Weights and options that differ between layers, by name and between models: against a loop over the tensors."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from tests.making import near, read_model, write_model
from tests.rules import slow

NAMES = [
    "embed.weight",
    *(f"model.layers.{i}.{part}.weight" for i in range(4) for part in ("attn", "mlp")),
    "norm.weight",
]


def states(count: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    base = {name: torch.randn(5, 3, dtype=torch.float64, generator=generator) for name in NAMES}
    return [base, *(near(base, seed) for seed in range(1, count + 1))]


def spread(values: list[float], name: str) -> float:
    """The value of a list at a layer, by drawing the line through its points."""
    layer = int(name.split(".")[2]) if ".layers." in name else 0
    points = [(3 * place / (len(values) - 1), value) for place, value in enumerate(values)]
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= layer <= right:
            return low + (high - low) * (layer - left) / (right - left)
    raise AssertionError


def merged(states: list[dict[str, Tensor]], method: str, weights: list[Any], **settings: Any) -> dict[str, Tensor]:
    return gm.merge_state_dicts(states[0], states[1:], method, weights=weights, **settings)


def test_the_first_filter_that_fits_decides_and_its_value_may_be_a_list() -> None:
    base, one = models = states(1)
    cases = [{"filter": "attn", "value": [0.0, 1.0]}, {"filter": "*.mlp.*", "value": 0.3}, {"value": 2.0}]
    result = merged(models, "task-arithmetic", [cases])
    for name in NAMES:
        weight = spread([0.0, 1.0], name) if "attn" in name else 0.3 if "mlp" in name else 2.0
        torch.testing.assert_close(result[name], base[name] + weight * (one[name] - base[name]), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_models_may_have_densities_of_their_own(tmp_path: Path, scope: str) -> None:
    models = states()
    folders = [write_model(tmp_path / str(i), state) for i, state in enumerate(models)]
    own = [{"model": str(folders[1]), "options": {"density": 0.2}}, str(folders[2])]
    recipe = {"method": "ties", "base": str(folders[0]), "models": own, "options": {"density": 0.6, "scope": scope}}
    gm.merge(recipe, tmp_path / "out", progress=False)
    result = read_model(tmp_path / "out")
    groups = [NAMES] if scope == "model" else [[name] for name in NAMES]
    for group in groups:
        flat = [torch.cat([state[name].reshape(-1) for name in group]).tolist() for state in models]
        trimmed = []
        for model, density in zip(flat[1:], (0.2, 0.6), strict=True):
            delta = [a - b for a, b in zip(model, flat[0], strict=True)]
            limit = slow.threshold(delta, density)
            trimmed.append([d if abs(d) >= limit else 0.0 for d in delta])
        want = [b + d for b, d in zip(flat[0], slow.elect_and_average(trimmed, [1.0, 1.0]), strict=True)]
        got = torch.cat([result[name].reshape(-1) for name in group])
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_a_density_over_the_layers_takes_thresholds_of_single_tensors(tmp_path: Path) -> None:
    models = states(1)
    result = merged(models, "ties", [1.0], options={"density": [0.25, 0.95], "scope": "tensor"})
    for name in NAMES:
        own = {"density": spread([0.25, 0.95], name), "scope": "tensor"}
        alone = merged([{name: state[name]} for state in models], "ties", [1.0], options=own)
        torch.testing.assert_close(result[name], alone[name], rtol=0, atol=0)
    with pytest.raises(gm.InputError, match="scope"):
        merged(models, "ties", [1.0], options={"density": [0.25, 0.95]})
