"""Curvature a second time: one example without padding, one backward pass, square, add. Nothing here is of gradmerge.

An example is a mapping of tensors without an axis of examples; its labels are under "labels". Examples of modules that
take their arguments by place have them under "0", "1", …
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Example = Mapping[str, Tensor]
MASKED = -100


def logits_of(model: nn.Module, example: Example) -> Tensor:
    """What the model says about one example, alone in its batch; without the axis of examples."""
    inputs = {name: value[None] for name, value in example.items() if name != "labels"}
    if "0" in inputs:
        result: Any = model(*(inputs[name] for name in sorted(inputs)))
    else:
        config: Any = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            labels = [config.pad_token_id if label == MASKED else label for label in example["labels"].tolist()]
            inputs["decoder_input_ids"] = torch.tensor([[config.decoder_start_token_id, *labels[:-1]]])
        result = model(**inputs)
    return (result if isinstance(result, Tensor) else result.logits)[0]


def loss_of(logits: Tensor, labels: Tensor, output: str) -> Tensor:
    """−log p(labels), up to a constant, term by term."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if output == "classes":
        return -logits.log_softmax(-1)[int(labels)]
    if output == "labels":
        return -torch.stack([_log_bernoulli(z, y) for z, y in zip(logits, labels.tolist(), strict=True)]).sum()
    if output == "squared":
        return (logits - labels).square().sum()
    after = 1 if output == "next-token" else 0
    terms = [
        -logits[place - after].log_softmax(-1)[label]
        for place, label in enumerate(labels.tolist())
        if place >= after and label != MASKED
    ]
    return torch.stack(terms).sum()


def _log_bernoulli(z: Tensor, y: float) -> Tensor:
    return nn.functional.logsigmoid(z if y else -z)


def every_label(logits: Tensor, output: str) -> list[tuple[float, Tensor]]:
    """(probability, labels) of everything that the model could answer.

    A Gaussian of variance ½ has the first and second moments of the two points ±√½; squared gradients need no more.
    """
    logits = logits.detach()
    if output == "classes":
        return [(float(p), torch.tensor(c)) for c, p in enumerate(logits.softmax(-1))]
    found = []
    for signs in itertools.product((0.0, 1.0), repeat=len(logits)):
        y = torch.tensor(signs, dtype=logits.dtype)
        if output == "labels":
            found.append((float(torch.where(y == 1, logits.sigmoid(), (-logits).sigmoid()).prod()), y))
        else:
            found.append((0.5 ** len(logits), logits + math.sqrt(0.5) * (2 * y - 1)))
    return found


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """∇ loss by the names of parameters; zero where one is not used."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def empirical(
    model: nn.Module, examples: Sequence[Example], output: str, labels: Sequence[Tensor] | None = None
) -> dict[str, Tensor]:
    """Σ_i [∇ℓ_i]² with the labels of the examples, or with others."""
    answers = labels or [example["labels"] for example in examples]
    return _sum(
        (1.0, gradients(model, loss_of(logits_of(model, example), answer, output)))
        for example, answer in zip(examples, answers, strict=True)
    )


def exact(model: nn.Module, examples: Iterable[Example], output: str) -> dict[str, Tensor]:
    """Σ_i Σ_y p(y | x_i) [∇ −log p(y | x_i)]², over all answers y."""
    terms = []
    for example in examples:
        logits = logits_of(model, example)
        terms += [(p, gradients(model, loss_of(logits, y, output))) for p, y in every_label(logits, output)]
    return _sum(terms)


def _sum(terms: Iterable[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for factor, gradient in terms:
        for name, value in gradient.items():
            square = factor * value.double() ** 2
            total[name] = total[name] + square if name in total else square
    return total


def assert_same(got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float) -> None:
    """Every entry differs by ``tolerance`` of its parameter's largest at most.

    A gradient that is zero but for rounding is held against the largest entry of its layer.
    """
    assert got.keys() == want.keys()
    rounding = 1e-12 if tolerance < 1e-8 else 1e-5
    layers: dict[str, float] = {}
    for name, value in want.items():
        layer = name.rpartition(".")[0]
        layers[layer] = max(layers.get(layer, 0.0), float(value.max()))
    for name, value in want.items():
        scale = max(float(value.max()), rounding * layers[name.rpartition(".")[0]])
        error = float((got[name].double() - value.double()).abs().max())
        assert got[name].shape == value.shape, name
        assert error <= tolerance * scale, f"{name}: differs by {error:.2e}, its largest entry is {scale:.2e}"


def grams(model: nn.Module, layers: Sequence[str], run: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """x xᵀ, input vector by input vector, of some layers' inputs while ``run`` calls the model."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def add(_: nn.Module, inputs: Sequence[Tensor]) -> None:
            for x in inputs[0].detach().reshape(-1, inputs[0].shape[-1]):
                found[name] = found.get(name, 0) + torch.outer(x, x)

        return add

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in layers]
    try:
        run(model)
    finally:
        for handle in handles:
            handle.remove()
    return found
