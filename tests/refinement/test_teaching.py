"""Refinement taught by other models, against the loss of every row written out, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.losses import LOSSES, ClassLoss
from gradmerge.refinement.adamw import _Passes
from gradmerge.refinement.owners import DataOwner
from gradmerge.refinement.rounds import Refinement
from gradmerge.refinement.teaching import TaughtLoss, Teacher

from .making import batches, classes, perceptron, regression
from .test_adamw import language_model, texts

SHARES = (0.3, 1.0)


def slow_loss(kind: str, z: Tensor, y: Any, a: Tensor, s: float) -> Tensor:
    """(1 − s) × the loss with the label + s × that to the teacher's answer, of one row, term by term."""
    total = torch.zeros((), dtype=torch.float64)
    if kind in ("next-token", "tokens"):
        y = y.tolist()
        pairs = list(enumerate(y)) if kind == "tokens" else [(t - 1, y[t]) for t in range(1, len(y))]
        for place, label in pairs:
            if label != -100:
                total = total + slow_loss("classes", z[place], label, a[place], s)
        return total
    if kind == "classes":
        whole = sum(math.exp(float(v)) for v in a)
        log_sum = torch.log(torch.stack([v.exp() for v in z]).sum())
        for k, v in enumerate(z):
            wanted = (1 - s) * (k == int(y)) + s * math.exp(float(a[k])) / whole
            total = total - wanted * (v - log_sum)
        return total
    for v, label, answer in zip(z.flatten(), y.flatten().tolist(), a.flatten().tolist(), strict=True):
        if kind == "squared":
            total = total + (1 - s) * (v - label) ** 2 + s * (v - answer) ** 2
        else:
            p, q = 1 / (1 + torch.exp(-v)), 1 / (1 + math.exp(-answer))
            total = total - (1 - s) * (torch.log(p) if label else torch.log(1 - p))
            total = total - s * (q * torch.log(p) + (1 - q) * torch.log(1 - p))
    return total


def logits(model: nn.Module, row: Any) -> Tensor:
    """Of one row alone, without padding beside it."""
    if isinstance(row, tuple):
        return model(row[0])[0]
    inputs = {name: value for name, value in row.items() if name != "labels"}
    return model(**inputs, **({"labels": row["labels"]} if hasattr(model, "encoder") else {})).logits[0]


def case(kind: str) -> tuple[nn.Module, nn.Module, list[Any]]:
    """A model, a teacher, and batches in float64; of tokens some are masked, by padding and in the text."""
    order = torch.Generator().manual_seed(5)
    if kind in ("next-token", "tokens"):
        ids = [torch.randint(2, 11, (3 + row % 4,), generator=order).tolist() for row in range(9)]
        name = "tokens" if kind == "next-token" else "answers"
        rows = [texts(name, ids[first : first + 3], "right") for first in range(0, 9, 3)]
        rows[0]["labels"][1, 1] = -100
        model = language_model(name)
    else:
        x = torch.randn(9, 4, generator=order, dtype=torch.float64)
        y = {
            "classes": torch.arange(9) % 3,
            "labels": torch.randint(0, 2, (9, 3), generator=order),
            "squared": torch.randn(9, 3, generator=order, dtype=torch.float64),
        }[kind]
        model, rows = perceptron(), [(x[first : first + 4], y[first : first + 4]) for first in (0, 4, 8)]
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        for p in teacher.parameters():
            p += 0.4 * torch.randn(p.shape, generator=order, dtype=torch.float64)
    return model, teacher, rows


def each(rows: list[Any]) -> list[tuple[Any, Any]]:
    """Every row as a batch of its own, and its label."""
    found = []
    for batch in rows:
        labels = batch["labels"] if isinstance(batch, dict) else batch[1]
        for place in range(len(labels)):
            one = slice(place, place + 1)
            row = {k: v[one] for k, v in batch.items()} if isinstance(batch, dict) else (batch[0][one], labels[one])
            found.append((row, labels[place]))
    return found


def slow(kind: str, model: nn.Module, teacher: nn.Module, rows: list[Any], share: float) -> Tensor:
    """The sum of the rows' losses."""
    found = []
    for row, label in each(rows):
        with torch.no_grad():
            answer = logits(teacher, row)
        found.append(slow_loss(kind, logits(model, row), label, answer, share))
    return torch.stack(found).sum()


def owner_of(kind: str, teacher: nn.Module, rows: list[Any], share: float, held: list[Any] | None = None) -> DataOwner:
    loss = LOSSES[kind]
    return DataOwner("a", rows, held or rows, output=loss, teacher=Teacher("a", teacher, TaughtLoss(loss, share)))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", ["classes", "labels", "squared", "next-token", "tokens"])
def test_losses_and_gradients_are_those_of_the_loss_written_out(kind: str, share: float) -> None:
    model, teacher, rows = case(kind)
    untouched = copy.deepcopy(teacher.state_dict())
    owner = owner_of(kind, teacher.train(), rows, share, rows[1:])
    (found,) = owner.losses(model, held=False)
    want = slow(kind, model, teacher.eval(), rows, share)
    assert found == pytest.approx(want.item(), rel=1e-10)
    (mean,) = owner.losses(model, held=True)
    held = slow(kind, model, teacher, rows[1:], share).item() / len(each(rows[1:]))
    assert mean == pytest.approx(held, rel=1e-10)
    names = [name for name, _ in model.named_parameters()]
    wanted = dict(zip(names, torch.autograd.grad(want, list(model.parameters())), strict=True))
    gradient = owner.gradient(model)
    assert gradient.loss == pytest.approx(want.item(), rel=1e-10)
    for name in names:
        torch.testing.assert_close(gradient[name], wanted[name])
    # Rows in another order and in other batches, as AdamW takes them.
    passes = _Passes(model, [owner], None, 0, Refinement(model, "adamw"), {})
    passes._differentiate([(owner, row) for row in (8, 3, 0, 5, 1, 7, 2, 4, 6)], 1.0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name])
    assert all(torch.equal(value, untouched[name]) for name, value in teacher.state_dict().items())
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("kind", ["classes", "labels", "squared"])
def test_the_curvature_along_directions_is_that_of_the_taught_loss(kind: str) -> None:
    _, teacher, rows = case(kind)
    model = regression()
    weight, bias = model[0].weight, model[0].bias  # type: ignore[index]
    directions = [{"0.weight": torch.randn_like(weight), "0.bias": torch.randn_like(bias)} for _ in range(2)]
    found = owner_of(kind, teacher, rows, 0.3).along(model, directions)

    def at(step: Tensor) -> Tensor:
        moved = {name: p + sum(c * d[name] for c, d in zip(step, directions, strict=True)) for name, p in named}
        return slow(kind, lambda x: torch.func.functional_call(model, moved, x), teacher, rows, 0.3)  # type: ignore[arg-type]

    named = list(model.named_parameters())
    want: Any = torch.autograd.functional.hessian(at, torch.zeros(2, dtype=torch.float64))
    torch.testing.assert_close(found, want)


def test_with_the_teacher_alone_a_model_becomes_its_teacher_whatever_the_labels() -> None:
    x, y = classes(60, seed=1)
    teacher, ends = regression(7), []
    for labels in (y, y.flip(0)):
        model = regression(1)
        rows = {"a": batches((x, labels))}
        done = gm.refine(model, rows, valid=rows, teachers={"a": teacher}, teaching=1.0, rounds=5, progress=False)
        assert done.improved and done.teaching == 1
        torch.testing.assert_close(model(x).softmax(-1), teacher(x).softmax(-1), rtol=0, atol=0.01)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@pytest.mark.parametrize(("method", "rounds"), [("newton", 2), ("adamw", 4)])
def test_both_methods_lower_the_taught_loss_where_some_tasks_have_a_teacher(method: str, rounds: int) -> None:
    data = {"a": batches(classes(80, seed=1)), "b": batches(classes(80, seed=2, shift=0.3))}
    teacher = regression(7)
    gm.refine(teacher, {"a": data["a"]}, progress=False)
    model = regression(1)
    begin = slow("classes", model, teacher, data["a"], 0.5).item()
    done = gm.refine(
        model, data, valid=data, teachers={"a": teacher}, method=method, rounds=rounds, seed=1, progress=False
    )
    assert done.teaching == 0.5
    assert done.rounds[0].held["a"] == pytest.approx(begin / 80)
    assert done.rounds[-1].held["a"] == pytest.approx(slow("classes", model, teacher, data["a"], 0.5).item() / 80)
    x, y = (torch.cat(parts) for parts in zip(*data["b"], strict=True))
    assert done.rounds[-1].held["b"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item())
    assert done.rounds[-1].judged < done.rounds[0].judged


def test_labels_that_are_noise_are_seen_beside_a_teacher() -> None:
    x, y = classes(80, seed=1)
    noise = y[torch.randperm(80, generator=torch.Generator().manual_seed(1))]
    teacher = regression(7)
    gm.refine(teacher, {"a": batches((x, y))}, progress=False)
    for labels in (y, noise):
        given, taught = (
            DataOwner("a", batches((x, labels)), batches((x, labels)), **more)
            for more in ({}, {"teacher": Teacher("a", teacher, TaughtLoss(ClassLoss(), 0.5))})
        )
        assert taught.label_score(teacher, held=True) == given.label_score(teacher, held=True)
    alone = owner_of("classes", teacher, batches((x, noise)), 1.0)
    assert alone.label_score(teacher, held=True) == math.inf, "labels that are not learned from need no guard"


def test_a_class_that_the_teacher_excludes_may_be_excluded_by_the_model() -> None:
    loss = TaughtLoss(ClassLoss(), 0.5)
    z = torch.tensor([[1.0, 2.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    found = loss.losses(z, loss.targets(torch.tensor([[0.0, 1.0, -math.inf]]), torch.tensor([1])))
    (two,) = (z.detach()[:, :2].requires_grad_(True),)
    want = slow_loss("classes", two[0], 1, torch.tensor([0.0, 1.0]), 0.5)
    assert float(found.detach()) == pytest.approx(want.item())
    gradients = torch.autograd.grad(found.sum(), z)[0], torch.autograd.grad(want, two)[0]
    torch.testing.assert_close(gradients[0][:, :2], gradients[1])


class Named(nn.Module):
    """A linear model with a config, as those of transformers have."""

    def __init__(self, outputs: int = 3, **config: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(4, outputs).double()
        self.config = type("Config", (), {**config, "to_dict": lambda self: config})()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


ORDER = {0: "bad", 1: "good", 2: "dull"}
GUARDS: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a task that is not there": (Named, {"teachers": {"b": Named()}}, "--teacher b=…: there is no --data"),
    "another number of outputs": (Named, {"teachers": {"a": Named(2)}}, r"outputs of shape \[2\] for a row, the model"),
    "another order": (
        lambda: Named(id2label=ORDER),
        {"teachers": {"a": Named(id2label={0: "good", 1: "bad", 2: "dull"})}},
        "another order .*'bad' is 0 and 1, 'good' is 1 and 0",
    ),
    "other classes": (
        lambda: Named(id2label=ORDER),
        {"teachers": {"a": Named(id2label=ORDER | {2: "odd"})}},
        "'dull' is 2 and missing",
    ),
    "another vocabulary": (
        lambda: Named(vocab_size=10),
        {"teachers": {"a": Named(vocab_size=11)}},
        "vocabulary of 11 tokens, the model one of 10",
    ),
    "a path": (Named, {"teachers": {"a": "folder"}}, "must be a module for a module"),
    "no share": (Named, {"teachers": {"a": Named()}, "teaching": 0.0}, "--teaching 0.0: must be more than 0"),
    "too large a share": (Named, {"teachers": {"a": Named()}, "teaching": 1.5}, "at most 1"),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_teacher_that_does_not_fit_is_refused_and_the_model_stays_as_it_is(name: str) -> None:
    make, options, says = GUARDS[name]
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(gm.InputError, match=says):
        gm.refine(model, {"a": batches(classes(40))}, progress=False, **options)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_teacher_that_is_the_model_or_answers_nothing_finite_is_refused() -> None:
    model, broken = regression(), regression(2)
    with torch.no_grad():
        broken[0].bias[1] = math.nan  # type: ignore[index]
    for teacher, says in ((model, "the model itself"), (broken, "not finite")):
        with pytest.raises(gm.InputError, match=says):
            gm.refine(model, {"a": batches(classes(40))}, teachers={"a": teacher}, progress=False)


class Weighted(ClassLoss):
    """A loss of the user's own."""


def test_a_teacher_in_other_numbers_is_given_rows_in_its_own() -> None:
    data = batches(classes(40, 1))
    model, teacher = perceptron(), perceptron(1)
    gm.refine(model, {"a": data}, teachers={"a": teacher.float()}, method="adamw", rounds=1, progress=False)
    single = [(x.float(), y) for x, y in data]
    gm.refine(model.float(), {"a": single}, teachers={"a": teacher.double()}, method="adamw", rounds=1, progress=False)


@pytest.mark.parametrize("what", ["inside another", "another loss", "other inputs", "no teacher"])
def test_what_would_teach_something_else_is_refused(what: str) -> None:
    data, model = {"a": batches(classes(40, 1))}, perceptron()
    options: dict[str, dict[str, Any]] = {
        "inside another": {"teachers": {"a": nn.Sequential(model)}},
        "another loss": {"teachers": {"a": perceptron(1)}, "output": Weighted()},
        "other inputs": {"teachers": {"a": perceptron(1, features=7)}},
        "no teacher": {"teaching": 0.9},
    }
    says = {"inside another": "the model itself", "another loss": "no meaning", "other inputs": "cannot take"}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(gm.InputError, match=says.get(what, "there is no --teacher")):
        gm.refine(model, data, progress=False, **options[what])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_outputs_that_mean_something_else_are_refused() -> None:
    model, teacher = language_model("classes"), language_model("classes")
    teacher.config.problem_type = "multi_label_classification"  # type: ignore[union-attr]
    rows = [texts("classes", [[3, 4, 5]] * 12, "right")]
    with pytest.raises(gm.InputError, match="outputs that are labels, the model's are classes"):
        gm.refine(model, {"a": rows}, teachers={"a": teacher}, progress=False)
