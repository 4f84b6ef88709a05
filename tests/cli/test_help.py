"""Help: laid out for every width, with examples that can be copied; and what the shell offers on the tab key."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from docs.pages import contexts

from gradmerge.cli.app import app
from gradmerge.cli.completion import WORDS, method_names, words_of
from gradmerge.cli.estimate import EstimateOptions
from gradmerge.cli.help import BETWEEN, command_lines
from gradmerge.cli.options import LoadingOptions, Precision
from gradmerge.rules import METHODS

GROUP = typer.main.get_command(app)
COMMANDS = {context.command_path: context.command for context in contexts(GROUP, "gradmerge")}
WITH_EXAMPLES = [name for name, command in COMMANDS.items() if not hasattr(command, "commands")]


def helped(path: str, columns: int) -> str:
    """The help of a command on a terminal of so many columns."""
    command = COMMANDS[path]
    settings: dict[str, Any] = command.context_settings | {"terminal_width": columns - 2, "max_content_width": 110}
    return command.context_class(command, info_name=path, **settings).get_help()


def examples_of(text: str) -> list[str]:
    """The commands below `Examples:`, each with its continued lines, as a shell reads them."""
    shown = re.split(r"^Examples?:\n", text, flags=re.MULTILINE)[1]
    return [line.strip() for line in shown.replace("\\\n", "").splitlines() if line.strip()]


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_examples_are_whole_commands_at_every_width(path: str, columns: int) -> None:
    text = helped(path, columns)
    said = COMMANDS[path].epilog.partition(": ")[2].split(BETWEEN)
    assert [shlex.split(one) for one in examples_of(text)] == [shlex.split(one) for one in said]
    shown = re.split(r"^Examples?:\n", text, flags=re.MULTILINE)[1]
    assert max(map(len, shown.splitlines())) <= columns
    assert re.findall(r" -\S+ \\\n +[^-\s]", shown) == []  # an option, and its value on the next line


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("path", COMMANDS)
def test_no_option_or_name_is_cut_at_a_hyphen(path: str, columns: int) -> None:
    text = helped(path, columns)
    assert re.findall(r"\w-$", text, re.MULTILINE) == []
    assert "\u2011" not in text
    assert max(map(len, text.splitlines())) <= columns


def test_every_command_has_an_example_and_a_short_line_of_its_own() -> None:
    for path in WITH_EXAMPLES:
        assert re.match(r"Examples?: gradmerge |Examples?: \w", COMMANDS[path].epilog), path
        assert all(f"{path} " in f"{one} " for one in COMMANDS[path].epilog.partition(": ")[2].split(BETWEEN)), path
    assert "..." not in helped("gradmerge", 80).partition("Commands:")[2]


def test_a_line_is_broken_between_options_and_never_within_one() -> None:
    shown = command_lines("gradmerge x --data 'a b.jsonl' --out ./a-long/path-of-mine", 24, "  ")
    assert shown == "  gradmerge x \\\n      --data 'a b.jsonl' \\\n      --out ./a-long/path-of-mine\n"


def test_methods_that_are_offered_are_those_there_are() -> None:
    assert sorted(method_names("")) == sorted(METHODS)
    assert method_names("gradient") == ["gradient-matching"]
    assert method_names("ties,task") == ["ties,task-arithmetic"]


def test_words_that_are_offered_are_those_that_help_names() -> None:
    for option, annotation in (
        *((name, inspect.get_annotations(LoadingOptions, eval_str=True)[name]) for name in ("task", "dtype")),
        *((name, inspect.get_annotations(EstimateOptions, eval_str=True)[name]) for name in ("kind", "likelihood")),
        ("precision", Precision),
    ):
        told = get_args(annotation)[1].help
        assert all(word in told for word in WORDS[option].split())
    assert words_of("task")("c") == ["classify", "causal-lm"]


@pytest.fixture(scope="module")
def shell_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a `gradmerge` on the PATH that fails where torch is imported."""
    home = tmp_path_factory.mktemp("home")
    (home / "bin").mkdir()
    script = home / "bin" / "gradmerge"
    forbid = "import sys; sys.modules['torch'] = None; from gradmerge.cli import main; main()"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{forbid}" "$@"\n')
    script.chmod(0o755)
    return home


def in_bash(home: Path, script: str, **variables: str) -> str:
    environment = os.environ | {"HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", **variables}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, cwd=home, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_completion_installs_itself_and_works_in_bash(shell_home: Path) -> None:
    told = in_bash(shell_home, "gradmerge --install-completion; true")  # bash, which the program finds above itself
    assert "bash completion installed" in told
    ask = "COMP_WORDS=(gradmerge {}); COMP_CWORD={}; _gradmerge_completion gradmerge; echo ${{COMPREPLY[*]}}"
    asked = "; ".join(ask.format(*one) for one in (("cur", 1), ("merge --method gradient", 3), ("merge rec", 2)))
    commands, methods, files = in_bash(shell_home, f"source ~/.bashrc; {asked}").splitlines()
    assert (commands, methods, files) == ("curvature", "gradient-matching", "")  # bash completes files by itself


@pytest.mark.parametrize(("shell", "end"), [("zsh", "gradient-matching"), ("fish", "gradient-matching")])
def test_zsh_and_fish_are_answered_as_they_ask(shell_home: Path, shell: str, end: str) -> None:
    variables = {"_TYPER_COMPLETE_ARGS": "gradmerge preview r.yml --methods ties,gr"}
    variables |= {"_GRADMERGE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert f"ties,{end}" in in_bash(shell_home, "gradmerge", **variables)
