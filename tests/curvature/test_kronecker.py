"""Kronecker factors, against a loop over examples that writes down what enters each layer and what comes back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.curvature import Curvature
from gradmerge.curvature.estimate import estimate_curvature

from . import slow
from .families import EXACT, FAMILIES, batch_of, batches_of
from .slow import Example
from .test_estimate import CLASSIFIERS, made, wanted
from .test_verify import TwiceWhenLong, batches_of_lengths

#: Weights of linear layers that have a diagonal: tied to an embedding, or used more than once per example.
WITHOUT = {
    "bert, masked": {"cls.predictions.decoder"},
    "albert": {"albert.encoder.albert_layer_groups.0.albert_layers.0"},
    "gpt2": {"lm_head"},
    "llama, tied": {"lm_head"},
    "gemma2": {"lm_head"},
    "opt": {"lm_head"},
    "t5": {"lm_head"},
    "bart": {"lm_head"},
}


def is_layer(module: Any) -> bool:
    convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
    return convolution or isinstance(module, nn.Linear) or hasattr(module, "nf")


def rows_of(module: Any, x: Tensor) -> Tensor:
    """(tokens, in + 1): what the layer's matrix is multiplied with; of a convolution, its patches."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        settings: Any = {name: getattr(module, name) for name in ("stride", "padding", "dilation")}
        if module.padding_mode != "zeros":
            x = nn.functional.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            settings["padding"] = 0
        picked = torch.eye(module.weight[0].numel(), dtype=x.dtype).view(-1, *module.weight.shape[1:])
        convolve: Any = {3: nn.functional.conv1d, 4: nn.functional.conv2d}[module.weight.dim()]
        x = convolve(x, picked, **settings).movedim(1, -1)
    x = x.reshape(-1, x.shape[-1])
    return x if module.bias is None else torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def loop(model: nn.Module, examples: Sequence[Example], output: str, exact: bool = False) -> dict[str, Any]:
    """Weight → (A, G, T), of every layer that an example goes through once."""
    calls: dict[str, list[Any]] = {}
    sums: dict[str, Any] = {}
    trained = [(path, m) for path, m in model.named_modules() if is_layer(m) and m.weight.requires_grad]
    layers = {f"{path}.weight".lstrip("."): module for path, module in trained}

    def note(name: str, module: nn.Module, inputs: Any, result: Tensor) -> None:
        logits = result[-1] if isinstance(result, tuple) else result  # of Llama 4, a router
        calls.setdefault(name, []).append((inputs[0].detach(), logits))

    hooks = [layer.register_forward_hook(functools.partial(note, name)) for name, layer in layers.items()]
    try:
        for example in examples:
            calls.clear()
            logits = slow.logits_of(model, example)
            once = {name: seen[0] for name, seen in calls.items() if len(seen) == 1}
            for name, (x, _) in once.items():
                x = rows_of(layers[name], x)
                before = sums.setdefault(name, [0.0, 0.0, 0])
                sums[name] = [before[0] + x.T @ x, before[1], before[2] + len(x)]
            for p, labels in slow.every_label(logits, output) if exact else [(1.0, example["labels"])]:
                loss, results = slow.loss_of(logits, labels, output), [result for _, result in once.values()]
                gradients = torch.autograd.grad(loss, results, retain_graph=True, allow_unused=True)
                for name, y in zip(once, gradients, strict=True):
                    if y is not None:
                        y = y.movedim(1, -1) if isinstance(layers[name], nn.Conv1d | nn.Conv2d) else y
                        y = y.reshape(-1, y.shape[-1])
                        sums[name][1] = sums[name][1] + p * y.T @ y
    finally:
        for hook in hooks:
            hook.remove()
    return sums


@functools.cache
def wanted_factors(name: str, exact: bool = False) -> dict[str, Any]:
    model, examples = made(name)
    return loop(model, examples, FAMILIES[name].output, exact)


def assert_factors(got: Curvature, want: dict[str, Any], tolerance: float) -> None:
    largest = max(float(outputs.abs().max()) for _, outputs, _ in want.values())
    for name, layer in got.layers.items():
        inputs, outputs, tokens = want[name]
        assert layer.tokens == tokens, name
        torch.testing.assert_close(
            layer.inputs.double(), inputs.double(), rtol=0, atol=tolerance * float(inputs.abs().max())
        )
        size = float(outputs.abs().max()) + 1e-3 * largest
        torch.testing.assert_close(layer.outputs.double(), outputs.double(), rtol=0, atol=tolerance * size)


def estimated(model: nn.Module, batches: Any, likelihood: str = "empirical", **options: Any) -> Curvature:
    return estimate_curvature(model, batches, likelihood, kind="kronecker", **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_has_the_factors_of_single_examples_and_other_parameters_a_diagonal(name: str) -> None:
    model, examples = made(name)
    squares = wanted(name)
    linear = {f"{path}.weight".lstrip(".") for path, module in model.named_modules() if is_layer(module)}
    longer = {"longer": 1} if "input_ids" in examples[0] else {}
    for batches in ([batch_of(examples)], batches_of(examples, (1, 3, 1), **longer)):
        got = estimated(model, batches)
        assert (got.examples, got.likelihood) == (5, "empirical")
        assert_factors(got, wanted_factors(name), max(EXACT, FAMILIES[name].tolerance))
        biases = {key.removesuffix("weight") + "bias" for key in got.layers}
        assert got.diagonal.keys() == squares.keys() - got.layers.keys() - biases
        slow.assert_same(got.diagonal, {key: squares[key] for key in got.diagonal}, FAMILIES[name].tolerance)
        lacking = {key for key in linear - got.layers.keys() if not key.startswith(tuple(WITHOUT.get(name, ["-"])))}
        assert lacking <= {part for part in got.diagonal if any(key in part for key in FAMILIES[name].slow)}


@pytest.mark.parametrize("name", CLASSIFIERS[:4])
def test_exact_is_the_expectation_over_all_classes(name: str) -> None:
    model, examples = made(name)
    got = estimated(model, batches_of(examples, (2, 3)), "exact")
    assert_factors(got, wanted_factors(name, exact=True), max(EXACT, FAMILIES[name].tolerance))


@pytest.mark.parametrize("name", ["bert", "gpt2, classes"])
def test_of_a_model_with_adapters_the_factors_are_those_of_the_adapters_alone(name: str) -> None:
    targets = {"bert": ["query", "value", "dense"], "gpt2, classes": ["c_attn", "c_fc"]}[name]
    config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.1, fan_in_fan_out=name != "bert")
    model: Any = peft.get_peft_model(FAMILIES[name].model(), config)
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model = model.double().eval()
    examples = FAMILIES[name].examples()
    got = estimated(model, batches_of(examples, (2, 3), longer=1))
    assert got.layers.keys() == {key for key, p in model.named_parameters() if p.requires_grad}
    assert not got.diagonal
    assert all("lora_" in key for key in got.layers)
    assert_factors(got, loop(model, examples, "classes"), EXACT)


class Mixed(nn.Module):
    """Two layers whose inputs are the same in some batches, and two with one input of which one has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.c(x)).tanh() + self.b(x if x.shape[1] > 2 else 2 * x).mean(1)[:, None]


def test_inputs_that_are_the_same_only_now_and_then_are_told_apart() -> None:
    torch.manual_seed(0)
    model = Mixed().double()
    batches = [torch.randn(3, n, 4, dtype=torch.float64) for n in (3, 1, 3, 2, 1, 4)]
    outputs = [model(x) for x in batches]
    got = estimated(model, [(x, torch.randn(o.shape)) for x, o in zip(batches, outputs, strict=True)], output="squared")
    for name in "abc":
        seen = [2 * x if name == "b" and x.shape[1] <= 2 else x for x in batches]
        rows = torch.cat([x.flatten(0, 1) for x in seen])
        rows = rows if name == "c" else torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], 1)
        torch.testing.assert_close(got.layers[f"{name}.weight"].inputs, rows.T @ rows, rtol=1e-12, atol=1e-12)
        assert got.layers[f"{name}.weight"].tokens == len(rows)


def test_wide_layers_have_a_diagonal_and_are_named() -> None:
    model, examples = made("bert")
    got = estimated(model, [batch_of(examples)], max_kronecker_dim=8)
    every = estimated(model, [batch_of(examples)])
    wide = {n for n, p in model.named_parameters() if p.dim() == 2 and max(p.shape) > 8 and "embeddings" not in n}
    assert len(wide) == 4 and got.layers.keys() == every.layers.keys() - wide
    assert wide | {name.replace("weight", "bias") for name in wide} <= got.diagonal.keys()
    assert all(name in got.notes[0] for name in wide) and not every.notes


class Halting(nn.Module):
    """One layer is not used, and one does not let a gradient through."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.detached, self.unused = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.detached(x).detach()


def test_layers_that_no_gradient_reaches_have_a_diagonal_and_are_named() -> None:
    got = estimated(Halting(), [(torch.randn(3, 4), torch.tensor([0, 1, 2]))])
    assert got.layers.keys() == {"used.weight"}
    assert not got["detached.weight"].any() and not got["unused.weight"].any()
    assert "detached.weight" in got.notes[0] and "unused.weight" in got.notes[0]


def test_a_layer_that_a_later_batch_uses_twice_has_no_factors() -> None:
    _, batches = batches_of_lengths((3, 5))
    with pytest.raises(gm.InputError, match=r"layer\.weight"):
        estimated(TwiceWhenLong(), batches)
