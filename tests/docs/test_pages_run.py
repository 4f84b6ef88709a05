"""The pages run: every console and Python block, from top to bottom, on the small models of examples/make_models.py.

Each command is a process that is forked from this one, which has imported all that is slow to import.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers
from docs.pages import DOCS

import gradmerge
from gradmerge.cli import script

from .small_models import write_hub_models

ROOT = DOCS.parent
MAKE_MODELS = "examples/make_models.py"


class Block(NamedTuple):
    language: str
    title: str
    """The name of the file that the block shows, or nothing."""
    text: str


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page that are commands, programs and files, without generated ones."""
    text = re.sub(r"<!-- generated:.*?<!-- end of generated -->", "", page.read_text("utf-8"), flags=re.DOTALL)
    found = re.findall(r'^```(console|python|yaml|json)(?: title="([^"]+)")?\n(.*?)^```$', text, re.M | re.S)
    return [Block(*block) for block in found if block[0] in ("console", "python") or block[1]]


PAGES = [page for page in sorted([ROOT / "README.md", *DOCS.rglob("*.md")]) if blocks_of(page)]


def commands_of(block: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the output that is shown below it."""
    commands: list[tuple[str, list[str]]] = []
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            commands.append((re.sub(r"\s+#\s.*$", "", line[2:]).strip(), []))
        elif line.strip():
            commands[-1][1].append(line)
    return commands


def same(line: str) -> re.Pattern[str]:
    """What an output line must match: numbers and columns may differ, and ``…`` is any text."""
    parts = [re.escape(part) for part in re.split(r"([-+]?\d[\d.,]*(?:e[-+]?\d+)?|\s+|…)", line)[::2]]
    separators = re.findall(r"([-+]?\d[\d.,]*(?:e[-+]?\d+)?|\s+|…)", line)
    known = {"…": ".*"}
    words = [known.get(one, r"\s+" if one.isspace() else r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?") for one in separators]
    return re.compile("".join(part + word for part, word in zip(parts, [*words, ""], strict=True)))


class Ended(NamedTuple):
    status: int
    said: str
    """What it wrote to standard output and error."""


def forked(program: Callable[[], object], folder: Path) -> Ended:
    """Call a function in a process of its own, in a folder."""
    output = folder.parent / "output.txt"
    pid = os.fork()
    if pid == 0:
        status = 0
        try:
            os.chdir(folder)
            sys.argv = ["block.py"]
            file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", encoding="utf-8", closefd=False)
            program()
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            sys.stdout.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Ended(status, output.read_text("utf-8"))


def run_code(code: str, folder: Path) -> Ended:
    return forked(lambda: exec(compile(code, "block.py", "exec"), {"__name__": "__main__"}), folder)


def run_command(command: str, folder: Path) -> Ended:
    if command.startswith("gradmerge ") and not re.search(r"[|<>&;$]", command):
        words = f'printf "%s\\0" {command}'
        arguments = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True, cwd=folder).stdout

        def run() -> None:
            sys.argv = arguments.split("\0")[:-1]
            script()

        return forked(run, folder)
    if found := re.fullmatch(r"python (\S+\.py)", command):
        return run_code((folder / found[1]).read_text("utf-8"), folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    return Ended(done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for slow in (transformers.BertForSequenceClassification, transformers.AutoTokenizer, gradmerge.preview):
        assert slow  # imported before processes are forked
    folder = tmp_path_factory.mktemp("models") / "here"
    folder.mkdir()
    done = run_code((ROOT / MAKE_MODELS).read_text("utf-8"), folder)
    assert done.status == 0, done.said
    write_hub_models(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    recipe = "merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: yelp}, {model: sst2}]\n"
    (folder / "your-mergekit-recipe.yml").write_text(recipe)
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: Path, models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(models, folder, symlinks=True)
    for language, title, text in blocks_of(page):
        if title:
            (folder / title).write_text(text, "utf-8")
        elif language == "python":
            done = run_code(text, folder)
            assert done.status == 0, f"{text}\n{done.said}"
        for command, output in commands_of(text) if language == "console" else ():
            if MAKE_MODELS in command:
                continue  # the fixture ran it
            done = run_command(command, folder)
            assert done.status == 0, f"{command}\n{done.said}"
            for line in output:
                assert same(line).search(done.said), f"{command}\nno line like: {line}\n{done.said}"
