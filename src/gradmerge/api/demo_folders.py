"""The folder that `gradmerge demo` writes, as a recipe with data."""

from __future__ import annotations

from pathlib import Path

from ..compare.settings import BASE, task_names
from ..errors import InputError
from ..recipe import load_recipe


def recipe_of_demo(place: Path) -> Path:
    """A recipe file as it is; of a demo's folder, its recipe with curvature."""
    if not place.is_dir():
        return place
    found = place / "recipes" / "gradient-matching.yml"
    if not found.is_file():
        raise InputError(
            f"{place}: is a folder, and no demo: it has no recipes/gradient-matching.yml. Name a recipe file."
        )
    return found


def data_of_demo(recipe: Path) -> dict[str, str]:
    """For a recipe of a demo, the rows of each of its models that weights are tried on, and the base's; else nothing.

    A model NAME, or joint-NAME, was tuned on data/NAME.npz. The base was trained on upright.npz; what is to stay of the
    joint model, when NAME is taken out, is rest.npz.
    """
    folder = recipe.parent.parent / "data"
    if recipe.parent.name != "recipes" or not all((folder / f"{name}.npz").is_file() for name in ("upright", "rest")):
        return {}
    names = task_names(load_recipe(recipe))
    base = "rest" if any(name.startswith("joint-") for name in names) else "upright"
    files = {name: folder / f"{name.removeprefix('joint-')}.npz" for name in names} | {BASE: folder / f"{base}.npz"}
    return {name: f"{file}:valid" for name, file in files.items() if file.is_file()}
