"""A step of PriorAdamW against a step of torch's AdamW.

    python -m benchmarks.optimizer --json benchmarks/results/optimizer-cpu.json

makes parameters in the shapes of GPT-2 with random gradients. Every optimizer takes a step in turn. A ratio is a step's
time over that of ``torch.optim.AdamW(params)`` in the same turn. All optimizers work on the same parameters and share
Adam's moments, to save memory; each has its own anchors and priors.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import gradmerge as gm

from .timing import in_turn, machine, parser_of, say, seconds, text_table, versions, write_report

WIDTH, VOCABULARY, POSITIONS = 768, 50257, 1024


def shapes(parameters: int) -> list[tuple[int, ...]]:
    """Return those of GPT-2, with fewer words if the number is small."""
    embeddings = [(min(VOCABULARY, max(1, parameters // 2 // WIDTH)), WIDTH), (POSITIONS, WIDTH)]
    layer: list[tuple[int, ...]] = [
        *[(WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)],
        *[(WIDTH,), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)],
    ]
    left = parameters - sum(torch.Size(s).numel() for s in embeddings)
    count = max(1, round(left / sum(torch.Size(s).numel() for s in layer)))
    return [*embeddings, *(layer * count), (WIDTH,), (WIDTH,)]


def optimizers(params: list[nn.Parameter], device: str) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    named = [(str(i), p) for i, p in enumerate(params)]

    def ours(prior: str | None = None, **options: Any) -> Callable[[], torch.optim.Optimizer]:
        def make() -> torch.optim.Optimizer:
            curvature = {str(i): torch.rand_like(p, requires_grad=False) for i, p in enumerate(params)}
            return gm.PriorAdamW(named, prior=prior or curvature, **options)

        return make

    found = {
        "AdamW": lambda: torch.optim.AdamW(params),
        "AdamW, foreach": lambda: torch.optim.AdamW(params, foreach=True),
        "AdamW, fused": lambda: torch.optim.AdamW(params, fused=True),
        "PriorAdamW, curvature": ours(),
        "PriorAdamW, curvature, in Adam's metric": ours(coupling="adam"),
        "PriorAdamW, identity": ours(prior="identity"),
        "PriorAdamW, strength 0": ours(prior="identity", strength=0.0),
    }
    if device == "cuda":
        found["PriorAdamW, curvature, kept on the CPU"] = ours(keep_on="cpu")
    return found


def prepared(
    params: list[nn.Parameter], makers: dict[str, Callable[[], torch.optim.Optimizer]]
) -> dict[str, torch.optim.Optimizer]:
    """Return every optimizer after its first step, with the moments of the first one."""
    result: dict[str, torch.optim.Optimizer] = {}
    moments: list[dict[str, Tensor]] = []
    for name, make in makers.items():
        say(f"making {name}")
        optimizer = make()
        optimizer.step()
        if not moments:
            moments = [{k: v for k, v in optimizer.state[p].items() if k != "step"} for p in params]
        for p, shared in zip(params, moments, strict=True):
            optimizer.state[p].update(shared)
        optimizer.step()
        result[name] = optimizer
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="about how many")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    how = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(s, **how).mul_(0.02)) for s in shapes(options.parameters)]
    for p in params:
        p.grad = torch.randn_like(p, requires_grad=False)
    made = prepared(params, optimizers(params, options.device))
    sides = {name: partial(seconds, optimizer.step, options.device) for name, optimizer in made.items()}
    times = in_turn(sides, options.repeats)
    found = {}
    for name, values in times.items():
        ratios = [mine / default for mine, default in zip(values, times["AdamW"], strict=True)]
        medians = {"median_seconds": statistics.median(values), "ratio_to_adamw": statistics.median(ratios)}
        found[name] = {**medians, "least_seconds": min(values), "ratios": ratios}
    settings = vars(options) | {"parameters": sum(p.numel() for p in params), "tensors": len(params), "json": None}
    facts = {"machine": machine(options.device), "versions": versions(), "settings": settings}
    write_report(options.json, **facts, optimizers=found)
    rows = [[name, f"{row['median_seconds']:.4f}", f"{row['ratio_to_adamw']:.2f}"] for name, row in found.items()]
    print(text_table(["", "s per step", "× AdamW"], rows))


if __name__ == "__main__":
    main()
