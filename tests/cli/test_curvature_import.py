"""`gradmerge curvature import` as a user runs it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm

from ..checkpoints.families import save
from ..curvature.training import Run, fresh, train
from ..making import read_model, run, write_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("trained"), "vit")


#: N and B of the training run.
NUMBERS = ("--dataset-size", "10", "--batch-size", "4")


@pytest.fixture
def checkpoint(trained: Run, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(trained.checkpoint, tmp_path / "checkpoint-6"))


def test_an_imported_curvature_merges_by_gradient_matching(trained: Run, tmp_path: Path) -> None:
    base = save(fresh("vit"), tmp_path / "base")
    run("curvature", "import", trained.checkpoint, "-o", tmp_path / "c", *NUMBERS)
    curvature = gm.Curvature.load(tmp_path / "c")
    recipe = {
        "method": "gradient-matching",
        "base": {"model": "base", "curvature": {"identity": 0.5}},
        "models": [{"model": str(trained.checkpoint), "curvature": "c", "weight": 0.7}],
    }
    run("merge", write_recipe(tmp_path / "r.yml", recipe), "-o", tmp_path / "out")
    got, old, new = read_model(tmp_path / "out"), read_model(base), trained.weights
    for name, theta in old.items():
        h = curvature[name].double()
        want = theta + 0.7 * (0.5 + h) / (0.5 + 0.7 * h) * (new[name] - theta)
        assert torch.allclose(got[name].double(), want, atol=1e-6), name


def cut(folder: Path) -> None:
    path = folder / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:2000])


def not_finite(folder: Path) -> None:
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    state["state"][3]["exp_avg_sq"].reshape(-1)[0] = float("nan")
    torch.save(state, folder / "optimizer.pt")


def three_groups(folder: Path) -> None:
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    state["param_groups"].append({**state["param_groups"][0], "params": []})
    torch.save(state, folder / "optimizer.pt")


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


BAD: dict[str, Callable[[Path], Any]] = {
    "no optimizer": lambda folder: (folder / "optimizer.pt").unlink(),
    "a damaged optimizer": cut,
    "another model": config(hidden_size=8),
    "a larger model": config(num_hidden_layers=3),
    "an adapter": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "a class that is no model": config(architectures=["Trainer"]),
    "attention from the Hub": config(_attn_implementation="org/repo"),
    "values that are not finite": not_finite,
    "three groups without names": three_groups,
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_message_and_leaves_nothing(case: str, checkpoint: Path, tmp_path: Path) -> None:
    BAD[case](checkpoint)
    before = sorted(tmp_path.iterdir())
    done = run("curvature", "import", checkpoint, *NUMBERS, "-o", tmp_path / "c", status=2)
    assert done.stderr.lower().count("error:") <= 1 and "Traceback" not in done.output
    assert sorted(tmp_path.iterdir()) == before


def test_both_numbers_are_required(checkpoint: Path, tmp_path: Path) -> None:
    for given in (NUMBERS[:2], NUMBERS[2:]):
        run("curvature", "import", checkpoint, *given, "-o", tmp_path / "c", status=2)
    assert not (tmp_path / "c").exists()
