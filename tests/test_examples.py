"""The examples run, and leave models with curvature and a table of numbers."""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import logging

import gradmerge as gm

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[str, Path], str]]:
    """Runs an example as `python SCRIPT --quick -o OUT` does, without the seconds that imports take."""
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()

    def run(script: str, out: Path) -> str:
        monkeypatch.setattr(sys, "argv", [script, "--quick", "-o", str(out)])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        return capsys.readouterr().out

    yield run
    logging.set_verbosity(before[0])
    if before[1]:
        logging.enable_progress_bar()


def table_of(printed: str) -> dict[str, list[float]]:
    """The rows of the table that a quick run prints."""
    head, *lines = printed.splitlines()
    assert head.startswith(("accuracy, %", "perplexity"))
    columns = len(head[18:].replace("0 to 4", "low").replace("5 to 9", "high").split())
    rows = {line[:18].strip(): [float(word) for word in line[18:].split()] for line in lines}
    assert all(len(values) == columns and all(map(math.isfinite, values)) for values in rows.values())
    return rows


@pytest.mark.parametrize(
    ("script", "base", "tuned"),
    [
        ("images.py", "base", ["low", "high"]),
        ("sequence_classification.py", "stdlib", ["torch", "transformers"]),
        ("causal_lm_lora.py", "base", ["strings", "debugger"]),
    ],
)
def test_an_example_trains_merges_and_compares(
    tmp_path: Path, quick: Callable[[str, Path], str], script: str, base: str, tuned: list[str]
) -> None:
    rows = table_of(quick(script, tmp_path))
    assert {*tuned, "task-arithmetic", "gradient-matching"} <= rows.keys()
    prior = gm.Curvature.load(tmp_path / base / "curvature")
    for name in tuned:
        found = gm.Curvature.load(tmp_path / name / "curvature")
        assert found.keys() == prior.keys()
        assert sum(float(value.sum()) for value in found.values()) > 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("task-arithmetic", "gradient-matching"))
    assert one.keys() == two.keys()
    assert any(not torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Runs a script of `examples/training/` as the page shows it, in an empty folder; what it defined comes back."""
    monkeypatch.chdir(tmp_path)
    return lambda name: runpy.run_path(str(EXAMPLES / "training" / name), run_name="__main__")


def test_the_script_with_prior_trainer_ends_with_a_merge_that_knows_both_tasks(
    ran: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    ran("prior_trainer.py")
    words = [line.split() for line in capsys.readouterr().out.splitlines() if " food " in line]
    found = {name: (float(food), float(films)) for name, _, food, _, films in words}
    assert found["food"][0] > 0.9 and found["films"][1] > 0.9
    assert min(found["merged"]) > max(0.75, min(found["food"]), min(found["films"]))


@pytest.mark.parametrize("name", ["any_trainer", "plain_loop"])
def test_scripts_without_prior_trainer_leave_curvature_and_the_penalty(
    ran: Callable[[str], dict[str, Any]], name: str
) -> None:
    out = ran(f"{name}.py")["out"]
    tuned, base = (load_file(out / folder / "model.safetensors") for folder in ("tuned", "base"))
    assert any(not torch.equal(tuned[key], base[key]) for key in base)
    assert gm.Curvature.load(out / "tuned" / "curvature").keys() == gm.Curvature.load(out / "base" / "curvature").keys()
    assert (out / "tuned" / "gradmerge_penalty.json").is_file()
    gm.merge({"method": "gradient-matching", "base": str(out / "base"), "models": [str(out / "tuned")]}, out / "merged")
    h0, h, p = (gm.Curvature.load(out / f) for f in ("base/curvature", "tuned/curvature", "tuned/penalty"))
    for key, found in load_file(out / "merged" / "model.safetensors").items():
        ratio = (p[key].double() + h[key]) / (h0[key].double() + h[key] + 1e-10)
        torch.testing.assert_close(found, (base[key] + ratio * (tuned[key] - base[key])).float(), rtol=1e-4, atol=1e-5)
    assert any(bool((p[key] != h0[key]).any()) for key in base)


def test_the_script_with_adapters_ends_with_a_merge_that_is_better_on_both(
    ran: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    ran("adapters.py")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if " loss " in line]
    loss = {(name, task): float(value) for name, _, task, _, value, *_ in lines}
    assert all(loss["merged", task] < loss["base", task] for task in ("twos:", "threes:"))
    found = gm.Curvature.load(Path("example-adapters/twos/curvature"))
    assert found.keys() == load_file("example-adapters/base/model.safetensors").keys() and found.examples == 100
