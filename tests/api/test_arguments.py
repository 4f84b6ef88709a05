"""Wrong arguments raise InputError at the call and name the argument; docstrings explain every argument."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import nn

import gradmerge as gm

RECIPE = {"method": "task-arithmetic", "base": "./base", "models": ["./a"]}
STATE = {"w": torch.ones(2)}
MODEL = nn.Linear(2, 2)
BATCHES = [(torch.ones(1, 2), torch.zeros(1, dtype=torch.long))]
SUMS = gm.Curvature(STATE, 3)

#: Function, arguments, keywords, and the argument that is wrong.
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("merge", (3, "./out"), {}, "recipe"),
    ("merge", (RECIPE, "./out"), {"threads": "x"}, "threads"),
    ("merge", (RECIPE, "./out"), {"force": 1}, "force"),
    ("merge", (RECIPE, "./out"), {"allow_config": [3]}, "allow_config[0]"),
    ("merge_state_dicts", (STATE, [STATE]), {"weights": "a"}, "weights"),
    ("merge_state_dicts", (STATE, [STATE]), {"prior": 1, "curvature": [1, 2, 3]}, "curvature"),
    ("evaluate", ("./a", "rows.jsonl"), {"limits": 3}, "there is no option 'limits'; did you mean 'limit'?"),
    ("preview", (RECIPE,), {"data": {"a": 5}}, "data['a']"),
    ("estimate_curvature", (5, BATCHES), {}, "model"),
    ("estimate_curvature", (MODEL, STATE), {}, "batches"),
    ("estimate_curvature", (MODEL, [5]), {}, "a batch"),
    ("estimate_curvature", (MODEL, "rows.jsonl"), {}, "batches"),
    ("estimate_curvature", ("./a", "b"), {}, "out"),
    ("estimate_curvature", (MODEL, BATCHES), {"limit": 3}, "limit"),
    ("Curvature.save", (SUMS, 5), {}, "path"),
]


@pytest.mark.parametrize(("name", "arguments", "keywords", "wrong"), WRONG)
def test_a_wrong_argument_is_named(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any], wrong: str) -> None:
    with pytest.raises(gm.InputError) as error:
        attrgetter(name)(gm)(*arguments, **keywords)
    assert str(error.value).startswith(wrong)


#: Classes that users make themselves. Other classes are results, which explain their fields.
CLASSES = {"Curvature", "CurvatureCallback", "PriorAdamW", "PriorTrainer"}
EXPLAINED = sorted(CLASSES | {name for name in gm.__all__ if inspect.isfunction(getattr(gm, name))})


@pytest.mark.parametrize("name", [*EXPLAINED, "Curvature.save", "Curvature.load"])
def test_help_is_enough(name: str) -> None:
    thing: Any = attrgetter(name)(gm)
    text = inspect.getdoc(thing) or ""
    described = re.search(r"^Args:\n((?: {4}.*\n?|\n)*)", text, re.MULTILINE)
    assert described, "Args"
    if inspect.isfunction(thing) and inspect.signature(thing).return_annotation != "None":
        assert re.search(r"^Returns:$", text, re.MULTILINE), "Returns"
    words = set(re.findall(r"\w+", described[1]))
    unnamed = inspect.signature(thing).parameters.keys() - words - {"self", "trainer_args", "trainer_kwargs"}
    assert not unnamed, "every argument is named"
    if inspect.isfunction(thing) or inspect.ismethod(thing):
        assert ">>> " in text, "an example"
