"""The k-th largest of many numbers between two values of a sample, against sorting."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradmerge.engine.run.bracket import Bracket, ends_of

GENERATOR = np.random.default_rng(0)
KINDS = {
    "normal": np.abs(GENERATOR.normal(size=20_000)).astype(np.float32),
    "few values": GENERATOR.integers(0, 4, 20_000).astype(np.float32),
    "equal": np.ones(20_000, np.float32),
    "zeros": np.where(GENERATOR.random(20_000) < 0.9, 0.0, GENERATOR.random(20_000)).astype(np.float32),
    "wide": np.exp(GENERATOR.normal(size=20_000) * 20),
}


def bracket_of(k: int, total: int, sample: np.ndarray) -> Bracket:
    return Bracket(k, total, ends_of(k / total, np.sort(sample)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 2, 17, 3_000, 10_000, 19_999, 20_000])
def test_it_is_the_kth_largest(kind: str, k: int) -> None:
    values = KINDS[kind]
    bracket = bracket_of(k, len(values), values[::20])
    for part in np.array_split(values, 7):
        assert bracket.value is None
        bracket.add(part)
    assert bracket.value == float(np.sort(values)[len(values) - k])


def test_nan_counts_as_the_largest() -> None:
    values = KINDS["normal"].copy()
    values[:100] = math.nan
    bracket = bracket_of(5_000, len(values), values[50::20])
    bracket.add(values)
    assert bracket.value == float(np.sort(values)[len(values) - 5_000])


def test_a_sample_that_misled_gives_nothing() -> None:
    values = KINDS["normal"]
    bracket = bracket_of(10_000, len(values), np.full(1_000, 100.0, np.float32))
    bracket.add(values)
    assert bracket.value is None
