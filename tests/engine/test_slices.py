"""Recipes with slices, compared with state dicts assembled in float64. tests/golden compares them with mergekit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import gradmerge as gm
from gradmerge.errors import InputError

from ..checkpoints.families import load, make, moved, save
from ..making import assert_close, read_model

STACK = {
    "llama-tied": "model.layers.",
    "gpt2": "transformer.h.",
    "bert": "bert.encoder.layer.",
}
DEPTH = {"gpt2": "n_layer"}
BEFORE = ("model.embed_tokens.", "transformer.wte.", "transformer.wpe.", "bert.embeddings.")
State = Mapping[str, Tensor]
#: (slice, position in it from 0 to 1, the names of a tensor in every model of the slice)
Place = tuple[int, float, list[str]]


def family(tmp_path: Path, kind: str, depths: Mapping[str, int] | None = None) -> dict[str, State]:
    """Models of one family, folders A, B, … below, all moved from one another."""
    for place, (name, layers) in enumerate((depths or {"A": 3, "B": 3, "C": 5}).items()):
        save(moved(make(kind, 0, **{DEPTH.get(kind, "num_hidden_layers"): layers}), place + 1), tmp_path / name)
    return {folder.name: read_model(folder) for folder in tmp_path.iterdir() if folder.is_dir()}


def places(stack: str, state: State, slices: Sequence[Sequence[tuple[str, int, int]]]) -> dict[str, Place]:
    """Tensor of the result → where it comes from, spelt out."""
    found: dict[str, Place] = {}
    for name in state:
        if not name.startswith(stack):
            which = 0 if name.startswith(BEFORE) else len(slices) - 1
            found[name] = (which, 0.0, [name] * len(slices[which]))
    rests = [name.removeprefix(f"{stack}0.") for name in state if name.startswith(f"{stack}0.")]
    number = 0
    for which, part in enumerate(slices):
        length = part[0][2] - part[0][1]
        for layer in range(length):
            position = layer / (length - 1) if length > 1 else 1.0
            for rest in rests:
                names = [f"{stack}{first + layer}.{rest}" for _, first, _ in part]
                found[f"{stack}{number}.{rest}"] = (which, position, names)
            number += 1
    return found


def by_hand(
    states: Mapping[str, State],
    stack: str,
    slices: Sequence[Sequence[tuple[str, int, int]]],
    rule: Callable[[list[Tensor], Place, str], Tensor],
) -> dict[str, Tensor]:
    """Return the expected tensors in float64; the first source of each slice is the base, if there is one."""
    merged = {}
    for name, place in places(stack, states[slices[0][0][0]], slices).items():
        sources = [states[part[0]][stored].double() for part, stored in zip(slices[place[0]], place[2], strict=True)]
        merged[name] = rule(sources, place, name)
    return merged


def entry(model: str, first: int, stop: int, **more: Any) -> dict[str, Any]:
    return {"model": f"./{model}", "layers": [first, stop], **more}


def merge(tmp_path: Path, recipe: Mapping[str, Any], **arguments: Any) -> Path:
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(dict(recipe)))
    return gm.merge(tmp_path / "recipe.yml", tmp_path / "out", progress=False, **arguments).output


@pytest.mark.parametrize("kind", ["llama-tied", "gpt2", "bert"])
def test_stacked_layers_load_and_run_in_transformers(tmp_path: Path, kind: str) -> None:
    states = family(tmp_path, kind)
    slices = [[("A", 0, 2)], [("C", 1, 5)], [("A", 1, 2)], [("B", 0, 1)]]
    out = merge(tmp_path, {"method": "passthrough", "slices": [{"models": [entry(*part[0])]} for part in slices]})
    expected = by_hand(states, STACK[kind], slices, lambda sources, *_: sources[0])
    assert_close(read_model(out), expected, 0.0)
    config = json.loads((out / "config.json").read_text())
    assert config[DEPTH.get(kind, "num_hidden_layers")] == 8
    model = load(kind, out).eval()
    assert model(torch.tensor([[3, 5, 7, 2]])).logits.isfinite().all()


def spread(values: Sequence[float], position: float) -> float:
    """Interpolate a list over the layers."""
    at = position * (len(values) - 1)
    below = min(math.floor(at), len(values) - 2)
    return values[below] + (at - below) * (values[below + 1] - values[below])


def test_slices_can_have_layers_of_the_base_and_options(tmp_path: Path) -> None:
    states = family(tmp_path, "gpt2")
    slices = [[("B", 0, 2), ("A", 0, 2)], [("B", 0, 3), ("A", 0, 3)], [("B", 0, 1), ("C", 4, 5)]]
    recipe = {
        "method": "slerp",
        "base": "./B",
        "options": {"t": 0.25, "parallel": 1.0},
        "slices": [
            {"models": [entry("A", 0, 2)], "options": {"t": [0.1, 0.9]}},
            {"models": [entry("A", 0, 3)]},
            {"models": [entry("C", 4, 5)], "base": [0, 1], "options": {"t": [0.0, 0.6]}},
        ],
    }
    out = merge(tmp_path, recipe)

    def slerp(sources: list[Tensor], place: Place, name: str) -> Tensor:
        t = (spread([0.1, 0.9], place[1]), 0.25, spread([0.0, 0.6], place[1]))[place[0]]
        base, tuned = sources
        angle = torch.acos((base * tuned).sum() / base.norm() / tuned.norm())
        return (torch.sin((1 - t) * angle) * base + torch.sin(t * angle) * tuned) / torch.sin(angle)

    assert_close(read_model(out), by_hand(states, STACK["gpt2"], slices, slerp), 1e-5)


def test_slices_may_merge_different_numbers_of_models(tmp_path: Path) -> None:
    states = family(tmp_path, "gpt2")
    slices = [[("C", 2, 4), ("B", 1, 3)], [("A", 0, 2)], [("B", 0, 3), ("C", 1, 4), ("A", 0, 3)]]
    parts = [{"models": [entry(*part, weight=1.0 + k) for k, part in enumerate(one)]} for one in slices]
    out = merge(tmp_path, {"method": "weighted-average", "slices": parts})

    def average(sources: list[Tensor], place: Place, name: str) -> Tensor:
        weighted = [(1.0 + k) * source for k, source in enumerate(sources)]
        return sum(weighted[1:], weighted[0]) / sum(1.0 + k for k in range(len(sources)))

    assert_close(read_model(out), by_hand(states, STACK["gpt2"], slices, average))


def part(*models: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"models": list(models), **more}


A2 = part(entry("A", 0, 2))
TIES = {"method": "ties", "base": "./B"}
WRONG: dict[str, dict[str, Any]] = {
    "unequal lengths": {"method": "weighted-average", "slices": [part(entry("A", 0, 2), entry("B", 0, 3))]},
    "one threshold, unequal numbers of models": TIES | {"slices": [A2, part(*[entry("A", 0, 1)] * 2)]},
    "layers of no base": {"slices": [A2 | {"base": [0, 2]}]},
    "curvature": {"method": "fisher-averaging", "slices": [A2]},
    "an adapter": {"slices": [A2], "output": {"format": "adapter"}},
    "another width": {"slices": [A2, part(entry("W", 0, 2))]},
    "several stacks": {"slices": [part(entry("T", 0, 2))]},
}


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llamas")
    family(folder, "llama-untied", {"A": 3, "B": 3})
    save(make("llama-untied", hidden_size=32), folder / "W")
    save(make("t5"), folder / "T")
    return folder


@pytest.mark.parametrize("case", WRONG)
def test_invalid_slices_are_refused_and_nothing_is_written(llamas: Path, case: str) -> None:
    with pytest.raises(InputError):
        merge(llamas, {"method": "passthrough", **WRONG[case]})
    assert not (llamas / "out").exists()
