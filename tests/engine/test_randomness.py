from __future__ import annotations

import numpy as np
import pytest
import torch

from gradmerge.engine.randomness import keep_mask, standard_normal


def test_a_mask_does_not_depend_on_where_blocks_are_cut() -> None:
    whole = keep_mask(1, 0, "layer.weight", 0, 1001, 0.3)
    for cut in (1, 2, 333, 1000):
        parts = [keep_mask(1, 0, "layer.weight", s, min(s + cut, 1001), 0.3) for s in range(0, 1001, cut)]
        assert torch.equal(torch.cat(parts), whole)


def test_the_first_numbers_of_the_stream_stay_what_they_are() -> None:
    """A merge with the same seed must give the same model with every later version."""
    assert keep_mask(0, 0, "w", 0, 16, 0.5).int().tolist() == [1, 0, 1, 0, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0]


def test_normal_numbers_do_not_depend_on_where_blocks_are_cut() -> None:
    whole = standard_normal(1, 0, "layer.weight", 0, 1001)
    for cut in (1, 2, 333, 1000):
        parts = [standard_normal(1, 0, "layer.weight", s, min(s + cut, 1001)) for s in range(0, 1001, cut)]
        assert torch.equal(torch.cat(parts), whole)
    assert standard_normal(1, 0, "layer.weight", 5, 5).numel() == 0


def test_normal_numbers_differ_by_seed_number_and_tensor_and_share_nothing_with_masks() -> None:
    size = 2000
    draws = [standard_normal(*key, 0, size) for key in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]]
    for draw in draws:
        assert abs(float(draw.mean())) < 5 / size**0.5 and abs(float(draw.var()) - 1) < 5 * (2 / size) ** 0.5
    draws += [keep_mask(0, 0, "a", 0, size, 0.5).double() * 2 - 1]
    together = np.corrcoef(torch.stack(draws).numpy())
    assert np.abs(together - np.eye(5)).max() < 5 / size**0.5


def test_the_first_normal_numbers_stay_what_they_are() -> None:
    """A draw with the same seed must give the same model with every later version."""
    got = standard_normal(0, 0, "w", 0, 4).tolist()
    assert got == pytest.approx([-0.823574908758, 2.56767903693, 0.427205397648, 0.0396554532652], rel=1e-10)
