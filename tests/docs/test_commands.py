"""The pages run: every console and Python block, from top to bottom, on the small models of examples/make_models.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from docs.pages import DOCS

from ..forked import forked
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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    done = forked(code=(ROOT / MAKE_MODELS).read_text("utf-8"), cwd=folder)
    assert done.returncode == 0, done.stderr
    write_hub_models(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "your-mergekit-recipe.yml").write_text(
        "merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: yelp}, {model: sst2}]\n"
    )
    return folder


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    if command.startswith("gradmerge ") and not re.search(r"[|<>&;$]", command):
        arguments = subprocess.run(
            ["bash", "-c", f'printf "%s\\0" {command}'], capture_output=True, text=True, check=True, cwd=folder
        ).stdout.split("\0")[1:-1]
        return forked(*arguments, cwd=folder)
    if found := re.fullmatch(r"python (\S+\.py)", command):
        return forked(code=(folder / found[1]).read_text("utf-8"), cwd=folder)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: Path, models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(models, folder, symlinks=True)
    for language, title, text in blocks_of(page):
        if title:
            (folder / title).write_text(text, "utf-8")
        elif language == "python":
            done = forked(code=text, cwd=folder)
            assert done.returncode == 0, f"{text}\n{done.stderr}"
        for command, output in commands_of(text) if language == "console" else ():
            if MAKE_MODELS in command:
                continue  # the fixture ran it
            done = run(command, folder)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            said = done.stdout + done.stderr
            for line in output:
                assert same(line).search(said), f"{command}\nno line like: {line}\n{said}"
