"""The k-th largest magnitude of many numbers, against sorting."""

from __future__ import annotations

import functools
import math
import operator
import pickle

import numpy as np
import pytest
import torch

from gradmerge.engine.quantiles import Bracket, Quantile, QuantileSearch, bracket_of

GENERATOR = np.random.default_rng(0)
KINDS = {
    "normal": np.abs(GENERATOR.normal(size=20_000)).astype(np.float32),
    "few values": GENERATOR.integers(0, 4, 20_000).astype(np.float32),
    "equal": np.ones(20_000, np.float32),
    "zeros": np.where(GENERATOR.random(20_000) < 0.9, 0.0, GENERATOR.random(20_000)).astype(np.float32),
    "float64": np.exp(GENERATOR.normal(size=20_000) * 20),
}


def search(values: np.ndarray, k: int, bracket: Bracket | None = None) -> tuple[float, int]:
    """The k-th largest, and how many passes it took."""
    found = QuantileSearch([[Quantile(k, torch.from_numpy(values).dtype, bracket)]])
    passes = 0
    while found.unknown:
        found.narrow(functools.reduce(operator.iadd, (found.count([part]) for part in np.array_split(values, 7))))
        passes += 1
    return found.values[0][0], passes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 17, 3_000, 19_999, 20_000])
@pytest.mark.parametrize("bracket", ["none", "sampled", "below", "above", "a single value"])
def test_it_is_the_kth_largest(kind: str, k: int, bracket: str) -> None:
    values = KINDS[kind]
    sampled = bracket_of(k / len(values), np.array_split(values[::20], 10))
    brackets = {"none": None, "sampled": sampled, "below": (0.0, 1e-30), "above": (1e30, math.inf)}
    assert search(values, k, brackets.get(bracket, (1.0, 1.0)))[0] == float(np.sort(values)[len(values) - k])


def test_a_sampled_bracket_of_many_values_needs_one_pass() -> None:
    values = np.abs(GENERATOR.normal(size=1 << 21)).astype(np.float32)
    sample = bracket_of(0.2, values.reshape(-1, 2048)[::8])
    assert search(values, len(values) // 5, sample) == (float(np.sort(values)[-(len(values) // 5)]), 1)


def test_nan_counts_as_the_largest() -> None:
    values = KINDS["normal"].copy()
    values[:100] = math.nan
    values[100:110] = math.inf
    for bracket in (None, bracket_of(0.25, [values[50::20]]), (5.0, 5.0)):
        assert search(values, 5_000, bracket)[0] == float(np.sort(values)[len(values) - 5_000])
        assert search(values, 50, bracket)[0] == math.inf


def test_the_ranks_0_and_minus_1_are_infinity_and_0() -> None:
    assert Quantile(0, torch.float32).value == math.inf and Quantile(-1, torch.float32).value == 0.0


def test_quantiles_of_several_models_are_found_together_and_counts_can_be_pickled() -> None:
    values = [KINDS["normal"], KINDS["few values"], KINDS["zeros"]]
    found = QuantileSearch([Quantile(k, torch.float32) for k in (1, 700, 0)] for _ in values)
    while found.unknown:
        parts = (found.count(parts) for parts in zip(*(np.array_split(some, 5) for some in values), strict=True))
        total = functools.reduce(operator.iadd, (pickle.loads(pickle.dumps(part)) for part in parts))
        found.narrow(pickle.loads(pickle.dumps(total)))
    assert found.values == [[float(np.sort(some)[-k]) for k in (1, 700)] + [math.inf] for some in values]
