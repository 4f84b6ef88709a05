"""What every test runs under: one thread of torch, here and in the programs that tests start.

The models are so small that a second one would only wait for the first, and sums would depend on how many there are.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
