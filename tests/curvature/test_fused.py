"""The fused kernel against float64 sums, where there is a GPU with Triton."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the fused kernel is written in Triton, which is not installed")
if not torch.cuda.is_available():
    pytest.skip("the fused kernel runs on CUDA only", allow_module_level=True)

from gradmerge.curvature.triton_kernels import add_outer_fused

SHAPES = [
    (5, 7, 33, 50),
    (4, 1000, 770, 3073),
    (8, 1024, 2048, 512),
    (2, 300, 5025, 768),
    (1, 2, 8, 8),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_adds_the_squared_gradients_of_single_examples(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    examples, tokens, width, inputs = shape
    torch.manual_seed(0)
    wide = torch.randn(tokens, examples, width + 16, device="cuda", dtype=dtype)
    for y in (
        torch.randn(examples, tokens, width, device="cuda", dtype=dtype),
        wide[:, :, 8 : 8 + width].transpose(0, 1),
    ):
        x = torch.randn(examples, tokens, inputs, device="cuda", dtype=dtype)
        total = torch.rand(width, inputs, device="cuda")
        want = total.double()
        for left, right in zip(y.double(), x.double(), strict=True):
            want += (left.T @ right) ** 2
        add_outer_fused(y, x, total)
        assert float((total - want).norm() / want.norm()) < 1e-5
