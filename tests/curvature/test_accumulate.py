"""Modules that no formula was made for, and memory that runs out: the numbers are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.estimate import estimate_curvature

from ..checkpoints.families import randomise
from . import slow
from .families import EXACT, FAMILIES, batch_of, batches_of
from .slow import Example, assert_same

WIDTH, TOKENS = 6, 4


class Body(nn.Module):
    """A head on the mean of what ``inner`` makes of the tokens."""

    layer: Any

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(WIDTH, 3)
        self.build()
        randomise(self.parameters(), 5, 0.3)
        self.double().eval()

    def build(self) -> None:
        self.layer = nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).tanh().mean(1))


class Outside(Body):
    """The weight is used by its module, and by another."""

    def inner(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight).sin() + self.layer(x)


class NoBatch(Body):
    """The layer sees the same for all examples; in a batch of four, as many rows as examples."""

    def build(self) -> None:
        super().build()
        self.register_buffer("places", torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH))

    def inner(self, x: Tensor) -> Tensor:
        return x * self.layer(self.places)


class Folded(Body):
    def inner(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, WIDTH)).view_as(x)


class Shared(Body):
    """One weight in two modules."""

    def build(self) -> None:
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.other.weight = self.layer.weight

    def inner(self, x: Tensor) -> Tensor:
        return self.other(self.layer(x).tanh())


class Twice(Body):
    def inner(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Unused(Body):
    def build(self) -> None:
        super().build()
        self.idle, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(3))

    def inner(self, x: Tensor) -> Tensor:
        return self.layer(x)


class ByKeyword(Body):
    def inner(self, x: Tensor) -> Tensor:
        return self.layer(input=x)


class WeightNorm(Body):
    def build(self) -> None:
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def inner(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Attention(Body):
    def build(self) -> None:
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)

    def inner(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Experts(Body):
    """Every token goes to one of three layers: which rows a layer sees depends on the data."""

    def build(self) -> None:
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        best, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * best[rows, None])
        return out.view_as(x)


class FusedLayer(nn.Module):
    """Two matrices per expert, in two tensors. ``resorted`` reverses the rows for the second product."""

    def __init__(self, resorted: bool = False) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(3, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.zeros(3, 2 * WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(3, WIDTH))
        self.resorted = resorted

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        chosen = (flat[:, :3] * 7).sin().argmax(-1)
        out = torch.zeros_like(flat)
        for expert in range(3):
            rows = chosen == expert
            hidden = (flat[rows] @ self.up[expert]).tanh()
            hidden = hidden.flip(0) if self.resorted else hidden
            result = hidden @ self.down[expert] + self.bias[expert]
            out = out.index_add(0, rows.nonzero()[:, 0], result.flip(0) if self.resorted else result)
        return out.view_as(x)


class Fused(Body):
    def build(self) -> None:
        self.layer = FusedLayer()

    def inner(self, x: Tensor) -> Tensor:
        return self.layer(x)


class FusedResorted(Fused):
    def build(self) -> None:
        self.layer = FusedLayer(resorted=True)


class Rare(Body):
    """A layer that is used by whole examples, but only by some; the first two are none of them."""

    def inner(self, x: Tensor) -> Tensor:
        rows = (x[:, 0, 0] > 0.5).nonzero()[:, 0]
        return x.index_add(0, rows, self.layer(x[rows])) if len(rows) else x


#: A model, and the parameters of it that are measured the slow way.
UNKNOWN: dict[type[Body], set[str] | None] = {
    Outside: {"layer.weight", "layer.bias"},
    NoBatch: {"layer.weight", "layer.bias"},
    Folded: set(),
    Shared: set(),
    Twice: set(),
    Unused: set(),
    ByKeyword: set(),
    WeightNorm: {f"layer.parametrizations.weight.original{n}" for n in (0, 1)},
    Attention: {f"layer.self_attn.{n}" for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")},
    Experts: {f"experts.{k}.{n}" for k in range(3) for n in ("weight", "bias")},
    Fused: set(),
    FusedResorted: {"layer.up", "layer.down", "layer.bias"},
    Rare: {"layer.weight", "layer.bias"},
}


def tokens_of(seed: int, count: int = 6) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    x[:2, 0, 0] = -1.0
    x[2:4, 0, 0] = 1.0
    return [{"0": one, "labels": torch.tensor(n % 3)} for n, one in enumerate(x)]


@pytest.mark.parametrize("sizes", [(6,), (1, 1, 4)])
@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_use_of_a_parameter_is_exact_and_named(
    kind: type[Body], sizes: Sequence[int], caplog: pytest.LogCaptureFixture
) -> None:
    model, examples = kind(), tokens_of(0)
    got = estimate_curvature(model, batches_of(examples, sizes))
    assert_same(got, slow.empirical(model, examples, "classes"), EXACT)
    named = {line.strip() for record in caplog.records for line in record.getMessage().split("\n")[1:]}
    assert UNKNOWN[kind] in (None, named)


# Memory that runs out.


def test_out_of_memory_is_a_machine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model, examples = FAMILIES["bert"].model(), FAMILIES["bert"].examples()
    monkeypatch.setattr("gradmerge.curvature.hooks.kernels.add_squares", full)
    with pytest.raises(gm.MachineError):
        estimate_curvature(model, [batch_of(examples)])
