"""A warning about models that were not fine-tuned from the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.checkpoints import Checkpoint, compare
from gradmerge.checkpoints.compat.lineage import lineage
from gradmerge.notes import Kind, Note
from tests.making import near, random_state, run, write_model, write_recipe

BASE = random_state(0, {"a.weight": (300, 200), "b.weight": (80, 50), "head.weight": (3, 50), "norm.weight": (50,)})


def warnings(ours: dict[str, Tensor], theirs: dict[str, Tensor], **more: Any) -> list[Note]:
    notes = compare(Checkpoint("base", memory=ours), [Checkpoint("tuned", memory=theirs)], **more).notes
    return [note for note in notes if isinstance(note, Note) and note.kind is Kind.STRANGERS]


def test_an_unrelated_model_gets_a_warning_with_distance_and_cosine() -> None:
    theirs = random_state(1, {n: tuple(v.shape) for n, v in BASE.items()})
    (note,) = warnings(BASE, theirs)
    matrices = [n for n in BASE if BASE[n].dim() == 2]
    ours_flat, theirs_flat = (torch.cat([s[n].double().flatten() for n in matrices]) for s in (BASE, theirs))
    distance = float((theirs_flat - ours_flat).norm() / ours_flat.norm())
    cosine = float(ours_flat @ theirs_flat / ours_flat.norm() / theirs_flat.norm())
    assert abs(note.data["distance"] - distance) < 0.03 and abs(note.data["cosine"] - cosine) < 0.02
    found = lineage(Checkpoint("base", memory=BASE), Checkpoint("tuned", memory=theirs), list(BASE))
    assert (found.distance, found.cosine) == (note.data["distance"], note.data["cosine"])
    assert len(warnings(BASE, theirs, first_is_base=False)) == 1


def test_fine_tuned_models_and_new_heads_get_no_warning() -> None:
    tuned = near(BASE, 1, 0.5)
    assert not warnings(BASE, tuned)
    assert not warnings(BASE, tuned | {"head.weight": torch.randn(3, 50), "norm.weight": torch.randn(50) * 100})


def test_excluded_tensors_do_not_count() -> None:
    tuned = near(BASE, 1) | {"a.weight": torch.randn(300, 200)}
    assert warnings(BASE, tuned) and not warnings(BASE, tuned, exclude=["a.*"])


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e38])
def test_models_of_zeros_or_of_no_numbers_get_no_warning(value: float) -> None:
    odd = {name: torch.full_like(tensor, value) for name, tensor in BASE.items()}
    assert not warnings(odd, odd)
    assert not warnings(odd, BASE) or value == 1e38


def test_the_warning_appears_in_a_merge_a_dry_run_and_inspect(tmp_path: Path) -> None:
    folders = [str(write_model(tmp_path / name, random_state(i))) for i, name in enumerate(("base", "tuned"))]
    recipe = {"method": "average", "base": folders[0], "models": folders[1:]}
    assert [n for n in gm.merge(recipe, tmp_path / "out").notes if n.is_warning]
    path = write_recipe(tmp_path / "recipe.yml", recipe)
    quiet = ["merge", path, "-o", tmp_path / "again", "--quiet"]
    for command in (["merge", path, "--dry-run"], ["inspect", *folders], quiet):
        assert "WARNING" in run(*command).output
