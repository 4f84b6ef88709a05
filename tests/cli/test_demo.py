"""`gradmerge demo`: what it refuses. A whole run of it is in tests/demo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gradmerge.cli.app import app


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def test_without_scikit_learn_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    result = invoke("-o", tmp_path / "demo")
    assert result.exit_code == 2
    assert "pip install 'gradmerge[demo]'" in result.stderr and "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    result = invoke("-o", tmp_path, "--force")
    assert result.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
