"""Standard errors against the jackknife and exact formulas, and paired comparisons against sums by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from scipy import stats
from torch import Tensor

from gradmerge.curvature.losses import LOSSES, MASKED
from gradmerge.tasks.metrics import (
    Difference,
    Metrics,
    averaged,
    difference,
    standard_error,
    standard_errors,
)

Batch = tuple[Tensor, Tensor]
N = 400


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(count: int) -> Batch:
    labels = torch.randint(count, (N,), generator=generator())
    noise = 1.2 * torch.randn(N, count, generator=generator(1), dtype=torch.float64)
    return noise + 1.5 * torch.nn.functional.one_hot(labels, count), labels


def several_labels() -> Batch:
    labels = (torch.rand(N, 3, generator=generator()) < torch.tensor([0.5, 0.2, 0.05])).double()
    return 2 * labels - 1 + torch.randn(N, 3, generator=generator(1), dtype=torch.float64), labels


def numbers(columns: int) -> Batch:
    labels = 6 * torch.rand(N, columns, generator=generator(), dtype=torch.float64) ** 2
    outputs = 0.5 * labels + torch.randn(N, columns, generator=generator(1), dtype=torch.float64)
    return outputs, labels


def scores() -> Batch:
    outputs, labels = numbers(1)
    return outputs, (2 * labels[:, 0]).round() / 2  # many equal


def candidates() -> Batch:
    return classes(5)


def texts() -> Batch:
    """Of different lengths, the longer ones easier."""
    labels = torch.randint(7, (N, 9), generator=generator())
    lengths = torch.randint(2, 9, (N, 1), generator=generator(2))
    logits = torch.randn(N, 9, 7, generator=generator(1), dtype=torch.float64)
    logits += (lengths[..., None] / 4) * torch.nn.functional.one_hot(labels, 7)
    return logits, labels.where(torch.arange(9) < lengths, MASKED)


CASES: dict[str, tuple[str, Callable[[], Batch]]] = {
    "two classes": ("classes", lambda: classes(2)),
    "five classes": ("classes", lambda: classes(5)),
    "labels": ("labels", several_labels),
    "a number": ("squared", lambda: numbers(1)),
    "three numbers": ("squared", lambda: numbers(3)),
    "scores": ("cosine", scores),
    "candidates": ("ranking", candidates),
    "tokens": ("tokens", texts),
}


def taken(name: str, logits: Tensor, labels: Tensor, losses: Tensor, places: Sequence[int]) -> Metrics:
    metrics = Metrics(name)
    for part in torch.tensor(places).split(150):
        metrics.add(logits[part], labels[part], losses[part])
    return metrics


def test_classes_and_labels_that_do_not_occur_do_not_count() -> None:
    logits, labels = several_labels()
    more = Metrics("labels")
    more.add(torch.cat([logits, -torch.ones(N, 1)], 1), torch.cat([labels, torch.zeros(N, 1)], 1), torch.ones(N))
    found = taken("labels", logits, labels, torch.ones(N), range(N))
    torch.testing.assert_close(more.rows()["macro_f1"], found.rows()["macro_f1"])
    logits, labels = classes(3)
    more = taken("classes", torch.cat([logits, -9 * torch.ones(N, 1)], 1), labels, torch.ones(N), range(N))
    found = taken("classes", logits, labels, torch.ones(N), range(N))
    torch.testing.assert_close(more.rows()["macro_f1"], found.rows()["macro_f1"])


@pytest.mark.parametrize("case", CASES)
def test_rows_have_the_metric_as_mean_and_the_jackknife_as_error(case: str) -> None:
    name, make = CASES[case]
    logits, labels = make()
    output = LOSSES["classes" if name == "ranking" else "squared" if name == "cosine" else name]
    losses = output.losses(logits, labels[:, None] if name == "cosine" else labels)
    whole = taken(name, logits, labels, losses, range(N))
    rows, found = whole.rows(), whole.summary()
    assert set(rows) == set(found) - {"examples", "tokens", "standard_errors"} and found["examples"] == N
    without = [taken(name, logits, labels, losses, [*range(i), *range(i + 1, N)]).summary() for i in range(N)]
    errors = whole.summary()["standard_errors"]
    for metric, values in rows.items():
        assert values.dtype == torch.float64 and values.shape == (N,)
        assert float(values.mean()) == pytest.approx(found[metric], rel=1e-12)
        left_out = torch.tensor([one[metric] for one in without], dtype=torch.float64)
        jackknife = math.sqrt((N - 1) / N * float((left_out - left_out.mean()).square().sum()))
        assert errors[metric] == pytest.approx(jackknife, rel=0.02), metric
        # Example by example too: what leaving one out changes.
        changes = (N - 1) * (left_out.mean() - left_out)
        assert torch.corrcoef(torch.stack([changes, values]))[0, 1] > 0.999, metric


def test_metrics_that_are_not_defined_have_no_rows() -> None:
    metrics = Metrics("squared")
    metrics.add(torch.ones(4, 1), torch.ones(4, 1), torch.zeros(4))
    assert metrics.summary()["pearson_r"] is None and set(metrics.rows()) == {"mse"}
    assert metrics.summary()["standard_errors"] == {"mse": None}, "four equal numbers say nothing of others"
    none = Metrics("labels")
    none.add(-torch.ones(4, 2), torch.zeros(4, 2), torch.ones(4))
    assert none.summary()["macro_f1"] is None and none.summary()["exact_match"] == 1
    alone = Metrics("tokens")
    alone.add(torch.zeros(1, 2, 3), torch.tensor([[1, MASKED]]), torch.tensor([800.0]))
    assert alone.summary()["perplexity"] == math.inf and "perplexity" not in alone.rows()
    assert alone.summary()["standard_errors"]["loss_per_token"] is None, "a single example says nothing of it"


def test_the_error_of_a_share_is_binomial() -> None:
    right, count = 95, 120
    rows = torch.cat([torch.ones(right), torch.zeros(count - right)]).double()
    assert standard_error(rows, share=True) == pytest.approx(math.sqrt(right / count * (1 - right / count) / count))
    assert standard_errors({"accuracy": rows, "mse": rows}) == {
        "accuracy": pytest.approx(standard_error(rows, share=True)),
        "mse": pytest.approx(float(stats.sem(rows))),
    }


@pytest.mark.parametrize("count", [1, 12, 120])
def test_a_share_of_0_or_1_has_an_error(count: int) -> None:
    """Two of each are added: two errors are about 3 / n, the largest share of wrong ones that is likely unseen."""
    nearly = (count + 2) / (count + 4)
    want = math.sqrt(nearly * (1 - nearly) / (count + 4))
    for value in (0.0, 1.0):
        assert standard_error(torch.full((count,), value), share=True) == pytest.approx(want)
    assert count < 100 or 2 * want == pytest.approx(3 / count, rel=0.1)


def test_a_difference_is_that_of_the_same_rows() -> None:
    one = torch.randn(50, generator=generator(), dtype=torch.float64)
    other = one + 0.1 * torch.randn(50, generator=generator(1), dtype=torch.float64) - 0.2
    found = difference(one, other)
    apart = [a - b for a, b in zip(one.tolist(), other.tolist(), strict=True)]
    mean = sum(apart) / 50
    error = math.sqrt(sum((value - mean) ** 2 for value in apart) / 49 / 50)
    assert [found.value, found.error] == pytest.approx([mean, error])
    assert not found.tied and difference(other, one).value == -found.value
    together = math.hypot(standard_error(one), standard_error(other))
    assert found.error < together / 5, "what both have in common does not count"
    assert difference(one[:1], other[:1]).tied, "a single row tells nothing apart"


def flips(better: int, worse: int, count: int) -> Difference:
    """Two models on examples that both have half right, but for some that the one or the other has."""
    one, other = (torch.arange(count) % 2).double(), (torch.arange(count) % 2).double()
    one[:better], other[:better] = 1.0, 0.0
    one[better : better + worse], other[better : better + worse] = 0.0, 1.0
    return difference(one, other)


def test_of_right_and_wrong_answers_ties_are_those_of_the_exact_test() -> None:
    """McNemar's exact test, a binomial one of the examples that differ, at 5 %: as near as whole examples allow."""
    for better in range(25):
        for worse in range(25 - better):
            found = flips(better, worse, 120)
            assert found.value == pytest.approx((better - worse) / 120)
            p = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
            assert found.tied == (p > 0.05) or 0.02 < p < 0.09, (better, worse, p)
    few = flips(6, 1, 120)
    assert few.error == pytest.approx(math.sqrt(7 + 2 - 25 / 122) / 122)


def test_tasks_are_averaged_as_independent() -> None:
    found = averaged([Difference(0.1, 0.03), Difference(-0.02, 0.04)])
    assert [found.value, found.error] == pytest.approx([0.04, 0.05 / 2])
