"""`gradmerge studio`: what is wrong is said before any page is served."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gradmerge.cli.app import app

from ..making import three_models, write_recipe


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["studio", *map(str, arguments)])


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
    result = invoke(recipe, *options)
    assert result.exit_code == 2 and message in result.stderr


def test_without_gradio_the_line_that_installs_it_is_said(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gradio" else found(name))
    result = invoke(recipe, "--data", "a=a.jsonl")
    assert result.exit_code == 2 and "pip install 'gradmerge[studio]'" in result.stderr


def test_without_a_demo_the_command_that_makes_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["demo"]):
        result = invoke(*arguments)
        assert result.exit_code == 2 and "gradmerge demo -o demo" in result.stderr
    (tmp_path / "demo").mkdir()
    assert invoke("demo").exit_code == 2
