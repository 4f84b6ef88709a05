"""`gradmerge studio`: what is wrong is said before any page is served."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ..making import run, three_models, write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    three_models(tmp_path)
    return write_recipe(
        tmp_path / "recipe.yml", {"method": "task-arithmetic", "base": "./base", "models": ["./a", "./b"]}
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "--port"),
        (["--data", "a"], "--data a"),
        ([], "--data"),
    ],
)
def test_wrong_options_are_refused(recipe: Path, options: list[str], message: str) -> None:
    assert message in run("studio", recipe, *options, status=2).stderr


def test_without_gradio_the_line_that_installs_it_is_said(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gradio" else found(name))
    assert "pip install 'gradmerge[studio]'" in run("studio", recipe, "--data", "a=a.jsonl", status=2).stderr


def test_without_a_demo_the_command_that_makes_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["demo"]):
        assert "gradmerge demo -o demo" in run("studio", *arguments, status=2).stderr
    (tmp_path / "demo").mkdir()
    run("studio", "demo", status=2)
