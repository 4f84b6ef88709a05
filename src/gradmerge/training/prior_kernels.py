"""The pull towards an anchor after a step of Adam: θ ← θ + t ⊙ (a − θ), in one pass where possible.

With the rate c = lr·strength and the prior H, the share t of the distance to the anchor is

    c               without a prior: one explicit step of gradient descent on ½ c‖θ − a‖²
    cH / (1 + cH)   with one: the minimiser of ½‖θ − θ_Adam‖² + ½ c‖θ − a‖²_H
    cH / (D + cH)   in Adam's metric: the minimiser of ½‖θ − θ_Adam‖²_D + ½ c‖θ − a‖²_H, D = √v̂ + ε

Arithmetic is float32, float64 for float64 parameters, and the result is rounded to the parameter's type once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Entries up to which PyTorch works on one thread on a CPU. Their temporary fits into its cache.
GRAIN = 1 << 15
#: Entries whose roots a CPU takes at once.
ROOTS = 1 << 19
#: Entries that are worked on together on a GPU: this bounds the memory for temporaries.
TOGETHER = 1 << 26


@dataclass(frozen=True)
class Moments:
    """What D = √(v / (1 − β₂^step)) + ε of a parameter is made of."""

    squares: Tensor
    step: Tensor
    beta: float | Tensor
    eps: float


@dataclass(frozen=True)
class Pull:
    """One parameter, its anchor, and its prior: a tensor, a number c for c·I, or None for an explicit step."""

    parameter: Tensor
    anchor: Tensor
    prior: Tensor | float | None
    moments: Moments | None = None
    """For Adam's metric."""


def pull(pulls: Sequence[Pull], rate: float | Tensor, *, foreach: bool | None = None, plain: bool = False) -> None:
    """Move parameters towards their anchors. ``plain`` is for autograd; ``foreach=False`` saves memory of a GPU."""
    together: dict[object, list[Pull]] = defaultdict(list)
    for one in pulls:
        device = one.parameter.device
        if plain or not _is_flat(one):
            _pull_one(one, rate)
        elif device.type == "cpu" and one.anchor.device == device and not isinstance(rate, Tensor):
            _pull_in_cache(one, rate)
        elif device.type == "cpu" or foreach is False:
            _pull_one(one, rate)
        else:
            together[device, one.parameter.dtype].append(one)
    for group in together.values():
        for batch in _batches(group):
            _pull_together(batch, rate)


def _is_flat(one: Pull) -> bool:
    values = [one.parameter, one.anchor, one.prior, one.moments.squares if one.moments else None]
    return all(value.is_contiguous() for value in values if isinstance(value, Tensor))


def _kind(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _moved(value: Tensor, device: torch.device, kind: torch.dtype) -> Tensor:
    # Moved first: a copy that also converts does that on the CPU, and waits. Only a copy to the CPU has to wait.
    return value.to(device, non_blocking=device.type != "cpu").to(kind)


def _pull_one(one: Pull, rate: float | Tensor) -> None:
    parameter, kind = one.parameter, _kind(one.parameter)
    anchor = _moved(one.anchor, parameter.device, kind)
    rate = rate.to(parameter.device, kind) if isinstance(rate, Tensor) else rate
    prior = _moved(one.prior, parameter.device, kind) if isinstance(one.prior, Tensor) else one.prior
    share: float | Tensor
    if prior is None:
        share = rate
    elif one.moments is None:
        share = prior / (prior + 1 / rate)
    else:
        (correction,) = _corrections([one.moments], parameter.device)
        metric = one.moments.squares.to(kind).sqrt() * correction + one.moments.eps
        share = prior * rate / (metric + prior * rate)
    if parameter.dtype == kind:
        parameter.lerp_(anchor, share)
    else:
        parameter.copy_(parameter.to(kind).lerp(anchor, share))


def _corrections(moments: Sequence[Moments], device: torch.device) -> list[Any]:
    """1 / √(1 − β₂^step) of parameters with one β₂: tensors where reading the steps would wait for the device."""
    beta = moments[0].beta
    if not isinstance(beta, Tensor) and all(m.step.device.type == "cpu" for m in moments):
        return [1 / math.sqrt(1 - beta ** m.step.item()) for m in moments]
    wide = torch.float32 if device.type == "mps" else torch.float64
    # If a gradient scaler skipped the first step, the count is still 0. As 1, it keeps NaN out of a pull by rate 0.
    steps = torch.stack([m.step.to(device) for m in moments]).to(wide).clamp(min=1)
    beta = beta.to(device, wide) if isinstance(beta, Tensor) else beta
    return list((1 - beta**steps).rsqrt().unbind())


def _pull_in_cache(one: Pull, rate: float) -> None:
    """On a CPU, in pieces whose temporaries stay in the cache."""
    kind = _kind(one.parameter)
    if one.moments is None and not isinstance(one.prior, Tensor) and one.parameter.dtype == one.anchor.dtype:
        one.parameter.lerp_(one.anchor, _share(one.prior, rate))
        return
    correction = _corrections([one.moments], one.parameter.device)[0] if one.moments else 1.0
    parameter, anchor = one.parameter.detach().view(-1), one.anchor.view(-1)
    prior = one.prior.view(-1) if isinstance(one.prior, Tensor) else None
    squares = one.moments.squares.view(-1) if one.moments else None
    threads = torch.get_num_threads()
    # Two threads lose more by waiting for each other at every piece than they gain.
    size = min(GRAIN if threads <= 2 else 2 * GRAIN * threads, parameter.numel())
    # torch.sqrt starts all threads at far fewer entries than other operations do: take roots for many pieces at once.
    ahead = size * max(1, ROOTS // max(size, 1))
    roots = torch.empty(min(ahead, parameter.numel()) if squares is not None else 0, dtype=kind)
    room = [torch.empty(size, dtype=kind) for _ in range(4)]
    for begin in range(0, parameter.numel(), size or 1):
        end = min(begin + size, parameter.numel())
        p_room, a_room, h_room, weight = (r[: end - begin] for r in room)
        here = parameter[begin:end]
        p, a = _converted(here, p_room), _converted(anchor[begin:end], a_room)
        h = _converted(prior[begin:end], h_room) if prior is not None else one.prior
        share: float | Tensor = weight
        if squares is not None:
            assert one.moments is not None and h is not None
            if begin % ahead == 0:
                upcoming = squares[begin : begin + ahead]
                torch.sqrt(_converted(upcoming, roots[: len(upcoming)]), out=roots[: len(upcoming)])
            share = roots[begin % ahead :][: end - begin].mul_(correction)
            if isinstance(h, Tensor):
                share.add_(one.moments.eps).add_(h, alpha=rate)
                torch.div(h, share, out=share).mul_(rate)
            else:
                share.add_(one.moments.eps + rate * h).reciprocal_().mul_(rate * h)
        elif isinstance(h, Tensor):
            torch.add(h, 1 / rate, out=weight)
            torch.div(h, weight, out=weight)
        else:
            share = _share(h, rate)
        p.lerp_(a, share)
        if p is not here:
            here.copy_(p)


def _share(prior: float | None, rate: Any) -> Any:
    return rate if prior is None else rate * prior / (1 + rate * prior)


def _converted(value: Tensor, room: Tensor) -> Tensor:
    return value if value.dtype == room.dtype else room.copy_(value)


def _batches(pulls: Sequence[Pull]) -> Iterator[list[Pull]]:
    batch: list[Pull] = []
    entries = 0
    for one in pulls:
        if batch and entries + one.parameter.numel() > TOGETHER:
            yield batch
            batch, entries = [], 0
        batch.append(one)
        entries += one.parameter.numel()
    if batch:
        yield batch


def _pull_together(batch: Sequence[Pull], rate: float | Tensor) -> None:
    """On a GPU, a few kernels for many parameters. No number is read back from the device."""
    device, kind = batch[0].parameter.device, _kind(batch[0].parameter)
    parameters = [one.parameter for one in batch]
    values = [p.to(kind) for p in parameters]
    anchors = [_moved(one.anchor, device, kind) for one in batch]
    rate = rate.to(device, kind) if isinstance(rate, Tensor) else rate
    number = batch[0].prior
    if isinstance(number, Tensor):
        priors = [_moved(one.prior, device, kind) for one in batch if isinstance(one.prior, Tensor)]
        if batch[0].moments is None:
            shares = list(torch._foreach_div(priors, torch._foreach_add(priors, 1 / rate)))
        else:
            shares, metrics = list(torch._foreach_mul(priors, rate)), _metrics(batch, device, kind)
            torch._foreach_add_(metrics, shares)
            torch._foreach_div_(shares, metrics)
        torch._foreach_lerp_(values, anchors, shares)
    elif batch[0].moments is not None and number is not None:
        shares = _metrics(batch, device, kind)
        torch._foreach_add_(shares, rate * number)
        torch._foreach_reciprocal_(shares)
        torch._foreach_mul_(shares, rate * number)
        torch._foreach_lerp_(values, anchors, shares)
    elif isinstance(rate, Tensor):
        steps = torch._foreach_sub(anchors, values)
        torch._foreach_mul_(steps, _share(number, rate))
        torch._foreach_add_(values, steps)
    else:
        torch._foreach_lerp_(values, anchors, _share(number, rate))
    if values[0] is not parameters[0]:
        torch._foreach_copy_(parameters, values)


def _metrics(batch: Sequence[Pull], device: torch.device, kind: torch.dtype) -> list[Tensor]:
    """D = √v̂ + ε."""
    moments = [one.moments for one in batch if one.moments is not None]
    metrics = list(torch._foreach_sqrt([m.squares.to(kind) for m in moments]))
    corrections = _corrections(moments, device)
    torch._foreach_mul_(metrics, [c.to(kind) if isinstance(c, Tensor) else c for c in corrections])
    torch._foreach_add_(metrics, moments[0].eps)
    return metrics
