"""Help, and what the shell completes."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from docs.pages import contexts

from gradmerge.cli.app import app
from gradmerge.cli.options import method_names
from gradmerge.rules import METHODS

GROUP = typer.main.get_command(app)
COMMANDS = {context.command_path: context.command for context in contexts(GROUP, "gradmerge")}
WITH_EXAMPLES = [name for name, command in COMMANDS.items() if not hasattr(command, "commands")]


def help_of(path: str, columns: int) -> str:
    command = COMMANDS[path]
    settings: dict[str, Any] = command.context_settings | {"terminal_width": columns - 2, "max_content_width": 110}
    return command.context_class(command, info_name=path, **settings).get_help()


@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_every_example_is_one_line_at_every_width(path: str) -> None:
    text = help_of(path, 60)
    examples = text.partition("\n  Example")[2].splitlines()[1:]
    assert examples and all(f"{path} " in f"{line} " for line in examples)
    assert "\\[" not in text


def test_help_lists_every_command_once_by_step_and_options_stay_few() -> None:
    text = help_of("gradmerge", 120)
    listed = [line.split()[0] for line in text.partition("\nMerge:")[2].splitlines() if line.startswith("  ")]
    assert sorted(listed[:-1]) == sorted(GROUP.commands)  # type: ignore[attr-defined]
    options = [[o for o in command.params if o.param_type_name == "option"] for command in COMMANDS.values()]
    assert sum(map(len, options)) <= 240 and max(map(len, options)) <= 26


def test_methods_that_are_completed_are_the_existing_ones() -> None:
    assert sorted(method_names("")) == sorted(METHODS)
    assert method_names("gradient") == ["gradient-matching"]
    assert method_names("ties,task") == ["ties,task-arithmetic"]
