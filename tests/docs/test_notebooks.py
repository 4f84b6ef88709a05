"""The notebooks run from top to bottom, and what they show is so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from docs.pages import DOCS, NOTEBOOKS
from huggingface_hub import constants

from ..groups import launch

nbformat = pytest.importorskip("nbformat")


def ran(name: str, wanted: str, folder: Path) -> Any:
    """The value of a variable once all cells of a notebook have run, in a process that has imported most already."""
    book = nbformat.read(NOTEBOOKS[name], as_version=4)
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell

    def run(_: int) -> Any:
        os.chdir(folder)
        os.environ["IPYTHONDIR"] = str(folder)  # else its history goes to the user's
        constants.HF_HUB_OFFLINE = True
        session = shell.instance()
        for cell in book.cells:
            if cell.cell_type == "code":
                session.run_cell(cell.source).raise_error()
        return session.user_ns[wanted]

    (ended,) = launch(1, run, folder / "said", timeout=300)
    assert ended.status == 0, ended.said
    return ended.gave


def test_two_adapters_are_merged(tmp_path: Path) -> None:
    loss = ran("notebook-merge-adapters", "found", tmp_path)
    for task in ("twos", "threes"):
        assert loss[task][task] < 2.5 < loss["base"][task]
        for merge in ("task-arithmetic", "gradient-matching"):
            assert loss[merge][task] < loss["base"][task] - 2


def test_a_data_set_is_removed(tmp_path: Path) -> None:
    accuracy = ran("notebook-remove-a-data-set", "accuracy", tmp_path)
    (honest, bought), clean = accuracy["everything"], accuracy["clean"]
    assert bought > 0.8 and clean[1] < 0.2 and accuracy["target"][1] < 0.2
    assert clean[0] > honest + 0.05


@pytest.mark.parametrize("path", NOTEBOOKS.values(), ids=lambda path: path.stem)
def test_what_a_notebook_printed_is_kept_without_where_it_ran(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and all(output.get("name") != "stderr" and output.output_type != "error" for output in outputs)
    text = path.read_text("utf-8")
    assert not any(word in text for word in ("/tmp", "/home", "/root", "/work", "Error"))
    assert (DOCS / "notebooks" / f"{path.stem}.md").is_file()
