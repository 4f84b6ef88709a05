"""P of a refinement is what was recorded beside the models of the merge, if all were tuned under the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from gradmerge.refinement.held_to_base import penalty_of
from gradmerge.refinement.newton import Penalty
from gradmerge.refinement.saving import opened_start
from gradmerge.tasks import complete, load_task

from ..making import read_model
from ..tasks.making import tiny_bert_checkpoint

MODELS = ("one", "two")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for seed, name in enumerate(("base", *MODELS)):
        tiny_bert_checkpoint(tmp_path / name, seed=seed, num_hidden_layers=1)
    return tmp_path


def record(place: Path, model: str, penalty: Any) -> None:
    text = {"format": "gradmerge-penalty/1", "penalty": penalty}
    (place / model / "gradmerge_penalty.json").write_text(json.dumps(text))


def of_merge(place: Path) -> tuple[Penalty | None, dict[str, Any], list[str]]:
    identity = {"identity": 1.0}
    models = [{"model": str(place / name), "curvature": identity} for name in MODELS]
    base = {"model": str(place / "base"), "curvature": identity}
    gm.merge({"method": "gradient-matching", "base": base, "models": models}, place / "out", progress=False)
    with opened_start(str(place / "out"), complete({}, load_task)) as start:
        return penalty_of(start, None, None)


def test_one_number_beside_all_models_is_p(place: Path) -> None:
    for name in MODELS:
        record(place, name, {"identity": 3.0})
    found, facts, notes = of_merge(place)
    assert found is not None and not notes
    assert facts == {"penalty": "identity:3.0", "base": str(place / "base")}
    base = read_model(place / "base")
    for name, value in found.matrix.items():
        assert torch.equal(value, torch.full_like(value, 3.0)) and torch.equal(found.base[name], base[name])


@pytest.mark.parametrize("equal", [True, False])
def test_files_beside_models_count_if_they_hold_the_same(place: Path, equal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = {n: torch.rand(v.shape, generator=generator) for n, v in read_model(place / "base").items()}
    for number, name in enumerate(MODELS):
        scaled = matrix if equal else {n: v * (number + 1) for n, v in matrix.items()}
        gm.Curvature(scaled, examples=1).save(place / name / "penalty")
        record(place, name, "penalty")
    found, facts, notes = of_merge(place)
    if not equal:
        assert found is None and facts == {"penalty": None}
        assert "different" in notes[0] and "--penalty" in notes[0]
        return
    assert found is not None and not notes and facts["penalty"] == str(place / "one" / "penalty")
    assert all(torch.equal(value, matrix[name]) for name, value in found.matrix.items()) and len(found.matrix) > 5


@pytest.mark.parametrize("beside", [(), ("one",)])
def test_a_penalty_that_was_only_assumed_is_none_and_a_note_says_how_to_give_it(
    place: Path, beside: tuple[str, ...]
) -> None:
    for name in beside:
        record(place, name, {"identity": 3.0})
    found, _, (note,) = of_merge(place)
    assert found is None and "P = 0" in note and "--penalty" in note
    assert str(place / "two") in note and (str(place / "one") in note) is not bool(beside)


def test_models_that_are_said_to_be_tuned_without_one_need_no_note(place: Path) -> None:
    for name in MODELS:
        record(place, name, "none")
    assert of_merge(place) == (None, {"penalty": None}, [])
