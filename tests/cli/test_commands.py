"""The commands as a user runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import gradmerge as gm
from gradmerge.cli.output import typed

from ..making import random_curvature, read_model, run, three_models, write_recipe


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path, Path]:
    folders, _ = three_models(tmp_path, curvature=True)
    return tuple(folders)  # type: ignore[return-value]


def test_options_make_the_same_merge_as_a_recipe(models: tuple[Path, ...], tmp_path: Path) -> None:
    base, a, b = models
    models_given = ["--base", base, "--model", f"{a}=0.5", "--model", b]
    settings = ["--set", "density=0.4", "--set", "options.scale=0.7", "--set", "output.dtype=float64"]
    run("merge", "--method", "ties", *models_given, *settings, "-o", tmp_path / "one")
    recipe = {
        "method": "ties",
        "base": "base",
        "models": [{"model": "a", "weight": 0.5}, "b"],
        "options": {"density": 0.4, "scale": 0.7},
        "output": {"dtype": "float64"},
    }
    run("merge", write_recipe(tmp_path / "r.yml", recipe), "-o", tmp_path / "two")
    one, two = (tmp_path / n / "model.safetensors" for n in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_recipe_can_be_changed_from_the_command_line(models: tuple[Path, ...], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "r.yml", {"method": "ties", "base": "base", "models": ["a", "b"]})
    settings = ["--set", "models[1].weight=0", "--set", "exclude=['embed*']"]
    run("merge", recipe, "--method", "task-arithmetic", *settings, "-o", tmp_path / "out")
    got, tuned, base = read_model(tmp_path / "out"), read_model(models[1]), read_model(models[0])
    assert torch.allclose(got["layers.0.linear.weight"], tuned["layers.0.linear.weight"], atol=1e-6)
    assert torch.equal(got["embed.weight"], base["embed.weight"])


@pytest.mark.parametrize("form", ["named", "plain", "models only"])
def test_curvature_can_be_given_by_name_or_in_order(models: tuple[Path, ...], tmp_path: Path, form: str) -> None:
    base, a, b = models
    states = [read_model(m) for m in models]
    for number, state in enumerate(states):
        random_curvature(20 + number, state).save(tmp_path / f"c{number}")
    c0, c1, c2 = (tmp_path / f"c{n}" for n in range(3))
    words = {
        "named": ["--curvature", f"{b}={c2}", "--curvature", f"base={c0}", "--curvature", f"{a}={c1}"],
        "plain": ["--curvature", c0, "--curvature", c1, "--curvature", c2],
        "models only": ["--curvature", c1, "--curvature", c2, "--curvature", f"base={c0}"],
    }[form]
    run("merge", "-m", "gradient-matching", "--base", base, "--model", a, "--model", b, *words, "-o", tmp_path / "out")
    curvature = [gm.Curvature.load(c) for c in (c0, c1, c2)]
    want = gm.merge_state_dicts(states[0], states[1:], prior=curvature[0], curvature=curvature[1:])
    assert all(torch.equal(v, want[n]) for n, v in read_model(tmp_path / "out").items())


def test_a_path_with_an_equals_sign_is_a_path(models: tuple[Path, ...], tmp_path: Path) -> None:
    base, a, _ = models
    odd = tmp_path / "lr=3"
    a.rename(odd)
    run("merge", "-m", "task-arithmetic", "--base", base, "--model", odd, "-o", tmp_path / "one")
    run("merge", "-m", "task-arithmetic", "--base", base, "--model", f"{odd}=1", "-o", tmp_path / "two")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def test_what_was_typed_is_shown_without_the_secrets_of_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://me:word@host/r.yml?sig=abc&versionId=1"
    monkeypatch.setattr(sys, "argv", ["gradmerge", "preview", url, "-d", "a=s3://key:secret@bucket/x.jsonl"])
    assert typed() == "gradmerge preview 'https://host/r.yml' -d a=s3://bucket/x.jsonl"
