"""Huge, tiny and negative weights: results equal the float64 twins, or the merge is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.rules import METHODS

from . import slow, slow_tensors

SIZE = 400
DENSITY = 0.3


def normal(seed: int) -> Tensor:
    return torch.randn(20, SIZE // 20, generator=torch.Generator().manual_seed(seed))


BASE = normal(0)
TUNED = [BASE + 0.3 * normal(seed) for seed in (1, 2, 3)]
PRIOR = normal(4).square()
CURVATURE = [normal(seed).square() for seed in (5, 6, 7)]
GRAMS = [(x := normal(seed)).T @ x for seed in (8, 9, 10)]


def given(name: str, **changes: Any) -> dict[str, Any]:
    inputs = METHODS[name].inputs
    found: dict[str, Any] = {"damping": 1e-10}
    if "prior" in inputs and name != "fisher-averaging":
        found["prior"] = {"w": PRIOR}
    if "curvature" in inputs:
        found["curvature"] = [{"w": c} for c in CURVATURE]
    if "grams" in inputs:
        found["curvature"] = [{"w": g} for g in GRAMS]
    return found | changes


def merge(name: str, weights: Sequence[float], **changes: Any) -> Tensor:
    tuned = [{"w": model} for model in TUNED]
    return gm.merge_state_dicts({"w": BASE}, tuned, name, weights=weights, **given(name, **changes))["w"]


def flat(values: Tensor) -> list[float]:
    return values.double().flatten().tolist()


def expected(name: str, weights: Sequence[float], options: Mapping[str, Any], damping: float) -> Tensor:
    """What the slow function of the rule's name gives for the same numbers."""
    base, tuned = BASE.double().numpy(), [m.double().numpy() for m in TUNED]
    if name == "multislerp":
        want: Any = slow_tensors.multislerp(base, tuned, weights)
    elif name == "regmean":
        want = slow.regmean(tuned, [g.double().numpy() for g in GRAMS], weights, damping)
    else:
        known = {"base": flat(BASE), "tuned": [flat(m) for m in TUNED], "weights": weights, "damping": damping}
        known |= {"prior": flat(PRIOR), "curvature": [flat(c) for c in CURVATURE], "cap": 1.0, **options}
        function: Callable[..., Any] = getattr(slow, name.replace("-", "_"))
        want = function(**{n: known[n] for n in inspect.signature(function).parameters if n in known})
    return torch.as_tensor(want, dtype=torch.float64).reshape(BASE.shape)


def error(got: Tensor, want: Tensor) -> float:
    """The largest relative error of the entries; those below the usual size count as if they were that large."""
    return float(((got.double() - want).abs() / want.abs().clamp(min=float(want.abs().median()))).max())


@pytest.mark.parametrize("wrong", [1.1e30, -1e-31, float("inf"), float("nan")])
def test_a_weight_whose_products_may_overflow_is_refused(wrong: float) -> None:
    with pytest.raises(gm.InputError, match=r"models\[1\].weight"):
        merge("gradient-matching", [1.0, wrong, 1.0])


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "weighted-average": ("weighted-average", {}),
    "fisher-averaging": ("fisher-averaging", {}),
    "fa1": ("fa1", {}),
    "gradient-matching": ("gradient-matching", {}),
    "removal": ("removal", {"cap": "none"}),
    "removal, seen": ("removal", {"base_saw_removed": True, "cap": "none"}),
    "removal, capped": ("removal", {}),
    "sparse": ("sparse-finetuning", {"density": DENSITY, "scope": "tensor", "normalize": False}),
    "sparse, normalised": ("sparse-finetuning", {"density": DENSITY, "scope": "tensor", "normalize": True}),
    "regmean": ("regmean", {}),
    "multislerp": ("multislerp", {}),
}


@pytest.mark.parametrize("weights", [[1e30, 1e30, 5e29], [1e20, 1.0, 1e-20]], ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_large_and_small_weights_are_right(setting: str, weights: Sequence[float]) -> None:
    name, options = SETTINGS[setting]
    if "seen" in setting and weights[0] > 1:
        weights = [weight / 1e5 for weight in weights]  # a strength that takes everything away, divided by the damping
    want = expected(name, weights, options, 1e-10)
    assert error(merge(name, weights, options=options), want) < 1e-6


def test_weights_and_curvature_that_overflow_float32_together_are_right() -> None:
    large = [{"w": c * 1e33} for c in CURVATURE]
    for name in ("fisher-averaging", "fa1", "gradient-matching"):
        changes = {"curvature": large} | ({} if name == "fisher-averaging" else {"prior": {"w": PRIOR * 1e33}})
        got = merge(name, [400.0, 500.0, 3e5], damping=0.0, **changes)
        assert error(got, expected(name, [400.0, 500.0, 3e5], {}, 0.0)) < 1e-6


#: H̄, or the sum of the weights, is then a difference, and of some entries one of nearly equal numbers.
NEGATIVE = [[1.0, 1.0, -0.5], [0.7, -0.6999, 0.01]]


@pytest.mark.parametrize("weights", NEGATIVE, ids=str)
@pytest.mark.parametrize("setting", [s for s in SETTINGS if "sparse" not in s])
def test_negative_weights_are_right(setting: str, weights: Sequence[float]) -> None:
    name, options = SETTINGS[setting]
    assert error(merge(name, weights, options=options), expected(name, weights, options, 1e-10)) < 1e-6


def test_a_negative_weight_of_the_base_is_right() -> None:
    got = merge("weighted-average", [0.5, 0.3, 0.2], base_weight=-0.9999)
    want = slow.weighted_average(flat(BASE), [flat(m) for m in TUNED], [0.5, 0.3, 0.2], -0.9999)
    assert error(got, torch.tensor(want, dtype=torch.float64).reshape(BASE.shape)) < 1e-6


@pytest.mark.parametrize("name", ["weighted-average", "regmean"])
def test_weights_that_sum_to_zero_up_to_rounding_are_refused(name: str) -> None:
    for weights in ([0.1, 0.2, -0.3], [1e30, -1e30, 1e12]):
        with pytest.raises(gm.InputError, match="weight"):
            merge(name, weights)


@pytest.mark.parametrize("name", ["ties", "sparse-finetuning"])
def test_weights_that_cancel_at_an_entry_do_not_blow_it_up(name: str) -> None:
    options = {"density": 1.0} | ({"normalize": True} if name == "sparse-finetuning" else {})
    got = merge(name, [0.1, 0.2, -0.3], options=options)
    assert float((got - BASE).abs().max()) < 10


@pytest.mark.parametrize(
    ("name", "field", "changes"),
    [
        ("gradient-matching", "damping", {"damping": 1e308}),
        ("gradient-matching", "prior", {"prior": 1e36}),
        ("ties", "scale", {"options": {"scale": 1e308}}),
    ],
)
def test_other_numbers_that_are_too_large_are_refused(name: str, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(gm.InputError, match=field):
        merge(name, [1.0, 1.0, 1.0], **changes)
