"""The running average that a resumed run goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradmerge.errors import InputError
from gradmerge.training.running_average import RunningAverage

SHAPES = {"w": torch.Size([2])}
CPU = torch.device("cpu")


def saved(folder: Path) -> Path:
    average = RunningAverage(0.5)
    average.add({"w": torch.tensor([2.0, 4.0])}, 2, keep=True)
    average.save(folder / "online.safetensors", 7)
    return folder / "online.safetensors"


def test_means_have_weights_that_add_up_to_1() -> None:
    average = RunningAverage(0.5)
    average.add({"w": torch.tensor([2.0, 4.0])}, 2, keep=True)
    average.add({"w": torch.tensor([9.0, 9.0])}, 3, keep=True)
    average.add({"w": torch.tensor([9.0, 9.0])}, 3, keep=False)
    assert (average.steps, average.examples) == (3, 8)
    average.steps = 2
    assert torch.allclose(dict(average.means())["w"], torch.tensor([1 / 3 * 1 + 2 / 3 * 3, 1 / 3 * 2 + 2 / 3 * 3]))


def test_it_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    average = RunningAverage(0.5)
    average.load(saved(tmp_path), 7, SHAPES, CPU)
    assert (average.steps, average.examples) == (1, 2)
    assert torch.equal(dict(average.means())["w"], torch.tensor([1.0, 2.0]))


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path, average = saved(tmp_path), RunningAverage(0.5)
    with pytest.raises(InputError, match="step"):
        average.load(path, 8, SHAPES, CPU)
    with pytest.raises(InputError, match="w"):
        average.load(path, 7, {"w": torch.Size([3])}, CPU)
    with pytest.raises(InputError, match="decay"):
        RunningAverage(0.9).load(path, 7, SHAPES, CPU)
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(InputError, match="of another format"):
        average.load(path, 7, SHAPES, CPU)
    path.write_bytes(b"no tensors")
    with pytest.raises(InputError, match="online"):
        average.load(path, 7, SHAPES, CPU)
    assert average.steps == 0
