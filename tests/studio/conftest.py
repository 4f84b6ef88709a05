"""A page that the command line serves, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..report.conftest import chromium as chromium, tab as tab
from .making import HOSTILE, tiny_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of the server."""
    place = tmp_path_factory.mktemp("studio")
    tiny_recipe(place, "yelp", HOSTILE)
    return place


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("gradio", reason="needs Gradio: pip install 'gradmerge[studio]'")
    command = [sys.executable, "-m", "gradmerge", "studio", "recipe.yml", "--port", "0", "--quiet"]
    command += ["--data", "base=base.jsonl", "--data", "yelp=yelp.jsonl"]
    temporary = tmp_path_factory.mktemp("temporary")
    inside = {**os.environ, "TMPDIR": str(temporary)}
    server = subprocess.Popen(
        command, cwd=folder, env=inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.send_signal(signal.SIGTERM)
    _, complaints = server.communicate(timeout=60)
    assert (server.returncode, complaints) == (0, "")
    assert list(temporary.glob("gradmerge-studio-*")) == []
    assert not (folder / ".gradio").exists()
