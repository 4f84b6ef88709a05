"""Merging in memory: penalties, dampings and reductions as in a recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradmerge as gm

from ..making import random_curvature, random_state
from ..rules import slow

SHAPES = {"a.weight": (5, 4), "a.bias": (5,)}
STATES = [random_state(seed, SHAPES, torch.float64) for seed in range(3)]
CURVATURE = [random_curvature(10 + seed, state) for seed, state in enumerate(STATES)]
WEIGHTS = [0.6, 1.3]


def flat(state: Any) -> list[float]:
    return torch.cat([state[name].double().reshape(-1) for name in SHAPES]).tolist()


def merge(**given: Any) -> list[float]:
    given = {"prior": CURVATURE[0], "curvature": CURVATURE[1:], "weights": WEIGHTS} | given
    return flat(gm.merge_state_dicts(STATES[0], STATES[1:], **given))


def expected(method: str, damping: float, penalty: list[float] | None, **options: Any) -> list[float]:
    twin = slow.removal if method == "removal" else slow.gradient_matching
    tuned, curvature = [flat(s) for s in STATES[1:]], [flat(c.sum()) for c in CURVATURE[1:]]
    every = None if penalty is None else [penalty] * 2
    return twin(flat(STATES[0]), tuned, WEIGHTS, flat(CURVATURE[0].sum()), curvature, damping, every, **options)


OTHER = random_curvature(30, STATES[0])


@pytest.mark.parametrize(
    ("method", "penalty", "values"),
    [
        ("gradient-matching", None, None),
        ("gradient-matching", "none", [0.0] * 25),
        ("removal", 2.5, [2.5] * 25),
        ("removal", OTHER, flat(OTHER.sum())),
        ("gradient-matching", OTHER.sum(), flat(OTHER.sum())),
    ],
)
def test_a_penalty_is_a_number_a_mapping_a_curvature_or_none(
    method: str, penalty: Any, values: list[float] | None
) -> None:
    capped = {"cap": 1.0} if method == "removal" else {}
    got = merge(method=method, penalty=penalty, damping=0.01)
    assert got == pytest.approx(expected(method, 0.01, values, **capped), rel=1e-11, abs=1e-12)
