"""Every rule against its slow twin, in float64 and float32; special cases of gradient matching; algebra."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gradmerge.rules import METHODS
from gradmerge.rules.sparse import trim

from . import slow

SIZE = 200
DTYPES = {torch.float64: 1e-12, torch.float32: 3e-6}


class Case:
    """Random models and curvature; some entries of the curvature are 0 in all of them."""

    def __init__(self, dtype: torch.dtype = torch.float64, models: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal() -> Tensor:
            return torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype)

        self.base = normal()
        self.tuned = [self.base + 0.3 * normal() for _ in range(models)]
        self.prior = normal().square()
        self.curvature = [normal().square() * 10.0 ** (t - 1) for t in range(models)]
        self.penalty = normal().square()
        for values in (self.prior, *self.curvature):
            values[:20] = 0
        # Larger than Σ |α| F, so that H̄ is not a difference of nearly equal numbers; the first entries stay 0.
        self.large_prior = self.prior + 30 * (self.prior > 0)
        self.penalties = [self.penalty, None, self.penalty * 3][:models]
        self.weights = [0.7, 1.0, -0.2][:models]
        self.positive = [0.7, 1.0, 0.2][:models]

    def thresholds(self, density: float) -> list[float]:
        return [slow.threshold((m - self.base).tolist(), density) for m in self.tuned]


def as_lists(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double().tolist()
    return [as_lists(v) for v in value] if isinstance(value, list) else value


#: Label → rule, arguments of it and of its slow twin (names of a case's values, or constants), and options.
TWINS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {}


def twin(name: str, *arguments: Any, **options: Any) -> None:
    TWINS[" ".join(map(str, (name, *arguments[2:], *options.items())))] = (name, ("base", "tuned", *arguments), options)


COMMON = ("large_prior", "curvature")
twin("weighted-average", "weights", 0.5)
twin("weighted-average", "weights", None, normalize=False)
twin("task-arithmetic", "weights")
twin("gradient-matching", "positive", *COMMON, 0.5, "penalties")
twin("removal", "positive", *COMMON, 0.5, "penalties", cap=1.0)
for damping in (0.0, 0.5):
    twin("fa1", "weights", "prior", "curvature", damping)
    for include in (False, True):
        twin("fisher-averaging", "positive", "curvature", damping, "prior", include_base=include)
    for signs in ("positive", "weights"):
        twin("gradient-matching", signs, *COMMON, damping)
    for saw, cap in ((False, "none"), (False, 1.0), (True, 0.0)):
        twin("removal", "positive", *COMMON, damping, None, base_saw_removed=saw, cap=cap)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("label", TWINS)
def test_a_rule_equals_its_slow_twin(label: str, dtype: torch.dtype) -> None:
    name, names, options = TWINS[label]
    case = Case(dtype)
    values = [getattr(case, value) if isinstance(value, str) else value for value in names]
    want = getattr(slow, name.replace("-", "_"))(*map(as_lists, values), **options)
    check(METHODS[name](*values, **options), want, 10 * DTYPES[dtype])


def check(got: Tensor, want: list[float], tolerance: float) -> None:
    expected = torch.tensor(want, dtype=torch.float64)
    assert torch.allclose(got.double(), expected, rtol=tolerance, atol=tolerance), (got.double() - expected).abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", [0.001, 0.2, 1.0])
@pytest.mark.parametrize("signs", ["positive", "weights"])
def test_sparse_finetuning_equals_its_slow_twin(signs: str, density: float, dtype: torch.dtype) -> None:
    case, tolerance = Case(dtype), 4 * DTYPES[dtype]
    weights, limits = getattr(case, signs), case.thresholds(density)
    base, tuned = as_lists(case.base), as_lists(case.tuned)
    for normalize in (False, True):
        got = METHODS["sparse-finetuning"](case.base, case.tuned, weights, limits, normalize=normalize)
        check(got, slow.sparse_finetuning(base, tuned, weights, density, normalize), tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [0.0, 1e-45, 1e-30, 0.25])
def test_trimming_keeps_entries_that_equal_the_threshold(dtype: torch.dtype, limit: float) -> None:
    limit = float(torch.tensor(limit, dtype=dtype))
    below = float(torch.tensor(limit, dtype=dtype).nextafter(torch.tensor(0.0, dtype=dtype)))
    values = torch.tensor([limit, -limit, below, -below, 2.0], dtype=dtype)
    want = [v if abs(v) >= limit else 0.0 for v in values.tolist()]
    assert trim(values, limit).tolist() == want


@pytest.mark.parametrize(
    ("off_diagonal", "damping", "weight"), [(0.0, 1e-10, 0.5), (0.9, 0.1, -0.7), (1.0, 1e-10, 0.5), (1.0, 0.1, -0.7)]
)
def test_regmean_solves_the_least_squares_problem(off_diagonal: float, damping: float, weight: float) -> None:
    """Also where a negative weight leaves a matrix that is not positive."""
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(50, 6)) for _ in range(2)]
    grams = [x.T @ x for x in inputs]
    matrices = [rng.normal(size=(4, 6)) for _ in range(2)]
    inputs_ = ([torch.tensor(m) for m in matrices], [1.0, weight], [torch.tensor(g) for g in grams])
    got = METHODS["regmean"](*inputs_, damping, off_diagonal=off_diagonal)
    want = slow.regmean(matrices, grams, [1.0, weight], damping, off_diagonal)
    assert np.allclose(got.numpy(), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("damping", [0.0, 1e-10])
@pytest.mark.parametrize("scales", [(0.0, 0.0), (-1.5, 1.5)], ids=["equal", "of many sizes"])
@pytest.mark.parametrize(("size", "rank", "dead"), [(40, 12, 0), (90, 30, 11)])
def test_regmean_with_inputs_that_leave_directions_out_is_right_from_float32_grams(
    size: int, rank: int, dead: int, scales: tuple[float, float], damping: float
) -> None:
    rng = np.random.default_rng(3)
    mixing = rng.normal(size=(rank, size)) * np.logspace(*scales, size)
    mixing[:, :dead] = 0
    inputs = [rng.normal(size=(600, rank)) @ mixing for _ in range(3)]
    matrices = [rng.normal(size=(5, size)) for _ in range(3)]
    weights = [1.0, 0.5, 2.0]
    got = METHODS["regmean"](
        [torch.tensor(m) for m in matrices],
        weights,
        [torch.tensor(x).float().T @ torch.tensor(x).float() for x in inputs],
        damping,
        off_diagonal=1.0,
    ).numpy()
    want = slow.regmean_of_inputs(matrices, inputs, weights)
    largest = np.abs(want).max()
    assert np.abs(got).max() < 1.01 * largest
    stacked = np.vstack(inputs)
    assert np.abs(stacked @ (got - want).T).max() < 1e-3 * np.abs(stacked @ want.T).max()
    assert np.abs(got - want).max() < 3e-3 * largest
    average = sum(w * m for w, m in zip(weights, matrices, strict=True)) / sum(weights)
    assert np.allclose(got[:, :dead], average[:, :dead], rtol=0, atol=1e-12)


def test_by_default_no_weight_moves_more_than_twice_as_far_as_under_negation() -> None:
    """Where the data that stays say nothing of it, the paper's formula goes without bounds."""
    case = Case(torch.float32, models=1)
    nothing = torch.zeros_like(case.base)
    far = METHODS["removal"](case.base, case.tuned, [1.0], nothing, [case.curvature[0] + 1], 1e-10, cap="none")
    near = METHODS["removal"](case.base, case.tuned, [1.0], nothing, [case.curvature[0] + 1], 1e-10)
    change = case.tuned[0] - case.base
    assert float((far - case.base).abs().max()) > 1e8 * float(change.abs().max())
    assert torch.allclose(near, case.base - 2 * change, rtol=1e-6)


@pytest.mark.parametrize("name", [r.name for r in METHODS.values() if r.precision])
def test_precision_is_what_the_merge_divides_by(name: str) -> None:
    case, rule = Case(torch.float64), METHODS[name]
    known = {"base": case.base, "tuned": case.tuned, "prior": case.prior, "curvature": case.curvature}
    known |= {"weights": case.positive, "damping": 0.1}
    assert rule.precision is not None
    got = rule.precision(**{n: v for n, v in known.items() if n in rule.inputs})
    total = sum(w * f for w, f in zip(case.positive, case.curvature, strict=True))
    want = {
        "gradient-matching": case.prior + 0.1 + total,
        "fisher-averaging": total + 0.1 * sum(case.positive),
        "removal": case.prior + 0.1,
    }[name]
    assert torch.allclose(got, want, rtol=1e-12)


# Special cases of gradient matching (the table of the design).


def test_task_arithmetic_is_gradient_matching_with_the_identity_to_the_last_bit() -> None:
    case = Case(torch.float32)
    zero, one = torch.tensor(0.0), torch.tensor(3.0)
    got = METHODS["gradient-matching"](case.base, case.tuned, case.weights, one, [zero] * 3, 0.0)
    assert torch.equal(got, METHODS["task-arithmetic"](case.base, case.tuned, case.weights))


def test_the_mean_is_gradient_matching_with_the_identity_and_equal_weights() -> None:
    case = Case(torch.float32)
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    got = METHODS["gradient-matching"](case.base, case.tuned, [1 / 3] * 3, one, [zero] * 3, 0.0)
    assert torch.allclose(got, METHODS["average"](case.tuned), rtol=1e-6, atol=1e-6)


def test_fisher_averaging_is_gradient_matching_without_a_prior() -> None:
    case = Case(torch.float64)
    curvature = [c + 0.01 for c in case.curvature]
    got = METHODS["gradient-matching"](case.base, case.tuned, case.positive, torch.tensor(0.0), curvature, 0.0)
    want = METHODS["fisher-averaging"](case.base, case.tuned, case.positive, curvature, 0.0)
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)


def test_sparse_finetuning_with_normalize_is_gradient_matching_with_masks_as_curvature() -> None:
    case = Case(torch.float64)
    limits = case.thresholds(0.3)
    masks = [((m - case.base).abs() >= t).double() for m, t in zip(case.tuned, limits, strict=True)]
    got = METHODS["sparse-finetuning"](case.base, case.tuned, case.positive, limits, normalize=True)
    want = METHODS["gradient-matching"](case.base, case.tuned, case.positive, torch.tensor(0.0), masks, 0.0)
    touched = sum(masks) > 0
    assert torch.allclose(got[touched], want[touched], rtol=1e-12)
    assert torch.equal(got[~touched], case.base[~touched])


def test_ties_is_gradient_matching_with_its_masks_as_curvature() -> None:
    case = Case(torch.float64)
    limits = case.thresholds(0.4)
    trimmed = [trim(m - case.base, t) for m, t in zip(case.tuned, limits, strict=True)]
    elected = sum(w * d for w, d in zip(case.positive, trimmed, strict=True)).sign()
    masks = [((d != 0) & (d.sign() == elected)).double() for d in trimmed]
    got = METHODS["ties"](case.base, case.tuned, case.positive, limits)
    want = METHODS["gradient-matching"](case.base, case.tuned, case.positive, torch.tensor(0.0), masks, 0.0)
    touched = sum(masks) > 0
    assert torch.allclose(got[touched], want[touched], rtol=1e-12)
    assert torch.equal(got[~touched], case.base[~touched])


def test_tiny_curvature_does_not_underflow() -> None:
    """float32 holds 1e-40 but not 1e-40 times a small weight: shares are formed before products."""
    base, tuned = torch.full((4,), 1e-3), [torch.full((4,), 2e-3), torch.full((4,), 4e-3)]
    tiny = [torch.full((4,), 2e-40), torch.full((4,), 2e-40)]
    zero = torch.zeros(4)
    assert torch.allclose(METHODS["fisher-averaging"](base, tuned, [1.0, 1.0], tiny, 0.0), torch.full((4,), 3e-3))
    got = METHODS["gradient-matching"](base, tuned, [1.0, 1.0], zero, tiny, 0.0)
    assert torch.allclose(got, torch.full((4,), 3e-3))


# Algebra.

few = st.integers(1, 4)
ELEMENTWISE = ["average", "weighted-average", "task-arithmetic", "sparse-finetuning", "ties", "fisher-averaging"]
ELEMENTWISE += ["fa1", "gradient-matching", "removal"]


def arguments(name: str, models: int, seed: int) -> dict[str, Any]:
    case = Case(torch.float64, models=3, seed=seed)
    order = [i % 3 for i in range(models)]
    every: dict[str, Any] = {
        "base": case.base,
        "tuned": [case.tuned[i] + 0.01 * n for n, i in enumerate(order)],
        "weights": [case.positive[i] for i in order],
        "base_weight": None,
        "prior": case.prior,
        "curvature": [case.curvature[i] * (n + 1) for n, i in enumerate(order)],
        "penalty": None,
        "damping": 0.01,
        "norms": None,
    }
    every["thresholds"] = [slow.threshold((t - case.base).tolist(), 0.5) for t in every["tuned"]]
    return {n: every[n] for n in METHODS[name].inputs}


PER_MODEL = ("tuned", "weights", "curvature", "thresholds")


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(ELEMENTWISE), models=few, seed=st.integers(0, 50), data=st.data())
def test_the_order_of_the_models_does_not_matter(name: str, models: int, seed: int, data: st.DataObject) -> None:
    given_ = arguments(name, models, seed)
    order = data.draw(st.permutations(range(models)))
    shuffled = {n: [v[i] for i in order] if n in PER_MODEL else v for n, v in given_.items()}
    assert torch.allclose(METHODS[name](**given_), METHODS[name](**shuffled), rtol=1e-9, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from([n for n in ELEMENTWISE if n != "average"]), models=few, seed=st.integers(0, 50))
def test_a_model_of_weight_zero_changes_nothing(name: str, models: int, seed: int) -> None:
    given_ = arguments(name, models, seed)
    more = {n: [*v, v[0] if n != "weights" else 0.0] if n in PER_MODEL else v for n, v in given_.items()}
    assert torch.allclose(METHODS[name](**given_), METHODS[name](**more), rtol=1e-9, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(ELEMENTWISE), models=few, seed=st.integers(0, 50))
def test_rules_do_not_change_their_inputs(name: str, models: int, seed: int) -> None:
    given_, copies = arguments(name, models, seed), arguments(name, models, seed)
    METHODS[name](**given_)
    for key, value in given_.items():
        for one, other in zip(value, copies[key], strict=True) if isinstance(value, list) else [(value, copies[key])]:
            if isinstance(one, Tensor):
                assert torch.equal(one, other), f"{name} changed {key}"
