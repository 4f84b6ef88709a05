"""The check of the penalty: on regressions whose gradients are known, and on models and data on disk by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertForSequenceClassification

import gradmerge as gm
from gradmerge.compare.candidates import derive_plan
from gradmerge.compare.diagnose import PenaltyCheck, check_penalties
from gradmerge.compare.predict import open_for_prediction, predict
from gradmerge.compare.settings import make_setting, recipe_with
from gradmerge.recipe import make_recipe
from gradmerge.tasks import load_task

from ..engine import test_kronecker as layers
from ..making import random_state, read_model, tuned_from, write_model
from ..tasks.making import labelled, tiny_bert_checkpoint, write_jsonl
from .making import memory_plan, summed_gradient
from .test_identities import Case, as_state, diagonals, make_case, minima

TASKS = {"a": 0, "b": 1, "c": 2}
ONE = dict.fromkeys(TASKS, 1)


def checks(
    case: Case | Any, factor: float | None, gradients: list[Tensor], damping: float = 0.0, **recipe: Any
) -> dict[str, PenaltyCheck]:
    """With P = ``factor`` times the true one, as a record beside the models; None: H_0, which is the true one."""
    states = [as_state(t) for t in (case.base, *case.tuned)]
    known = None if factor is None else as_state(factor * case.penalty.diagonal())
    penalty = [] if known is None else [known] * 3
    plan = memory_plan(states, diagonals([case.penalty, *case.hessians]), [1.0] * 3, damping, penalty)
    made = make_recipe({"method": "gradient-matching", "base": "base", "models": ["model"] * 3} | recipe)
    found = {task: as_state(gradient) for task, gradient in zip(TASKS, gradients, strict=True)}
    return check_penalties(made, plan, TASKS, found, ONE)


@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_the_ratio_is_zero_where_loss_and_penalty_balance(kind: str) -> None:
    case = make_case(kind, diagonal=True)
    gradients = [loss.gradient(theta) for loss, theta in zip(case.losses, case.tuned, strict=True)]
    for task, found in checks(case, None, gradients).items():
        pull = case.penalty @ (case.tuned[TASKS[task]] - case.base)
        assert found.ratio is not None and found.ratio < 1e-11
        assert found.pull == pytest.approx(float(pull.norm())) and found.penalty == "H_0"
        assert found.gradient == pytest.approx(float(gradients[TASKS[task]].norm()))
    for found in checks(case, 1.0, gradients).values():
        assert found.ratio is not None and found.ratio < 1e-11 and found.penalty == "recorded"
    for found in checks(case, 2.0, gradients).values():  # ‖2PΔ − PΔ‖ / ‖2PΔ‖
        assert found.ratio == pytest.approx(0.5)


def test_the_ratio_is_one_for_models_that_minimise_their_loss_alone() -> None:
    losses, tuned, base = minima("linear")
    case = make_case("linear", diagonal=True)
    plain = Case(losses, base, case.penalty, tuned, base)
    gradients = [loss.gradient(theta) for loss, theta in zip(losses, tuned, strict=True)]
    assert all(found.ratio == pytest.approx(1.0) for found in checks(plain, None, gradients).values())
    nothing = checks(plain, 0.0, gradients)
    assert all(found.ratio is None and found.pull == 0 for found in nothing.values())


def test_damping_is_part_of_h_0_and_not_of_a_penalty_that_is_known() -> None:
    case = make_case("linear", diagonal=True)
    gradients = [loss.gradient(theta) for loss, theta in zip(case.losses, case.tuned, strict=True)]
    for task, found in checks(case, None, gradients, damping=0.5).items():
        delta = case.tuned[TASKS[task]] - case.base
        want = 0.5 * delta.norm() / (case.penalty @ delta + 0.5 * delta).norm()
        assert found.ratio == pytest.approx(float(want))
    assert all((found.ratio or 0) < 1e-11 for found in checks(case, 1.0, gradients, damping=0.5).values())


ROWS = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two models near it, curvature of each on 20 rows, and half of those rows as data."""
    folder = tmp_path_factory.mktemp("penalty")
    tiny_bert_checkpoint(folder / "base", labels=3)
    for seed, name in enumerate(("base", "one", "two")):
        if name != "base":
            tuned_from(folder / "base", folder / name, seed)
        rows = labelled(2 * ROWS, 3, seed)
        write_jsonl(folder / f"{name}-all.jsonl", rows)
        write_jsonl(folder / f"{name}.jsonl", rows[:ROWS])
        data = str(folder / f"{name}-all.jsonl")
        gm.estimate_curvature(str(folder / name), data, out=folder / f"{name}-c", device="cpu", progress=False)
    return folder


def recipe_of(place: Path, penalty: Any = None, **changes: Any) -> dict[str, Any]:
    base = {"model": str(place / "base"), "curvature": str(place / "base-c")}
    return {
        "method": "gradient-matching",
        "base": base | ({"penalty": penalty} if penalty is not None else {}),
        "models": [{"model": str(place / name), "curvature": str(place / f"{name}-c")} for name in ("one", "two")],
        "damping": 1e-3,
    } | changes


def diagnosed(place: Path, *tasks: str, **changes: Any) -> gm.Diagnosis:
    data = {name: str(place / f"{name}.jsonl") for name in tasks}
    return gm.diagnose(recipe_of(place, **changes), data=data, device="cpu", progress=False)


def by_hand(place: Path, name: str, penalty: dict[str, Tensor], scale: float) -> float:
    """‖P Δ + s ∇ℓ‖ / ‖P Δ‖ with a gradient by autograd in float64, one row after the other."""
    base, tuned = (read_model(place / which) for which in ("base", name))
    off = whole = 0.0
    for key, gradient in summed_gradient(place / name, place / f"{name}.jsonl").items():
        pull = penalty[key] * (tuned[key].double() - base[key].double())
        off += float((pull + scale * gradient).square().sum())
        whole += float(pull.square().sum())
    return float((off / whole) ** 0.5)


def test_the_ratio_of_models_and_data_on_disk_is_that_by_hand(place: Path) -> None:
    found, examples = diagnosed(place, "one", reduction={"mean_times": 7}), 7
    h0 = {n: v.double() * examples / (2 * ROWS) + 1e-3 for n, v in gm.Curvature.load(place / "base-c").items()}
    want = by_hand(place, "one", h0, examples / ROWS)
    assert found.penalty_checks["one"].ratio == pytest.approx(want, rel=1e-4)
    assert found.penalty_checks["one"].penalty == "H_0" and set(found.penalty_checks) == {"one"}
    assert found.prediction.cost("gradient-matching", "one").first_order == 0


@pytest.mark.parametrize("given", [False, True], ids=["H_0", "penalty"])
def test_with_kronecker_curvature_it_is_that_of_matrices_that_are_written_out(tmp_path: Path, given: bool) -> None:
    """The ratio, and the first-order term of a prediction; the head is tied, and has no gradient of its own."""
    shapes = {name: shape for name, shape in layers.SHAPES.items() if name != "lm_head.weight"}
    states = [random_state(seed, shapes, torch.float64) for seed in (0, 1, 2)]
    folders = [str(write_model(tmp_path / f"m{i}", state)) for i, state in enumerate(states)]
    sources = [layers.kronecker(seed) for seed in (3, 4, 5)]
    known = layers.kronecker(6)
    known.save(tmp_path / "penalty")
    more = {"base": {"penalty": str(tmp_path / "penalty")}} if given else {}
    recipe = make_recipe(layers.recipe_of(folders, sources, tmp_path, "gradient-matching", **more))
    gradients = {task: random_state(seed, shapes, torch.float64) for seed, task in ((7, "a"), (8, "b"))}
    plan = open_for_prediction(recipe)
    try:
        found = check_penalties(recipe, plan, {"a": 0, "b": 1}, gradients, {"a": 5, "b": 10})
        average = derive_plan(plan, recipe_with(recipe, make_setting(recipe, "average")))
        prediction = predict(plan, ["a", "b"], {"average": average})
    finally:
        plan.inputs.close()
    damping, source = (0.0, known) if given else (0.01, sources[0])
    merged = {name: (states[1][name] + states[2][name]) / 2 for name in shapes}
    for task, place, scale in (("a", 1, 10 / 5), ("b", 2, 10 / 10)):
        off = whole = first = 0.0
        parts = []
        for name in layers.LAYERS:
            p = layers.written_out(name, source, 1.0)
            change, step, slope = (
                layers.matrix(name, state).reshape(-1)
                for state in (
                    {n: states[place][n] - states[0][n] for n in shapes},
                    {n: merged[n] - states[place][n] for n in shapes},
                    gradients[task],
                )
            )
            parts.append((p @ change + damping * change, slope, step))
        for name in (layers.EMBEDDING, "norm.weight"):
            change = (states[place][name] - states[0][name]).reshape(-1)
            pull = source[name].double().reshape(-1) * change + damping * change
            step = (merged[name] - states[place][name]).reshape(-1)
            parts.append((pull, gradients[task][name].reshape(-1), step))
        for pull, slope, step in parts:
            off += float((pull + scale * slope).square().sum())
            whole += float(pull.square().sum())
            first -= float(pull @ step)
        assert found[task].ratio == pytest.approx((off / whole) ** 0.5, rel=1e-6)
        assert prediction.cost("average", task).first_order == pytest.approx(first if given else 0.0, rel=1e-6)


def test_training_under_a_penalty_its_record_and_the_ratio_agree(place: Path, tmp_path: Path) -> None:
    """From PriorAdamW over the folder that it leaves to the diagnosis of a recipe that names no penalty."""
    model: Any = BertForSequenceClassification.from_pretrained(place / "base").eval()
    loaded = load_task(place / "base", place / "one-all.jsonl", device="cpu")
    (batch,) = loaded.batches(2 * ROWS)
    optimizer = gm.PriorAdamW(model, betas=(0.8, 0.9), weight_decay=0.0, prior=0.5, strength=1.0, coupling="adam")
    for step in range(70):
        optimizer.param_groups[0]["lr"] = 0.03 * 0.92**step
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    tuned_from(place / "base", tmp_path / "one", 1)
    model.save_pretrained(tmp_path / "one")
    optimizer.record_penalty(tmp_path / "one", mean_over=2 * ROWS)
    data = str(place / "one-all.jsonl")
    gm.estimate_curvature(tmp_path / "one", data, out=tmp_path / "one" / "curvature", device="cpu", progress=False)
    recipe = recipe_of(place, models=[str(tmp_path / "one")])
    found = gm.diagnose(recipe, data={"one": data}, device="cpu", progress=False)
    assert found.penalty_checks["one"].penalty == "recorded" and (found.penalty_checks["one"].ratio or 1) < 0.05
    assert found.prediction.cost("gradient-matching", "one").first_order != 0
