"""`gradmerge demo`: what it refuses. A whole run of it is in tests/demo."""

from __future__ import annotations

import subprocess
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
