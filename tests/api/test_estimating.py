"""Measuring from disk to disk: what is written, and how a run that was stopped goes on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import gradmerge as gm
from gradmerge.api.estimate import Estimate, estimate_curvature
from gradmerge.tasks import load_task

from ..curvature import slow
from ..curvature.slow import assert_same
from ..making import read_model
from ..tasks.making import (
    labelled,
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_t5_checkpoint,
    tiny_vit_checkpoint,
    write_jsonl,
)

EXAMPLES = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measuring")
    tiny_bert_checkpoint(folder / "bert", labels=3)
    tiny_bert_checkpoint(folder / "other", labels=3, seed=1)
    tiny_gpt2_checkpoint(folder / "gpt2")
    tiny_t5_checkpoint(folder / "t5")
    tiny_vit_checkpoint(folder / "vit")
    texts = sentences(EXAMPLES)
    write_jsonl(folder / "labels.jsonl", labelled(EXAMPLES, 3))
    write_jsonl(folder / "more.jsonl", labelled(EXAMPLES, 3, seed=5))
    write_jsonl(folder / "pairs.jsonl", [{"source": a, "target": b} for a, b in pairwise(texts)])
    generator = np.random.default_rng(0)
    for number in range(3):
        (folder / "images" / str(number)).mkdir(parents=True)
        for name in "ab":
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / str(number) / f"{name}.png")
    return folder


DATA = {"bert": "labels.jsonl", "gpt2": "labels.jsonl", "t5": "pairs.jsonl", "vit": "images"}
OUTPUT = {"bert": "classes", "gpt2": "next-token", "t5": "tokens", "vit": "classes"}


def measure(place: Path, name: str, out: Path, **options: Any) -> Estimate:
    return estimate_curvature(
        str(place / name), str(place / DATA.get(name, "labels.jsonl")), out=out, device="cpu", **options
    )


def by_hand(place: Path, name: str, likelihood: str) -> dict[str, Tensor]:
    """The slow loop over the data's rows, one by one, by the names of the checkpoint."""
    loaded = load_task(str(place / name), str(place / DATA[name]), device="cpu", dtype="float64")
    rows = [{key: value[0] for key, value in batch.items() if key != "attention_mask"} for batch in loaded.batches(1)]
    found = getattr(slow, likelihood)(loaded.model, rows, OUTPUT[name])
    stored = read_model(place / name)
    weights = dict(loaded.model.named_parameters())
    return {
        next(n for n, w in stored.items() if w.shape == v.shape and torch.equal(w, weights[own].float())): v
        for own, v in found.items()
    }


@pytest.mark.parametrize(("name", "likelihood"), [*((name, "empirical") for name in DATA), ("bert", "exact")])
def test_what_is_written_is_the_slow_loop_under_the_names_of_the_checkpoint(
    place: Path, name: str, likelihood: str, tmp_path: Path
) -> None:
    done = measure(place, name, tmp_path / "c", likelihood=likelihood, batch_size=4)
    got = gm.Curvature.load(tmp_path / "c")
    assert got.keys() == read_model(place / name).keys()
    assert_same(got, by_hand(place, name, likelihood), 1e-4)
    assert (done.examples, done.tensors) == (got.examples, len(got))
    assert done.entries == sum(v.numel() for v in got.values())
    assert (done.kind, done.device, done.resumed_from) == ("diagonal", "cpu", 0)
    assert (got.likelihood, got.model) == (likelihood, name)


def test_the_fisher_at_the_difference_is_measured_with_the_base_taken_away(place: Path, tmp_path: Path) -> None:
    done = measure(place, "bert", tmp_path / "c", at_delta=str(place / "other"))
    assert not done.notes
    tuned, base = read_model(place / "bert"), read_model(place / "other")
    loaded = load_task(str(place / "bert"), str(place / "labels.jsonl"), device="cpu", dtype="float64")
    with torch.no_grad():
        for name, value in loaded.model.named_parameters():
            value.copy_(tuned[name].double() - base[name].double())
    rows = [{k: v[0] for k, v in b.items() if k != "attention_mask"} for b in loaded.batches(1)]
    assert_same(gm.Curvature.load(tmp_path / "c"), slow.empirical(loaded.model, rows, "classes"), 1e-4)


def test_what_the_base_does_not_have_is_taken_as_it_is_and_told(place: Path, tmp_path: Path) -> None:
    tiny_bert_checkpoint(tmp_path / "base", labels=5)
    done = measure(place, "bert", tmp_path / "c", at_delta=str(tmp_path / "base"))
    assert len(done.notes) == 1 and "classifier.weight" in done.notes[0]
    tiny_gpt2_checkpoint(tmp_path / "gpt2")
    with pytest.raises(gm.InputError, match="at_delta"):
        measure(place, "bert", tmp_path / "d", at_delta=str(tmp_path / "gpt2"))
    with pytest.raises(gm.InputError, match="at_delta"):
        measure(place, "bert", tmp_path / "d", at_delta=str(tmp_path / "nothing"))
    assert not (tmp_path / "d").exists()


class Stopped(Exception):
    pass


class Clock:
    """Progress that stops a run after some batches."""

    def __init__(self, batches: int = 1 << 30) -> None:
        self.left = batches
        self.begun: list[tuple[str, int, int]] = []
        self.done = 0

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.begun.append((what, total, done))

    def advance(self, amount: int) -> None:
        self.done += amount
        self.left -= 1
        if self.left < 0:
            raise Stopped


@pytest.mark.parametrize(("name", "likelihood"), [("bert", "empirical"), ("gpt2", "sampled")])
def test_a_run_that_was_stopped_goes_on(place: Path, name: str, likelihood: str, tmp_path: Path) -> None:
    measure(place, name, tmp_path / "whole", likelihood=likelihood, batch_size=2)
    clock = Clock(2)
    with pytest.raises(Stopped):
        measure(place, name, tmp_path / "c", likelihood=likelihood, batch_size=2, save_every=0, progress=clock)
    assert not (tmp_path / "c").exists()
    clock = Clock()
    done = measure(place, name, tmp_path / "c", likelihood=likelihood, batch_size=3, resume=True, progress=clock)
    assert done.resumed_from == 4
    whole = gm.Curvature.load(tmp_path / "whole")
    assert done.examples == whole.examples
    assert clock.begun == [("estimating", whole.examples - 4, 0)]
    assert clock.done == whole.examples - 4
    assert_same(gm.Curvature.load(tmp_path / "c"), dict(whole), 1e-6)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["README.md", "curvature.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "whole"]


def test_options_that_do_not_go_together_are_refused(place: Path, tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"kind": "gram", "precision": "log8"},
        {"kind": "gram", "at_delta": "x"},
        {"likelihood": "true"},
        {"kind": "full"},
        {"max_kronecker_dim": 9},
        {"kind": "kronecker", "max_kronecker_dim": 0},
        {"precision": "int8"},
        {"batch_size": 0},
        {"likelihood": "exact"},
        {"output": "classes"},
    ]
    for options in wrong:
        with pytest.raises(gm.InputError):
            measure(place, "gpt2", tmp_path / "c", **options)
    assert not list(tmp_path.iterdir())
    module, batch = torch.nn.Linear(2, 2), (torch.ones(1, 2), torch.tensor([0]))
    for kind in ("diagonal", "kronecker", "gram"):
        assert gm.estimate_curvature(module, [batch], kind=kind).kind == kind
    for options in ({"kind": "kroneker"}, {"precision": "log8"}, {"max_kronecker_dim": 9}):
        with pytest.raises(gm.InputError):
            gm.estimate_curvature(module, [batch], **options)


@pytest.mark.parametrize("changes", [{"likelihood": "sampled"}, {"seed": 1}, {"limit": 9}, {"max_length": 7}])
def test_a_run_with_other_options_does_not_resume(place: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(Stopped):
        measure(place, "bert", tmp_path / "c", batch_size=2, save_every=0, progress=Clock(2))
    with pytest.raises(gm.InputError):
        measure(place, "bert", tmp_path / "c", resume=True, **changes)
    assert measure(place, "bert", tmp_path / "c", resume=True).resumed_from == 4
