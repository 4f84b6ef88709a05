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
    folders, states = three_models(tmp_path, torch.float64)
    for seed, (folder, state) in enumerate(zip(folders, states, strict=True)):
        random_curvature(seed, state).save(folder / "curvature")
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


@pytest.mark.parametrize("method", ["gradient-matching", "removal"])
@pytest.mark.parametrize("kinds", ["numbers", "files", "none and a file", "one is missing", "the recipe decides"])
def test_each_model_counts_with_the_penalty_that_is_recorded_beside_it(
    case: Case, method: str, kinds: str, tmp_path: Path
) -> None:
    case["method"] = method
    a, b = (model["model"] for model in case["models"])
    files = []
    for seed, folder in ((20, a), (21, b)):
        files.append(random_curvature(seed, read_model(Path(folder))))
        files[-1].save(Path(folder) / "penalty")
    want: list[Any] = []
    if kinds == "numbers":
        record(a, {"identity": 2.0})
        record(b, {"identity": 0.5})
        want = [2.0, 0.5]
    elif kinds == "files":
        record(a, "penalty")
        record(b, "penalty")
        want = [file.sum() for file in files]
    elif kinds == "none and a file":
        record(a, "none")
        record(b, "penalty")
        want = [0.0, files[1].sum()]
    elif kinds == "one is missing":
        record(b, "penalty")
        want = [None, files[1].sum()]
    else:
        record(a, "penalty")
        case["base"]["penalty"] = "none"
        want = [0.0, 0.0]
    result = gm.merge(case, tmp_path / "out", accept_untrusted=True)
    assert_close(read_model(tmp_path / "out"), expected(case, want), 1e-11)
    warned = [note for note in result.notes if note.kind == Kind.PENALTIES]
    assert [note.data["lacking"] for note in warned] == ([[a]] if kinds == "one is missing" else [])
    assert all("base.penalty" in note and note.is_warning for note in warned)


def test_a_recorded_penalty_is_read_as_it_is_whatever_the_reduction(case: Case, tmp_path: Path) -> None:
    """Also that of more than one example; and what it does not name is not held."""
    a, b = (Path(model["model"]) for model in case["models"])
    sums = random_curvature(20, read_model(a)).sum()
    del sums["embed.weight"]
    gm.Curvature(sums, 5).save(a / "penalty")
    record(a, "penalty")
    record(b, "none")
    whole = gm.Curvature(sums | {"embed.weight": torch.zeros_like(read_model(a)["embed.weight"])}, 5)
    note, far = gm.merge(case | {"reduction": "mean"}, tmp_path / "out").notes
    assert (note.kind, far.kind) == (Kind.PENALTIES, Kind.COEFFICIENTS)
    for fine in ("sum", {"mean_times": 50}):
        assert gm.merge(case | {"reduction": fine}, tmp_path / "fine", force=True).notes == []
    folders = [case["base"]["model"], str(a), str(b)]
    states, curvature = [read_model(Path(f)) for f in folders], [gm.Curvature.load(f) for f in folders]
    every = [flat({n: t.double() / c.examples for n, t in c.sum().items()}) for c in curvature]
    given = (flat(states[0]), flats(states[1:]), [0.7, 1.2], every[0], every[1:], case["damping"])
    want = slow.gradient_matching(*given, [flat(whole.sum()), [0.0] * len(every[0])])
    assert_close(read_model(tmp_path / "out"), unflat(want), 1e-11)


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
    assert found["damping"] == 0.01
    assert [one["source"] for one in found["inputs"] if one["role"] == "penalty"] == [f"{a}/penalty"]
    for penalty in ("none", {"identity": 2.0}):
        case["base"]["penalty"] = penalty
        gm.merge(case, tmp_path / "again", force=True)
        found = json.loads((tmp_path / "again" / "gradmerge.json").read_text())
        assert [(one["penalty"], one["from"]) for one in found["penalty"]] == [(penalty, "recipe")] * 2


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "format": ("none", {"format": "gradmerge-penalty/9"}, "gradmerge-penalty/9"),
    "no penalty": (None, {}, "penalty"),
    "a number": (3, {}, "penalty"),
    "negative": ({"identity": -1}, {}, "penalty.identity"),
    "outside": ("../base/curvature", {}, "base/curvature"),
    "absolute": ("/tmp", {}, "/tmp"),
    "absent": ("penalty", {}, "penalty"),
    "no curvature": ("empty", {}, "empty"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_record_that_cannot_be_is_refused(case: Case, kind: str, tmp_path: Path) -> None:
    penalty, changes, message = WRONG[kind]
    folder = Path(case["models"][0]["model"])
    (folder / "empty").mkdir()
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


@pytest.mark.parametrize("method", ["gradient-matching", "removal"])
def test_the_bases_curvature_is_scaled_to_the_examples_that_it_stands_for(
    case: Case, method: str, tmp_path: Path
) -> None:
    case |= {"method": method, "output": {"curvature": True}}
    own = gm.Curvature.load(case["base"]["model"])
    case["base"]["examples"] = 12_345
    gm.merge(case, tmp_path / "out", accept_untrusted=True)
    own.scale(12_345 / own.examples).save(Path(case["base"]["model"]) / "curvature", force=True)
    del case["base"]["examples"]
    gm.merge(case, tmp_path / "scaled", accept_untrusted=True)
    assert_close(read_model(tmp_path / "out"), read_model(tmp_path / "scaled"), 1e-6)
    one, other = gm.Curvature.load(tmp_path / "out"), gm.Curvature.load(tmp_path / "scaled")
    assert all(torch.allclose(one[name], other[name], rtol=1e-5) for name in one)
    tuned = [gm.Curvature.load(model["model"]).examples for model in case["models"]]
    assert one.examples == 12_345 + sum(tuned)
    assert other.examples == own.examples + sum(tuned)
