"""Curvature from one backward pass a batch, against a loop over single examples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature import losses
from gradmerge.curvature.estimate import estimate_curvature

from . import slow
from .families import EXACT, FAMILIES, FAST, ROUNDED, Net, batch_of, batches_of
from .slow import Example, assert_same

SOME = ["bert", "gpt2", "llama, tied", "t5", "vit", "mixtral", "gpt-oss"]
CLASSIFIERS = [name for name, family in FAMILIES.items() if family.output == "classes"]


@functools.cache
def made(name: str) -> tuple[Any, list[Example]]:
    return FAMILIES[name].model(), FAMILIES[name].examples()


@functools.cache
def wanted(name: str, likelihood: str = "empirical") -> dict[str, Tensor]:
    model, examples = made(name)
    return getattr(slow, likelihood)(model, examples, FAMILIES[name].output)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_the_sum_of_the_squares_of_single_examples(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, examples = made(name)
    want = wanted(name)
    family = FAMILIES[name]
    for parameter, value in want.items():
        vanishes = float(value.max()) < 1e-20 * max(float(v.max()) for v in want.values())
        assert vanishes == any(part in parameter for part in family.zero), f"{parameter}: the test would see nothing"
    for batches in (
        [batch_of(examples)],
        batches_of(examples, (1, 3, 1), **({"longer": 1} if "input_ids" in examples[0] else {})),
    ):
        got = estimate_curvature(model, batches)
        assert (got.examples, got.likelihood) == (5, "empirical")
        assert_same(got, want, family.tolerance)
    assert bool(caplog.records) == bool(family.slow), "a formula fits every other parameter"


@pytest.mark.parametrize("name", FAST)
def test_float32_is_the_same_to_its_rounding(name: str, caplog: pytest.LogCaptureFixture) -> None:
    family = FAMILIES[name]
    got = estimate_curvature(family.model(torch.float32), [batch_of(family.examples(torch.float32))])
    assert {value.dtype for value in got.values()} == {torch.float32}
    assert_same(got, wanted(name), 2e-4)
    assert not caplog.records


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The labels that are drawn while a test runs, a batch each."""
    found: list[Tensor] = []

    def recording(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def recorded(*args: Any) -> Tensor:
            found.append(draw(*args))
            return found[-1]

        return recorded

    for kind in (losses.ClassLoss, losses.LabelsLoss, losses.SquaredLoss, losses.TokenLoss):
        monkeypatch.setattr(kind, "draw", recording(kind.draw))
    return found


@pytest.mark.parametrize("name", SOME)
def test_sampled_takes_the_labels_that_are_drawn(name: str, drawn: list[Tensor]) -> None:
    model, examples = made(name)
    family = FAMILIES[name]
    got = estimate_curvature(model, [batch_of(examples)], "sampled", seed=3)
    labels = [row[: len(e["labels"])] if e["labels"].dim() else row for row, e in zip(drawn[0], examples, strict=True)]
    for answer, example in zip(labels, examples, strict=True):
        data = example["labels"]
        assert torch.equal((answer == slow.MASKED), (data == slow.MASKED)), "what does not count is not drawn"
    assert_same(got, slow.empirical(model, examples, family.output, labels), family.tolerance)
    again = estimate_curvature(model, batches_of(examples, (2, 3)), "sampled", seed=3)
    assert_same(again, got, family.tolerance)


def test_sampled_labels_do_not_depend_on_batches_or_padding_but_on_the_seed() -> None:
    model, examples = made("llama, tied")
    whole = estimate_curvature(model, [batch_of(examples)], "sampled", seed=7)
    for batches in (
        batches_of(examples, [1] * 5),
        [batch_of(examples, longer=3)],
        [batch_of(examples, left=True)],
        batches_of(examples, (4, 1), left=True, longer=1),
    ):
        assert_same(estimate_curvature(model, batches, "sampled", seed=7), whole, ROUNDED)
    other = estimate_curvature(model, [batch_of(examples)], "sampled", seed=8)
    assert max(float((other[n] / v - 1).abs().nan_to_num(0).max()) for n, v in whole.items()) > 0.1


# What is wrong with the data.


def test_no_examples_are_an_error() -> None:
    model, examples = made("bert")
    with pytest.raises(gm.InputError):
        estimate_curvature(model, [])
    nothing = {name: value[:0] for name, value in batch_of(examples).items()}
    with pytest.raises(gm.InputError):
        estimate_curvature(model, [nothing])
    batches = [nothing, batch_of(examples[:3]), nothing, batch_of(examples[3:])]
    assert_same(estimate_curvature(model, batches), wanted("bert"), EXACT)


@pytest.mark.parametrize(("likelihood", "sizes"), [("empirical", (4,)), ("sampled", (1, 1, 1, 1)), ("exact", (4,))])
def test_a_loss_that_is_no_number_names_the_example(likelihood: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    x = torch.randn(4, 3)
    x[2, 1] = torch.nan
    labels = torch.tensor([0, 1, 2, 0])
    batches = list(zip(x.split(sizes), labels.split(sizes), strict=True))
    with pytest.raises(gm.InputError, match="example 2"):
        estimate_curvature(model, batches, likelihood)


@pytest.mark.parametrize(
    ("output", "labels"),
    [
        ("classes", None),
        ("classes", torch.tensor(1)),
        ("classes", torch.rand(5)),
        ("classes", torch.zeros(5, 3).long()),
        ("classes", torch.tensor([0, 1, 2, 3, 0])),
        ("labels", torch.tensor([[0, 1, 2]] * 5)),
        ("squared", torch.full((5, 3), torch.nan)),
        ("tokens", torch.zeros(5).long()),
    ],
)
def test_labels_that_do_not_fit_the_model_are_refused(output: str, labels: Tensor | None) -> None:
    model, examples = made("bert")
    batch = {name: value for name, value in batch_of(examples).items() if name != "labels"}
    with pytest.raises(gm.InputError, match="label"):
        estimate_curvature(model, [batch if labels is None else batch | {"labels": labels}], output=output)


def test_unknown_words_are_refused() -> None:
    model, examples = made("bert")
    for words in ({"likelihood": "emprical"}, {"output": "class"}):
        with pytest.raises(gm.InputError):
            estimate_curvature(model, [batch_of(examples)], **words)


# What is left of it in the model.


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that measuring touches for a while."""
    return {
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "inplace": [getattr(module, "inplace", None) for module in model.modules()],
        "hooks": [
            [len(v) for k, v in module.__dict__.items() if k.endswith("_hooks") and isinstance(v, dict)]
            for module in model.modules()
        ],
        "gradients": [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in model.parameters()],
        "parameters": [(id(p), p.requires_grad, p.tolist()) for p in model.parameters()],
        "buffers": [b.tolist() for b in model.buffers()],
    }


def used(name: str) -> tuple[Any, Any]:
    """A model as it is found amid its training: some modules in eval mode, some parameters frozen, gradients of all."""
    family = FAMILIES[name]
    model, examples = family.model(), family.examples()
    model.train()
    for number, (_, module) in enumerate(model.named_modules()):
        if number % 3 == 1 or isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter)
        if number % 4 == 1:
            parameter.requires_grad_(False)
            parameter.grad = None
    return model, batch_of(examples)


@pytest.mark.parametrize("name", ["bert", "llama, tied", "mixtral", FAST[-1]])
@pytest.mark.parametrize("likelihood", ["empirical", "sampled"])
def test_the_model_is_left_as_it_was_found(name: str, likelihood: str) -> None:
    model, batch = used(name)
    before = state_of(model)
    got = estimate_curvature(model, [batch, batch], likelihood)
    assert state_of(model) == before
    assert got.keys() == {n for n, p in model.named_parameters() if p.requires_grad}


class Broken(Exception):
    pass


@pytest.mark.parametrize("name", ["llama, tied", FAST[-1]])
@pytest.mark.parametrize("when", ["forward", "backward", "batch"])
def test_the_model_is_left_as_it_was_found_by_an_error_too(name: str, when: str) -> None:
    model, batch = used(name)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]

    def fail(*_: Any) -> None:
        raise Broken

    handle = None
    if when == "forward":
        handle = last.register_forward_hook(fail)
    if when == "backward":
        handle = last.register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    before = state_of(model)

    def batches() -> Iterator[Any]:
        yield batch
        raise Broken

    with pytest.raises(Broken):
        estimate_curvature(model, batches())
    assert state_of(model) == before
    if handle is not None:
        handle.remove()


def test_frozen_parameters_are_not_measured_and_change_nothing() -> None:
    model, examples = FAMILIES["bert"].model(), FAMILIES["bert"].examples()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.1" in name or "word_embeddings" in name)
    got = estimate_curvature(model, [batch_of(examples)])
    assert_same(got, {n: v for n, v in wanted("bert").items() if "layer.1" in n or "word_embeddings" in n}, EXACT)
    with pytest.raises(gm.InputError):
        estimate_curvature(model.requires_grad_(False), [batch_of(examples)])


def test_batch_norm_that_mixes_examples_is_refused() -> None:
    batch = (torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]))
    model = Net().train()
    with pytest.raises(gm.InputError, match="batch_norm"):
        estimate_curvature(model, [batch])
    assert model.training
    without = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192, track_running_stats=False), nn.Linear(192, 3)).eval()
    with pytest.raises(gm.InputError):
        estimate_curvature(without, [batch])


# Activations that are computed again.


def calls_for_a_batch(model: nn.Module, batch: Any, likelihood: str) -> tuple[gm.Curvature, int]:
    """The curvature of two equal batches, and how often the first layer ran for the second of them."""
    layer = next(m for m in model.modules() if any(b.__name__ == "GradientCheckpointingLayer" for b in type(m).__mro__))
    inside = next(m for m in layer.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D")
    calls, counts = 0, [0]

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handle = inside.register_forward_pre_hook(count)
    got = estimate_curvature(model, [batch, batch], likelihood, each_batch=lambda _: counts.append(calls))
    handle.remove()
    return got, counts[-1] - counts[-2]


@pytest.mark.parametrize(
    ("name", "likelihood", "reentrant"),
    [
        ("bert", "exact", True),
        ("bert", "exact", False),
        ("llama, tied", "empirical", True),
        ("t5", "empirical", False),
        ("mixtral", "empirical", False),
        ("gpt-oss", "empirical", True),
    ],
)
def test_gradient_checkpointing_gives_the_same_and_computes_layers_again(
    name: str, likelihood: str, reentrant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    family = FAMILIES[name]
    model, batch = family.model(), batch_of(family.examples())
    _, plain = calls_for_a_batch(model, batch, likelihood)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    before = state_of(model)
    got, again = calls_for_a_batch(model, batch, likelihood)
    assert state_of(model) == before
    if not family.slow:
        assert plain == 1
        assert again == (3 if likelihood == "exact" else 2), "once forward, and once more in each backward pass"
        assert not caplog.records
    assert again >= 2 * plain
    assert_same(got, {n: 2 * v for n, v in wanted(name, likelihood).items()}, family.tolerance)


def test_experts_without_tokens_have_no_curvature_and_are_counted() -> None:
    family = FAMILIES["mixtral"]
    model, batch = family.model(), batch_of(family.examples())
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[:] = torch.randn(model.config.hidden_size)  # equal scores: the first two of three
    for kind in ("diagonal", "kronecker"):
        got = gm.estimate_curvature(model, [batch], kind=kind)
        assert not bool(got["model.layers.0.mlp.experts.down_proj"][2].any())
        assert "2 of 6" in got.notes[0]
        assert len(got.notes) == (2 if kind == "kronecker" else 1)
