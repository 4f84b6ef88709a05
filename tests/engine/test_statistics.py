from __future__ import annotations

import torch

from gradmerge.engine.run.selection import Guess
from gradmerge.engine.run.statistics import _guess


def test_a_sample_of_few_values_gives_an_exact_guess_and_one_of_many_values_a_rough_one() -> None:
    values = torch.randn(64, 100, generator=torch.Generator().manual_seed(0)).abs()
    assert _guess([*values.ceil()], 0.5) == Guess(1.0, exact=True, ends=(1.0, 1.0))
    rough = _guess([*values], 0.5)
    assert 0.6 < rough.ends[0] < 0.6745 < rough.ends[1] < 0.75
    assert not rough.exact and abs(rough.value - 0.6745) < 0.1


def test_a_guess_on_the_edge_between_two_values_is_not_exact() -> None:
    """Half of the entries are 1 and half are 2, give or take a few in each part of the sample."""
    runs = [torch.tensor([1.0, 2.0]) for _ in range(64)]
    runs[0][0], runs[1][1] = 2.0, 1.0
    assert not _guess(runs, 0.5).exact
    assert _guess(runs, 0.4) == Guess(2.0, exact=True, ends=(1.0, 2.0))
