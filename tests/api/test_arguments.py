"""What is wrong with an argument is said at the call, in words; docstrings are enough to make a right one."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradmerge as gm
from gradmerge.arguments import check

RECIPE = {"method": "task-arithmetic", "base": "./base", "models": ["./a"]}
STATE = {"w": torch.ones(2)}
MODEL = nn.Linear(2, 2)
BATCHES = [(torch.ones(1, 2), torch.zeros(1, dtype=torch.long))]
SUMS = gm.Curvature(STATE, 3)
ANY_RECIPE = "but must be a path, a Recipe or a mapping"

#: Function, arguments, keywords, and what is said of them.
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("merge", (3, "./out"), {}, f"recipe is 3, {ANY_RECIPE}"),
    ("merge", (RECIPE, None), {}, "out is None, but must be a path"),
    ("merge", (RECIPE, "./out"), {"threads": "x"}, "threads is 'x', but must be a whole number or None"),
    ("merge", (RECIPE, "./out"), {"progress": "yes"}, "progress is 'yes', but must be True or False or a Progress"),
    ("merge", (RECIPE, "./out"), {"force": 1}, "force is 1, but must be True or False"),
    ("merge", (RECIPE, "./out"), {"allow_config": "key"}, "allow_config is 'key', but must be a list"),
    ("merge", (RECIPE, "./out"), {"allow_config": [3]}, "allow_config[0] is 3, but must be text"),
    ("merge", (RECIPE, "./out"), {"device": 0}, "device is 0, but must be text"),
    ("merge_state_dicts", (STATE, [STATE]), {"weights": "a"}, "weights is 'a', but must be a list or None"),
    ("merge_state_dicts", (STATE, [STATE]), {"prior": 1, "curvature": [1, 2, 3]}, "curvature: gradient-matching needs"),
    ("merge_state_dicts", (STATE, [STATE]), {"include": 5}, "include is 5, but must be a list"),
    ("merge_state_dicts", (STATE, [STATE]), {"options": [1]}, "options is [1], but must be a mapping or None"),
    ("merge_state_dicts", (STATE, [STATE]), {"damping": "x"}, "damping is 'x', but must be a number"),
    ("merge_state_dicts", (STATE, 5), {}, "tuned: give a list of state dicts"),
    ("evaluate", (5, "rows.jsonl"), {}, "model is 5, but must be a path"),
    ("evaluate", ("./a", 3), {}, "source is 3, but must be a path or None"),
    ("evaluate", ("./a", "rows.jsonl"), {"progress": None}, "progress is None, but must be True or False"),
    ("evaluate", ("./a", "rows.jsonl"), {"limits": 3}, "there is no option 'limits'; did you mean 'limit'?"),
    ("preview", ([1],), {}, f"recipe is [1], {ANY_RECIPE}"),
    ("preview", (RECIPE,), {"data": ["a=b"]}, "data is ['a=b'], but must be a mapping or None"),
    ("preview", (RECIPE,), {"data": {"a": 5}}, "data['a'] is 5, but must be text"),
    ("preview", (RECIPE,), {"weights": 3}, "weights is 3, but must be text, a list, a mapping or None"),
    ("suggest_weights", (RECIPE,), {"methods": 7}, "methods is 7, but must be a list, text or None"),
    ("suggest_weights", (RECIPE, 5), {}, "out is 5, but must be a path or None"),
    ("diagnose", (None,), {}, f"recipe is None, {ANY_RECIPE}"),
    ("diagnose", (RECIPE,), {"target": 5}, "target is 5, but must be a path or None"),
    ("diagnose", (RECIPE,), {"data": "rows.jsonl"}, "data is 'rows.jsonl', but must be a mapping or None"),
    ("estimate_curvature", (5, BATCHES), {}, "model is 5, but must be a Module or a path"),
    ("estimate_curvature", (MODEL, None), {}, "batches is None, but must be batches or a path"),
    ("estimate_curvature", (MODEL, STATE), {}, "batches is {'w': tensor([1., 1.])}, but must be batches or a path"),
    (
        "estimate_curvature",
        (MODEL, [5]),
        {},
        "a batch is a mapping with labels or a tuple that ends with them, not int",
    ),
    ("estimate_curvature", (MODEL, BATCHES, 3), {}, "likelihood is 3, but must be text"),
    ("estimate_curvature", (MODEL, "rows.jsonl"), {}, "batches is str, but must be batches in memory, for a module"),
    (
        "estimate_curvature",
        ("./a", BATCHES),
        {"out": "./c"},
        "batches is list, but must be the path or name of its data",
    ),
    ("estimate_curvature", ("./a", "b"), {}, "out is None, but must be the folder to write, for a model on disk"),
    ("estimate_curvature", ("./a", "b"), {"out": "./c", "output": "labels"}, "output is an option for a module"),
    ("estimate_curvature", (MODEL, BATCHES), {"out": "./c"}, "out is an option for a model on disk, not for a module"),
    ("estimate_curvature", (MODEL, BATCHES), {"limit": 3}, "limit is an option for a model on disk, not for a module"),
    ("estimate_curvature", (MODEL, BATCHES), {"sed": 3}, "there is no option 'sed'; did you mean 'seed'?"),
    ("estimate_gram", ("./a", BATCHES), {}, "model is './a', but must be a Module"),
    ("estimate_gram", (MODEL, "rows.jsonl"), {}, "batches is 'rows.jsonl', but must be batches"),
    ("import_curvature", (None, 10, 4), {}, "checkpoint is None, but must be a path"),
    ("sample_posterior", (3, 2), {}, "folder is 3, but must be a path"),
    ("sample_posterior", ("./a", "two"), {}, "n: how many models to draw"),
    ("open_checkpoint", (5,), {}, "reference is 5, but must be a path"),
    ("load_recipe", (RECIPE,), {}, "path is {'method': 'task-arithmetic', "),
    ("read_rows", (None,), {}, "source is None, but must be a path"),
    ("read_rows", ("rows.jsonl",), {"limit": "3"}, "limit is '3', but must be a whole number or None"),
    ("Curvature.save", (SUMS, 5), {}, "path is 5, but must be a path"),
    ("Curvature.load", (None,), {}, "path is None, but must be a path"),
]


@pytest.mark.parametrize(("name", "arguments", "keywords", "message"), WRONG, ids=[case[3][:40] for case in WRONG])
def test_a_wrong_argument_is_told_what_was_expected(
    name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(gm.InputError) as error:
        attrgetter(name)(gm)(*arguments, **keywords)
    assert str(error.value).startswith(message)


def test_a_missing_argument_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match=r"merge\(\) missing 1 required positional argument: 'out'"):
        gm.merge(RECIPE)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.int64(3), int | None),
        (np.float32(0.5), float),
        (3, float),
        (np.ones(2), list[float] | Any),
        (Path("a"), str | Path),
        ((), tuple[str, ...] | None),
    ],
)
def test_what_stands_for_a_type_fits_it(value: Any, hint: Any) -> None:
    check("value", value, hint)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(gm.InputError, match=r"^\S+ is \[0, 0, .{40,60}… \(list\), but must be text$"):
        check("name", [0] * 1000, str)


#: Made by functions, and only looked at; or told by their fields.
TOLD_BY_FIELDS = {
    "Answer",
    "Control",
    "Flip",
    "Outcome",
    "Setting",
    "Superseded",
    "Checkpoint",
    "Diagnosis",
    "Estimate",
    "LoadOptions",
    "MergeResult",
    "Note",
    "Preview",
    "Recipe",
    "Rows",
}
TOLD_BY_FIELDS |= {
    "GradmergeError",
    "InfluenceRemoval",
    "InputError",
    "MachineError",
    "Progress",
    "Suggestion",
}
#: Rules: their docstring is the equation, with the names of the arguments in it.
EQUATIONS = {"gradient_matching_full", "removal_full"}
EXPLAINED = [name for name in gm.__all__ if callable(getattr(gm, name)) and name not in TOLD_BY_FIELDS | EQUATIONS]


@pytest.mark.parametrize("name", [*EXPLAINED, "Curvature.save", "Curvature.load"])
def test_help_is_enough(name: str) -> None:
    thing: Any = attrgetter(name)(gm)
    text = inspect.getdoc(thing) or ""
    described = re.search(r"^Args:\n((?: {4}.*\n?|\n)*)", text, re.MULTILINE)
    assert described, "Args"
    if inspect.isfunction(thing) and inspect.signature(thing).return_annotation != "None":
        assert re.search(r"^Returns:$", text, re.MULTILINE), "Returns"
    words = set(re.findall(r"\w+", described[1]))
    own = [name for name in inspect.signature(thing).parameters if name not in ("self", "usual")]
    assert not [name for name in own if name not in words], "every argument is named"
    if inspect.isfunction(thing) or inspect.ismethod(thing):
        assert ">>> " in text, "an example"


def test_everything_exported_is_there_and_has_a_docstring() -> None:
    for name in gm.__all__:
        thing = getattr(gm, name)
        assert not callable(thing) or inspect.getdoc(thing), name
