"""A step of PriorAdamW against a step of torch's AdamW.

    python -m benchmarks.optimizer --json benchmarks/results/optimizer-cpu.json

makes parameters in the shapes of GPT-2, as many layers as come nearest to the number asked for, with random gradients.
Every optimizer takes a step in turn, so that noise hits all of them. A ratio is a step's time over that of
``torch.optim.AdamW(params)``, as made by default, in the same turn; the table shows medians. All optimizers work on the
same parameters and share Adam's moments, to save memory; each has its own anchors and priors. Speed never decides the
exit status.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradmerge as gm

from .curvature import machine, say, versions

#: A step may cost this much of torch's default, with a curvature as prior.
BAR = 1.15
WIDTH, VOCABULARY, POSITIONS = 768, 50257, 1024


def shapes(parameters: int) -> list[tuple[int, ...]]:
    """Those of GPT-2, with fewer words where the number is small."""
    embeddings = [(min(VOCABULARY, max(1, parameters // 2 // WIDTH)), WIDTH), (POSITIONS, WIDTH)]
    layer: list[tuple[int, ...]] = [
        *[(WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)],
        *[(WIDTH,), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)],
    ]
    left = parameters - sum(torch.Size(s).numel() for s in embeddings)
    count = max(1, round(left / sum(torch.Size(s).numel() for s in layer)))
    return [*embeddings, *(layer * count), (WIDTH,), (WIDTH,)]


def optimizers(params: list[nn.Parameter], device: torch.device) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    named = [(str(i), p) for i, p in enumerate(params)]

    def ours(prior: str | None = None, **options: Any) -> Callable[[], torch.optim.Optimizer]:
        return lambda: gm.PriorAdamW(named, prior=prior or curvature(params), **options)

    found = {
        "AdamW": lambda: torch.optim.AdamW(params),
        "AdamW, foreach": lambda: torch.optim.AdamW(params, foreach=True),
        "AdamW, fused": lambda: torch.optim.AdamW(params, fused=True),
        "PriorAdamW, curvature": ours(),
        "PriorAdamW, curvature, in Adam's metric": ours(coupling="adam"),
        "PriorAdamW, identity": ours(prior="identity"),
        "PriorAdamW, strength 0": ours(prior="identity", strength=0.0),
    }
    if device.type == "cuda":
        found["PriorAdamW, curvature, kept on the CPU"] = ours(keep_on="cpu")
    return found


def curvature(params: list[nn.Parameter]) -> dict[str, Tensor]:
    return {str(i): torch.rand_like(p, requires_grad=False) for i, p in enumerate(params)}


def prepare(
    params: list[nn.Parameter], makers: dict[str, Callable[[], torch.optim.Optimizer]]
) -> dict[str, torch.optim.Optimizer]:
    """Every optimizer after its first step, with the moments of the first one."""
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
        result[name] = optimizer
        gc.collect()
    return result


def measure(made: dict[str, torch.optim.Optimizer], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of a step, by optimizer and repeat."""

    def seconds(optimizer: torch.optim.Optimizer) -> float:
        synchronize(device)
        begun = time.perf_counter()
        optimizer.step()
        synchronize(device)
        return time.perf_counter() - begun

    for optimizer in made.values():
        seconds(optimizer)
    times: dict[str, list[float]] = {name: [] for name in made}
    for repeat in range(repeats):
        for name, optimizer in made.items():
            times[name].append(seconds(optimizer))
        say(f"turn {repeat + 1} of {repeats}: AdamW {times['AdamW'][-1]:.4f} s")
    return times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(times: dict[str, list[float]], settings: dict[str, Any], device: torch.device) -> dict[str, Any]:
    ratios = {
        name: [mine / default for mine, default in zip(values, times["AdamW"], strict=True)]
        for name, values in times.items()
    }
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    value = medians["PriorAdamW, curvature"]
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": {name: versions()[name] for name in ("python", "gradmerge", "torch")},
        "settings": settings,
        "optimizers": {
            name: {
                "median_seconds": statistics.median(values),
                "least_seconds": min(values),
                "ratio_to_adamw": medians[name],
                "ratios": ratios[name],
            }
            for name, values in times.items()
        },
        "bar": {
            "what": "PriorAdamW with a curvature over AdamW",
            "value": value,
            "limit": BAR,
            "holds": value <= BAR,
        },
    }


def text(found: dict[str, Any]) -> str:
    settings, where = found["settings"], found["machine"]
    lines = [
        f"{settings['parameters'] / 1e6:.1f} M parameters in {settings['dtype']}, on "
        f"{where['gpu'] or str(where['threads']) + ' threads of ' + where['cpu']}",
        f"{'':52}{'s a step':>10}{'least':>10}{'× AdamW':>10}",
    ]
    for name, row in found["optimizers"].items():
        lines.append(f"{name:52}{row['median_seconds']:10.4f}{row['least_seconds']:10.4f}{row['ratio_to_adamw']:10.2f}")
    bar = found["bar"]
    lines.append(
        f"{bar['what']}: {bar['value']:.3g}, bar ≤ {bar['limit']:g}: {'holds' if bar['holds'] else 'DOES NOT HOLD'}"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="The time of a step of PriorAdamW against torch's AdamW.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="how many, about")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, help="threads of the CPU (PyTorch's choice)")
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    options = parser.parse_args()
    if options.repeats < 1 or options.parameters < 1:
        parser.error("--repeats and --parameters are at least 1")
    if options.threads:
        torch.set_num_threads(options.threads)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(s, device=device, dtype=dtype).mul_(0.02)) for s in shapes(options.parameters)]
    for p in params:
        p.grad = torch.randn_like(p, requires_grad=False)
    times = measure(prepare(params, optimizers(params, device)), options.repeats, device)
    settings = {
        "device": options.device,
        "parameters": sum(p.numel() for p in params),
        "tensors": len(params),
        "dtype": options.dtype,
        "repeats": options.repeats,
    }
    found = report(times, settings, device)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    print(text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
