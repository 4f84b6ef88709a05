"""On how much of the change gradient matching is task arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from gradmerge.api.merge import planned
from gradmerge.engine import checks as coefficients
from gradmerge.engine.checks import coefficient_notes, share_above
from gradmerge.engine.executor import LocalExecutor
from gradmerge.notes import Kind, Note

from ..making import near, random_state, write_model

SHAPES = {"layers.0.w": (40, 50), "layers.1.w": (3000,), "layers.1.bias": (7,)}
WEIGHTS = [1.0, 0.8, 1.1]
Case = dict[str, Any]
REDUCE = LocalExecutor()
Sums = list[dict[str, torch.Tensor]]


@pytest.fixture
def made(tmp_path: Path) -> tuple[Case, list[dict[str, torch.Tensor]], Sums]:
    """Three models whose curvature is mostly far below the base's."""
    base = random_state(0, SHAPES, torch.float64)
    states = [base, *(near(base, seed) for seed in (1, 2, 3))]
    sums: Sums = []
    for seed, state in enumerate(states):
        values = {n: t.square().float() for n, t in random_state(10 + seed, SHAPES).items()}
        sums.append({n: t * (3.0 if seed == 0 else 1.0) for n, t in values.items()})
        folder = write_model(tmp_path / f"m{seed}", state)
        gm.Curvature(sums[-1], 1).save(folder / "curvature")
    models = [{"model": str(tmp_path / f"m{i + 1}"), "weight": w} for i, w in enumerate(WEIGHTS)]
    case = {"method": "gradient-matching", "base": {"model": str(tmp_path / "m0")}, "models": models, "damping": 0.1}
    return case, states, sums


def expected(states: Sums, sums: Sums, penalty: float | None = None) -> float:
    """The share, one entry at a time."""
    above = whole = 0.0
    for name in SHAPES:
        values = [state[name].double().reshape(-1).tolist() for state in states]
        curvature = [one[name].double().reshape(-1).tolist() for one in sums]
        for i, base in enumerate(values[0]):
            h0 = curvature[0][i] + 0.1
            p = h0 if penalty is None else penalty
            below = h0 + sum(w * curvature[t + 1][i] for t, w in enumerate(WEIGHTS))
            total = sum(w * (p + curvature[t + 1][i]) / below for t, w in enumerate(WEIGHTS))
            change = sum(abs(w) * (values[t + 1][i] - base) ** 2 for t, w in enumerate(WEIGHTS))
            above += change * (total > 1.5)
            whole += change
    return above / whole


def strong_base(case: Case, sums: Sums) -> Sums:
    """Save curvature of the base that is far above that of the models. Return all curvature."""
    strong = {n: t * 1000 for n, t in sums[0].items()}
    gm.Curvature(strong, 1).save(Path(case["base"]["model"]) / "curvature", force=True)
    return [strong, *sums[1:]]


def notes_of(case: Case) -> list[Note]:
    with planned(case) as plan:
        return coefficient_notes(plan, REDUCE)


@pytest.mark.parametrize("penalty", [None, 1.0])
def test_the_share_is_that_of_every_entry(made, penalty: float | None) -> None:
    case, states, sums = made
    if penalty is not None:
        case["base"]["penalty"] = {"identity": penalty}
    found = set()
    for threads in (1, 3):
        with planned(case) as plan:
            found.add(share_above(plan, LocalExecutor(threads)))
    ((share, looked_at),) = found
    assert looked_at == 2000 + 3000 + 7
    assert 0.05 < share < 0.95
    assert share == pytest.approx(expected(states, sums, penalty), rel=1e-12)


def test_a_merge_that_is_mostly_task_arithmetic_has_a_warning(made, tmp_path: Path) -> None:
    case, states, sums = made
    share = expected(states, strong_base(case, sums))
    assert share > 0.9
    (note,) = gm.merge(case, tmp_path / "out").notes
    assert note.kind == Kind.COEFFICIENTS and note.is_warning
    assert note.data["share"] == pytest.approx(share)
    case["base"]["penalty"] = "none"
    assert notes_of(case) == []
    case["base"]["penalty"] = str(Path(case["base"]["model"]) / "curvature")
    assert len(notes_of(case)) == 1


def test_a_large_model_is_sampled(made, monkeypatch) -> None:
    case, states, sums = made
    sums = strong_base(case, sums)
    for name, value in {"SAMPLE": 800, "RUN": 20}.items():
        monkeypatch.setattr(coefficients, name, value)
    with planned(case) as plan:
        share, looked_at = share_above(plan, REDUCE)
    assert 400 <= looked_at <= 800
    assert share == pytest.approx(expected(states, sums), abs=0.05)
