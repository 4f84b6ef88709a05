"""Models whose names differ by a prefix: the key `rename`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import gradmerge as gm
from gradmerge.errors import InputError
from tests.making import assert_close, near, random_curvature, random_state, read_model, write_model

BASE = random_state(0)


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


def recipe_of(base: Path, *models: Any, **more: Any) -> dict[str, Any]:
    return {"method": "task-arithmetic", "base": str(base), "models": list(models), **more}


def test_a_renamed_model_merges_as_if_it_had_the_names_of_the_base(tmp_path: Path) -> None:
    tuned = near(BASE, 1)
    base = write_model(tmp_path / "base", prefixed(BASE, "model."))
    entry = {"model": str(write_model(tmp_path / "tuned", tuned, 2)), "weight": 0.5, "rename": {"": "model."}}
    gm.merge(recipe_of(base, entry), tmp_path / "out")
    assert_close(read_model(tmp_path / "out"), prefixed({n: (BASE[n] + tuned[n]) / 2 for n in BASE}, "model."))


def test_a_prefix_that_fits_nothing_or_makes_one_name_of_two_is_refused(tmp_path: Path) -> None:
    base, model = write_model(tmp_path / "base", BASE), write_model(tmp_path / "tuned", near(BASE, 1))
    for rename in ({"modell.": "x."}, {"layers.0.linear.": "layers.1.linear."}):
        with pytest.raises(InputError):
            gm.merge(recipe_of(base, {"model": str(model), "rename": rename}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", ["of the model", "of the base"])
def test_curvature_follows_the_rename_unless_it_has_the_new_names(names: str, tmp_path: Path) -> None:
    tuned, curvature, prior = near(BASE, 1), random_curvature(2, BASE), random_curvature(3, BASE)

    def merge(folder: Path, base: str, model: str, measured: str, **more: Any) -> dict[str, list[Any]]:
        """The merge of models whose names begin with these prefixes, and the one of the curvature of the model."""
        write_model(folder / "base", prefixed(BASE, base))
        write_model(folder / "tuned", prefixed(tuned, model))
        for value, name, prefix in ((prior, "base", base), (curvature, "tuned", measured)):
            named = gm.Curvature(prefixed(dict(value), prefix), value.examples, "empirical", "test")
            named.save(folder / name / "curvature", precision="log8")
        entry = {"model": str(folder / "tuned"), **more}
        gm.merge(recipe_of(folder / "base", entry) | {"method": "gradient-matching"}, folder / "out")
        return {name.removeprefix(base): value.tolist() for name, value in read_model(folder / "out").items()}

    measured = "model." if names == "of the model" else "model.tower."
    got = merge(tmp_path / "renamed", "model.tower.", "model.", measured, rename={"model.": "model.tower."})
    assert got == merge(tmp_path / "plain", "", "", "")
