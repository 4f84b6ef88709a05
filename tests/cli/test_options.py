"""Options that commands share are what the functions behind them take."""

from __future__ import annotations

import inspect
from dataclasses import asdict

import pytest
import typer

import gradmerge as gm
from gradmerge.cli.app import app
from gradmerge.cli.merge import MergeOptions
from gradmerge.cli.options import LoadingOptions
from gradmerge.tasks.loading import DEFAULTS

COMMANDS = (["evaluate"], ["diagnose"], ["preview"], ["curvature", "estimate"])


def test_options_of_loading_are_those_of_python_with_the_same_defaults() -> None:
    assert asdict(LoadingOptions()) == DEFAULTS
    assert LoadingOptions(columns="text=review,label=stars").as_keywords() == {
        **DEFAULTS,
        "columns": {"text": "review", "label": "stars"},
    }


def test_options_of_merge_are_those_of_python_with_the_same_defaults() -> None:
    parameters = inspect.signature(gm.merge).parameters
    others = {"recipe", "out", "device", "allow_code", "progress", "block"}
    defaults = {name: parameter.default for name, parameter in parameters.items() if name not in others}
    assert MergeOptions().as_keywords() == defaults


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_that_load_data_have_all_of_them_in_the_same_order(words: list[str]) -> None:
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]
    shown = [parameter.name for parameter in command.params]
    first = shown.index("task")
    assert shown[first : first + len(DEFAULTS)] == list(DEFAULTS)
