"""Options that commands share are what the functions behind them take."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import gradmerge as gm
from gradmerge.cli.options import api_options
from gradmerge.cli.output import with_options
from gradmerge.load_options import DEFAULTS

from ..making import run


def test_options_of_loading_are_those_of_python_with_the_same_defaults() -> None:
    options = api_options(gm.evaluate)
    assert {name: options[name].default for name in DEFAULTS} == DEFAULTS
    assert {name for name in api_options(gm.evaluate, loading=["limit"]) if name in DEFAULTS} == {"limit"}


def test_options_of_merge_are_those_of_python_with_the_same_defaults() -> None:
    parameters = inspect.signature(gm.merge).parameters
    for name, option in api_options(gm.merge, ()).items():
        default = parameters[name].default
        assert option.default == (list(default) if isinstance(default, tuple) else default)
    assert parameters.keys() - api_options(gm.merge, ()).keys() == {"recipe", "out", "progress", "block"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("x: exists already. Pass force=True to replace it", "x: exists already. Pass --force to replace it"),
        ("allow_code: is needed", "--allow-code: is needed"),
        ("rank=8 is too large", "--rank 8 is too large"),
        ("out of memory", "out of memory"),
        ("threads 0: must be 1", "--threads 0: must be 1"),
        ("./allow_code.yml: threads are many", "./allow_code.yml: threads are many"),
    ],
)
def test_messages_of_the_library_name_options(message: str, expected: str) -> None:
    assert with_options(message, ["force", "allow_code", "rank", "threads", "out"]) == expected


def test_a_folder_with_the_name_of_an_argument_is_not_called_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("calibrate", "merged", "--data", "a=a.jsonl", "-o", "out", status=2)
    assert "merged" in result.output
    assert "--merged" not in result.output
