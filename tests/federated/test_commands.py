"""`gradmerge federated`: what is wrong is said before anything is started or sent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradmerge.cli.app import app

from .making import write_place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("commands"))


def run(*arguments: str | Path | float, status: int) -> str:
    result: Any = CliRunner().invoke(app, ["federated", *map(str, arguments)])
    assert result.exit_code == status and "Traceback" not in result.output, result.output
    return str(result.output)


def test_a_client_whose_data_or_options_are_wrong_does_not_connect(place: Path, tmp_path: Path) -> None:
    client = ["join", "localhost:1", "--insecure", "--name", "a", "--model", place / "merged", "--device", "cpu"]
    assert "missing.jsonl" in run(*client, "--data", tmp_path / "missing.jsonl", status=2)
    assert "give the budget too" in run(*client, "--data", place / "a.jsonl", "--noise", 4, status=2)
    assert "did you mean" in run(*client, "--data", place / "a.jsonl", "--columns", "texts=text", status=2)
    lonely = run(*client, "--data", place / "a.jsonl", "--wait", 0.1, status=1)
    assert "localhost:1: no server answers there" in lonely


def test_a_server_is_told_how_it_should_be_started(place: Path, tmp_path: Path) -> None:
    server = ["serve", place / "merged", "-o", tmp_path / "out"]
    assert "--certificate, --key and --authority" in run(*server, status=2)
    assert "known are stop and continue" in run(*server, "--insecure", "--on-failure", "go", status=2)
    assert not list(tmp_path.iterdir())


def test_without_the_extra_the_line_to_install_it_is_said(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    told = run("serve", place / "merged", "--insecure", "-o", tmp_path / "out", status=2)
    assert "pip install 'gradmerge[federated]'" in told
    client = ["join", "localhost:1", "--insecure", "--name", "a", "--model", place / "merged", "--device", "cpu"]
    assert "pip install 'gradmerge[federated]'" in run(*client, "--data", place / "a.jsonl", status=2)


def test_the_app_for_flower_is_written_once(tmp_path: Path) -> None:
    assert "written" in run("app", tmp_path / "app", status=0)
    assert "is there already" in run("app", tmp_path / "app", status=2)
