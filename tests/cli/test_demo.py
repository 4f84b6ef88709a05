"""`gradmerge demo` as a user runs it, at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gradmerge.cli.app import app
from tests.demo.making import tiny


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradmerge.demo.Settings", tiny)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "my demo"


def test_tables_reports_and_commands_are_shown(place: Path) -> None:
    result = invoke("-o", place)
    assert result.exit_code == 0, result.output
    rows = ["gradient-matching, weight 1", "task-arithmetic, tuned", "trained on all (target)", "Taking tilted out"]
    for words in (*rows, "per cent", "gradmerge diagnose recipes/", f"cd '{place}'", "0 kept"):
        assert words in result.stdout, result.stdout
    assert "models/base: " in result.stderr and "curvature/tilted: " in result.stderr
    again = invoke("-o", place, "--quiet")
    assert again.exit_code == 0 and again.stderr == ""
    assert "gradient-matching, weight 1" in again.stdout and "gradmerge diagnose" not in again.stdout
    printed = invoke("-o", place, "--json")
    facts = json.loads(printed.stdout)
    assert facts["kept"] == facts["stages"] and printed.stderr == ""
    assert {row["folder"] for row in facts["merging"]} >= {"models/base", "models/joint", "merged/gradient-matching"}
    assert all(line.startswith("gradmerge ") for several in facts["commands"].values() for line in several)


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
    assert "no folder of a demonstration" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_help_does_not_load_anything_heavy_and_has_an_example() -> None:
    code = (
        "import sys; sys.argv = ['gradmerge', 'demo', '--help']\n"
        "from gradmerge.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'transformers', 'sklearn', 'PIL'} & set(sys.modules), 'heavy import'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Examples: gradmerge demo" in " ".join(done.stdout.split())
