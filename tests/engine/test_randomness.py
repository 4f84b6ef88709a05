from __future__ import annotations

import torch

from gradmerge.engine.randomness import keep_mask


def test_a_mask_does_not_depend_on_where_blocks_are_cut() -> None:
    whole = keep_mask(1, 0, "layer.weight", 0, 1001, 0.3)
    for cut in (1, 2, 333, 1000):
        parts = [keep_mask(1, 0, "layer.weight", s, min(s + cut, 1001), 0.3) for s in range(0, 1001, cut)]
        assert torch.equal(torch.cat(parts), whole)


def test_masks_differ_by_seed_model_and_tensor() -> None:
    masks = [keep_mask(*key, 0, 500, 0.5) for key in [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]]
    for i, one in enumerate(masks):
        for other in masks[i + 1 :]:
            agreement = (one == other).float().mean().item()
            assert 0.35 < agreement < 0.65


def test_the_share_that_is_kept_is_the_density() -> None:
    size = 1_000_000
    for density in (0.01, 0.5, 0.9):
        share = keep_mask(3, 1, "w", 0, size, density).double().mean().item()
        assert abs(share - density) < 5 * (density * (1 - density) / size) ** 0.5
    assert keep_mask(3, 1, "w", 0, 1000, 1.0).all()


def test_the_first_numbers_of_the_stream_stay_what_they_are() -> None:
    """A merge with the same seed must give the same model with every later version."""
    assert keep_mask(0, 0, "w", 0, 16, 0.5).int().tolist() == [1, 0, 1, 0, 1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0]
