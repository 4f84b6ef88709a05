"""Random masks and numbers that depend only on a seed, a number, a tensor's name and a position."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def keep_mask(seed: int, model: int, tensor: str, start: int, stop: int, density: float) -> Tensor:
    """Return a mask for entries ``start`` to ``stop`` of a flattened tensor, True with probability ``density``.

    Entry i compares the i-th 32-bit half of a PCG64DXSM stream with density · 2³². The stream's seed is a hash of seed,
    model and tensor. The stream can start at any position, so that the result does not depend on the blocks.
    """
    return torch.from_numpy(_words(seed, model, tensor, start, stop) < np.uint64(round(density * 2**32)))


def uniform(seed: int, model: int, tensor: str, start: int, stop: int) -> Tensor:
    """Return float64 numbers from 0 to 1 for the same entries, from the same stream."""
    return torch.from_numpy(_words(seed, model, tensor, start, stop) * 2.0**-32)


def _words(seed: int, model: int, tensor: str, start: int, stop: int) -> np.ndarray:
    """Return the 32-bit words of some entries."""
    stream = _stream(f"{seed}/{model}/{tensor}")
    stream.advance(start // 2)
    words = stream.random_raw(stop // 2 - start // 2 + 1).astype("<u8", copy=False).view("<u4")
    first = start % 2
    return words[first : first + stop - start]


def standard_normal(seed: int, sample: int, tensor: str, start: int, stop: int) -> Tensor:
    """Return float64 numbers from N(0, 1) for entries ``start`` to ``stop`` of a flattened tensor.

    Entry i is the normal quantile of the i-th word of a stream like that of the masks.
    """
    stream = _stream(f"normal/{seed}/{sample}/{tensor}")
    stream.advance(start)
    words = stream.random_raw(stop - start).astype("<u8", copy=False)
    # 52 bits plus a half: with 53, the largest number would round to 1, whose quantile is infinite.
    uniform = ((words >> np.uint64(12)) + 0.5) * 2.0**-52
    quantiles: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return quantiles


def _stream(key: str) -> np.random.PCG64DXSM:
    return np.random.PCG64DXSM(int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little"))
