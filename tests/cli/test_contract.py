"""What every command promises: help with an example, and status 2 with one message for a wrong request."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gradmerge.cli.app import app

from .test_help import COMMANDS, WITH_EXAMPLES

HEAVY = {"torch", "numpy", "transformers", "huggingface_hub", "pyarrow", "PIL", "datasets", "sklearn"}


def words(path: str) -> list[str]:
    return path.split()[1:]


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from gradmerge.cli.app import app; from typer.testing import CliRunner\n"
        f"for words in {[words(path) for path in COMMANDS]}:\n"
        "    assert CliRunner().invoke(app, [*words, '--help']).exit_code == 0, words\n"
        f"assert not {HEAVY} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_every_command_has_an_example_and_the_common_options(path: str) -> None:
    text = CliRunner().invoke(app, [*words(path), "--help"]).stdout
    assert "Example" in text and all(option in text for option in ("--json", "--quiet", "--debug"))


@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_an_unknown_option_is_status_2_for_people_and_for_machines(path: str) -> None:
    for_people = CliRunner().invoke(app, [*words(path), "--nonsense"])
    assert (for_people.exit_code, for_people.stdout) == (2, "")
    assert "--nonsense" in for_people.stderr and "Traceback" not in for_people.stderr
    for_machines = CliRunner().invoke(app, [*words(path), "--nonsense", "--json"])
    error = json.loads(for_machines.stdout)
    assert for_machines.exit_code == error["status"] == 2 and "--nonsense" in error["error"]
