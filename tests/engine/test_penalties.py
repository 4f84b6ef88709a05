"""What models were tuned under: named in the recipe, recorded beside them, or H_0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.notes import Kind

from ..making import assert_close, random_curvature, read_model, three_models
from ..rules import slow
from .test_merge import flat, flats, sums, unflat

Case = dict[str, Any]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Two models with curvature in their folders."""
    folders, _ = three_models(tmp_path, torch.float64, curvature=True)
    models = [{"model": str(folder), "weight": weight} for folder, weight in zip(folders[1:], (0.7, 1.2), strict=True)]
    return {"method": "gradient-matching", "base": {"model": str(folders[0])}, "models": models, "damping": 0.01}


def record(folder: str | Path, penalty: Any, **changes: Any) -> None:
    text = {"format": "gradmerge-penalty/1", "penalty": penalty} | changes
    (Path(folder) / "gradmerge_penalty.json").write_text(json.dumps(text))


def expected(case: Case, penalties: list[Any]) -> dict[str, Tensor]:
    """The slow twin: for each model a number, a curvature, or None for H_0."""
    folders = [case["base"]["model"], *(m["model"] for m in case["models"])]
    states, curvature = [read_model(Path(f)) for f in folders], [gm.Curvature.load(f) for f in folders]
    size, weights = len(flat(states[0])), [m["weight"] for m in case["models"]]
    every = [
        penalty if penalty is None else [penalty] * size if isinstance(penalty, float) else flat(penalty)
        for penalty in penalties
    ]
    options = case.get("options", {})
    capped = {"cap": options.get("cap", 1.0)} if case["method"] == "removal" else {}
    twin = slow.removal if case["method"] == "removal" else slow.gradient_matching
    given = (flat(states[0]), flats(states[1:]), weights, flat(curvature[0].sum()), sums(curvature[1:]))
    return unflat(twin(*given, case["damping"], every, **capped))


#: Method, the penalties recorded with the two models, `base.penalty`, and the penalties that count.
RECORDED: dict[str, tuple[str, list[Any], Any, list[Any]]] = {
    "numbers": ("gradient-matching", [{"identity": 2.0}, {"identity": 0.5}], None, [2.0, 0.5]),
    "files": ("removal", ["penalty", "penalty"], None, ["file", "file"]),
    "none and a file": ("gradient-matching", ["none", "penalty"], None, [0.0, "file"]),
    "one is missing": ("gradient-matching", [None, "penalty"], None, [None, "file"]),
    "the recipe decides": ("removal", ["penalty", None], "none", [0.0, 0.0]),
}


@pytest.mark.parametrize("kind", RECORDED)
def test_each_model_counts_with_the_penalty_that_is_recorded_with_it(case: Case, kind: str, tmp_path: Path) -> None:
    case["method"], recorded, in_recipe, want = RECORDED[kind]
    want = list(want)
    for number, penalty in enumerate(recorded):
        folder = Path(case["models"][number]["model"])
        curvature = random_curvature(20 + number, read_model(folder))
        curvature.save(folder / "penalty")
        if penalty is not None:
            record(folder, penalty)
        if want[number] == "file":
            want[number] = curvature.sum()
    if in_recipe is not None:
        case["base"]["penalty"] = in_recipe
    result = gm.merge(case, tmp_path / "out", accept_untrusted=True)
    assert_close(read_model(tmp_path / "out"), expected(case, want), 1e-11)
    lacking = [note.data["lacking"] for note in result.notes if note.kind == Kind.PENALTIES]
    assert lacking == ([[case["models"][0]["model"]]] if kind == "one is missing" else [])


def test_the_record_says_which_penalty_was_used(case: Case, tmp_path: Path) -> None:
    a, b = (model["model"] for model in case["models"])
    random_curvature(20, read_model(Path(a))).save(Path(a) / "penalty")
    record(a, "penalty")
    gm.merge(case, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "gradmerge.json").read_text())
    assert found["penalty"] == [
        {"model": a, "penalty": f"{a}/penalty", "from": "recorded"},
        {"model": b, "penalty": "H_0", "from": "default"},
    ]
    assert [one["source"] for one in found["inputs"] if one["role"] == "penalty"] == [f"{a}/penalty"]


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "format": ("none", {"format": "gradmerge-penalty/9"}, "gradmerge-penalty/9"),
    "a number": (3, {}, "penalty"),
    "outside": ("../base/curvature", {}, "base/curvature"),
    "absent": ("penalty", {}, "penalty"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_invalid_record_is_refused(case: Case, kind: str, tmp_path: Path) -> None:
    penalty, changes, message = WRONG[kind]
    folder = Path(case["models"][0]["model"])
    record(folder, penalty, **changes)
    with pytest.raises(gm.InputError, match=message):
        gm.merge(case, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    case["base"]["penalty"] = "none"  # which is used instead
    gm.merge(case, tmp_path / "out")


def test_a_record_that_is_a_link_out_of_the_folder_is_refused(case: Case, tmp_path: Path) -> None:
    record(tmp_path, "none")
    (Path(case["models"][0]["model"]) / "gradmerge_penalty.json").symlink_to(tmp_path / "gradmerge_penalty.json")
    with pytest.raises(gm.InputError, match=r"gradmerge_penalty\.json"):
        gm.merge(case, tmp_path / "out")
