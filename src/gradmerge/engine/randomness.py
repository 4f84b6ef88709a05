"""Random masks that depend on (seed, model, tensor, position) alone."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def keep_mask(seed: int, model: int, tensor: str, start: int, stop: int, density: float) -> Tensor:
    """True with probability ``density`` for each of the elements ``start`` to ``stop`` of a flattened tensor.

    Element i compares the i-th 32-bit half of a PCG64DXSM stream with density · 2³². The stream's seed is a hash of
    seed, model and tensor; it can be entered at any place, so that blocks may be cut anywhere.
    """
    digest = hashlib.sha256(f"{seed}/{model}/{tensor}".encode()).digest()
    stream = np.random.PCG64DXSM(int.from_bytes(digest[:16], "little"))
    stream.advance(start // 2)
    words = stream.random_raw(stop // 2 - start // 2 + 1).astype("<u8", copy=False).view("<u4")
    first = start % 2
    below = words[first : first + stop - start] < np.uint64(round(density * 2**32))
    return torch.from_numpy(below)
