from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from gradmerge.engine.run.selection import Guess, Selection


def search(values: torch.Tensor, k: int, guess: Guess | None, block: int = 97) -> tuple[float, int]:
    """(k-th largest magnitude, number of passes)."""
    selection, passes = Selection(k, values.dtype, guess), 0
    while selection.value is None:
        selection.narrow(sum(selection.count(part.clone()) for part in values.split(block)))
        passes += 1
        assert passes < 10
    return selection.value, passes


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 2000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    exponent=st.floats(-40, 30),
    rounded=st.booleans(),
    guess=st.sampled_from([None, 1.0, 1.01, 3.0, 0.3, 0.0]),
    exact=st.booleans(),
    data=st.data(),
)
def test_the_kth_largest_is_that_of_a_sort(size, dtype, exponent, rounded, guess, exact, data) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    if rounded:
        values = (values * 2).round()
    values = (values * 10**exponent).to(dtype)
    k = data.draw(st.integers(1, size))
    want = float(values.abs().sort(descending=True).values[k - 1])
    assert search(values, k, None if guess is None else Guess(want * guess, exact))[0] == want


def test_a_good_guess_needs_one_pass_and_a_bad_one_is_only_slower() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    want = float(values.abs().sort(descending=True).values[1999])
    assert search(values, 2000, Guess(want * 1.001, False)) == (want, 1)
    assert search(values, 2000, Guess(want * 10, False)) == (want, 3)
    assert search(values, 2000, Guess(want, True)) == (want, 1)
    assert search(values, 2000, Guess(want * 1.001, True)) == (want, 3)
    assert search(values, 2000, None) == (want, 2)


def test_float64_is_told_apart_to_the_last_bit() -> None:
    one = torch.ones(3, dtype=torch.float64)
    one[1] = one[1].nextafter(torch.tensor(2.0, dtype=torch.float64))
    assert search(one, 1, None)[0] == float(one[1])
    assert search(one, 2, None)[0] == 1.0


def test_all_zeros_have_the_threshold_zero() -> None:
    assert search(torch.zeros(10), 3, None)[0] == 0.0


def test_nan_counts_as_larger_than_everything() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0, 2.0, float("inf")])
    assert search(values, 3, Guess(3.0, True))[0] == 3.0
    assert search(values, 3, None)[0] == 3.0
