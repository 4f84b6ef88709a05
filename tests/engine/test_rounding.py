"""Numbers are rounded once on their way into a file, to the nearest, ties to even."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

from gradmerge.engine.jobs import rounded

#: Bits of the significand, and the exponents of the smallest and of the largest binade.
KINDS = {torch.bfloat16: (8, -126, 127), torch.float16: (11, -14, 15)}


def nearest(value: float, dtype: torch.dtype) -> float:
    """The nearest number of a type, in exact arithmetic."""
    if value == 0 or not math.isfinite(value):
        return value
    bits, lowest, highest = KINDS[dtype]
    exact = Fraction(abs(value))
    exponent = max(math.frexp(abs(value))[1] - 1, lowest)
    step = Fraction(2) ** (exponent - bits + 1)
    found = round(exact / step) * step  # Python rounds fractions half to even
    if found >= Fraction(2) ** (highest + 1):
        return math.copysign(math.inf, value)
    return math.copysign(float(found), value)


def hard_values(dtype: torch.dtype) -> list[float]:
    """Half-way points all over the range, and what lies just beside them, near and far."""
    bits, lowest, highest = KINDS[dtype]
    rng = random.Random(0)
    values = [0.0, 5e-324, 1e-320, 1e-45, 1e-40, 1.0, math.inf, 1e300, 1.7e308, 3.4028235677973366e38]
    for _ in range(4000):
        exponent = rng.choice(
            [lowest - bits, lowest - 1, lowest, lowest + 1, -1, 0, 1, highest, rng.randint(lowest, highest)]
        )
        step = 2.0 ** (max(exponent, lowest) - bits + 1)
        half = (rng.randint(0, 2**bits - 1) + rng.choice([0.0, 0.5])) * step
        beside = rng.choice([0.0, 2.0**-60, 2.0**-45, 2.0**-30, 2.0**-20]) * half * rng.choice([-1, 1])
        values += [half, half + beside, math.nextafter(half, 0), math.nextafter(half, math.inf), rng.random() * half]
    return [sign * value for value in values for sign in (1, -1)]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_float64_is_rounded_once(dtype: torch.dtype) -> None:
    values = hard_values(dtype)
    got = rounded(torch.tensor(values, dtype=torch.float64), dtype)
    want = torch.tensor([nearest(value, dtype) for value in values], dtype=torch.float64)
    assert got.dtype == dtype
    wrong = (got.double() != want).nonzero().flatten().tolist()
    assert not wrong, [(values[i], float(got[i]), float(want[i])) for i in wrong[:5]]
    assert torch.equal(got.signbit(), want.signbit())
    twice = torch.tensor(values, dtype=torch.float64).to(dtype).double()
    assert not torch.equal(twice, want), "PyTorch rounds once by now; this can go"


def test_nan_stays_nan_and_float32_is_as_torch_rounds_it() -> None:
    for dtype in KINDS:
        assert rounded(torch.tensor([math.nan], dtype=torch.float64), dtype).isnan().all()
        single = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        assert torch.equal(rounded(single, dtype), single.to(dtype))
