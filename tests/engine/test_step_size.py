"""Whether a removal can be trusted, judged before it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.api.merge import planned
from gradmerge.engine.checks import amplifications, check_step_size
from gradmerge.engine.executor import LocalExecutor
from gradmerge.notes import Note

from ..making import SHAPES, near, random_state, read_model, three_models, write_model

Case = dict[str, Any]
REDUCE = LocalExecutor()


@pytest.fixture
def tame(tmp_path: Path) -> Case:
    """A removal of two models, all of whose curvature is alike: nothing to warn of."""
    folders, _ = three_models(tmp_path, curvature=True)
    return {
        "method": "removal",
        "base": str(folders[0]),
        "models": [{"model": str(f), "weight": 0.5} for f in folders[1:]],
        "damping": 10.0,
        "options": {"cap": "none"},
    }


def spoil(case: Case, names: list[str], entries: int = 3, base: float = 0.0, tuned: float = 5.0) -> None:
    """Set the base's curvature to almost 0 where a tuned model's is not, as too little data does."""
    for reference, value in ((case["base"], base), (case["models"][0]["model"], tuned)):
        curvature = gm.Curvature.load(reference)
        sums = curvature.sum()
        for name in names:
            sums[name].view(-1)[:entries] = value
        gm.Curvature(sums, curvature.examples).save(Path(reference) / "curvature", force=True)


def notes_of(case: Case) -> list[Note]:
    with planned(case) as plan:
        return check_step_size(plan, REDUCE)


def flat(states: list[dict[str, Tensor]], names: list[str]) -> list[Tensor]:
    return [torch.cat([state[name].double().reshape(-1) for name in names]) for state in states]


def test_the_amplification_is_that_of_the_merge_itself(tame: Case, tmp_path: Path) -> None:
    spoil(tame, ["embed.weight"], base=0.01)
    tame["damping"] = 1e-3
    gm.merge(tame, tmp_path / "out", accept_untrusted=True)
    states = [read_model(Path(p)) for p in (tame["base"], *(m["model"] for m in tame["models"]), tmp_path / "out")]
    with planned(tame) as plan:
        length, _ = amplifications(plan, REDUCE)
    base, a, b, merged = flat(states, list(SHAPES))
    want = (merged - base).norm() / ((a - base).abs() + (b - base).abs()).norm()
    assert length == pytest.approx(want.item(), rel=1e-5)


def test_negation_beyond_the_trusted_length_has_a_warning(tame: Case) -> None:
    """With the same curvature everywhere removal is negation, and no damping shortens it."""
    for model in [tame["base"], *(m["model"] for m in tame["models"])]:
        gm.Curvature({n: torch.zeros_like(t) for n, t in read_model(Path(tame["base"])).items()}, 1).save(
            Path(model) / "curvature", force=True
        )
    tame["models"] = [{"model": tame["models"][0]["model"], "weight": 4.0}]
    (note,) = notes_of(tame)
    assert note.data["amplification"] == pytest.approx(4)
    tame["models"][0]["weight"] = 2.0
    assert notes_of(tame) == []
    tame["models"][0]["weight"] = -4.0
    assert notes_of(tame)


BIG = {"layers.0.w": (1 << 21,), "layers.0.bias": (64,), "layers.1.w": (3, 1 << 19), "layers.1.tiny": (5,)}


def test_one_entry_of_millions_is_enough_to_refuse(tmp_path: Path) -> None:
    """Its step is half a million times that of fine-tuning: every entry is judged."""
    base = random_state(0, BIG)
    states = [base, near(base, 1)]
    sums = {name: torch.ones(shape) for name, shape in BIG.items()}
    model, start = (write_model(tmp_path / name, state) for name, state in zip("ab", states[::-1], strict=True))
    gm.Curvature(sums, 1).save(model / "curvature")
    sums["layers.0.w"][3] = 0.0
    gm.Curvature(sums, 1).save(start / "curvature")
    models = [{"model": str(model), "weight": 0.5}]
    case = {"method": "removal", "base": str(start), "models": models, "damping": 1e-6, "options": {"cap": "none"}}
    names = list(BIG)
    before, after = flat(states, names)
    prior = torch.cat([sums[name].double().reshape(-1) for name in names]) + 1e-6
    amplification = ((after - before) * 0.5 * (prior + 1) / prior).norm() / (after - before).norm()
    with planned(case) as plan:
        length, _ = amplifications(plan, REDUCE)
    assert length == pytest.approx(amplification.item(), rel=1e-5)
    with pytest.raises(gm.InputError):
        gm.merge(case, tmp_path / "out", threads=2)


def test_a_removal_at_exactly_the_cap_is_trusted_and_a_stronger_one_is_not(tame: Case) -> None:
    """Where nothing is known of what stays, the cap makes the step twice that of negation everywhere."""
    zeros = {name: torch.zeros_like(t) for name, t in read_model(Path(tame["base"])).items()}
    gm.Curvature(zeros, 1).save(Path(tame["base"]) / "curvature", force=True)
    tame |= {"damping": 1e-6, "options": {}, "models": [tame["models"][0] | {"weight": 1.0}]}
    assert notes_of(tame) == []
    tame["models"][0]["weight"] = 1.5
    (note,) = notes_of(tame)
    assert note.data["amplification"] == pytest.approx(3, rel=1e-3)
