"""No command writes over what it reads or over unfinished work of another; --resume takes nothing that has changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradmerge as gm
from gradmerge.api.estimate import estimate_curvature
from gradmerge.progress import NoProgress

from ..making import Stop, run, three_models, weight_bytes, write_recipe
from ..tasks.making import labelled, tiny_bert_checkpoint, write_jsonl


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A model, its data in a folder, and another tokenizer."""
    folder = tmp_path / "bert"
    tiny_bert_checkpoint(folder / "models" / "a")
    tiny_bert_checkpoint(folder / "tokenizer", seed=1)
    write_jsonl(folder / "data" / "rows.jsonl", labelled(7))
    return folder


def test_estimate_may_write_into_its_model(bert: Path) -> None:
    estimate_curvature(
        str(bert / "models" / "a"), str(bert / "data" / "rows.jsonl"), out=bert / "models" / "a" / "curvature"
    )
    other = bert / "models" / "a" / "other"
    other.mkdir()
    (other / "mine").touch()
    with pytest.raises(gm.InputError, match=str(other)):
        estimate_curvature(str(bert / "models" / "a"), str(bert / "data" / "rows.jsonl"), out=other, force=True)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folders, _ = three_models(tmp_path / "models", curvature=True)
    (tmp_path / "target").mkdir()
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "x.npz", x_test=np.zeros((2, 8, 8)), y_test=np.zeros(2))
    models = [f"./models/{folder.name}" for folder in folders]
    return write_recipe(
        tmp_path / "recipe.yml", {"method": "gradient-matching", "base": models[0], "models": models[1:]}
    )


def test_the_best_setting_is_not_written_over_the_data_that_chose_it(recipe: Path) -> None:
    """Also where the data lie in a folder that gradmerge wrote."""
    place = recipe.parent
    gm.merge(recipe, place / "merged")
    (place / "data" / "x.npz").rename(place / "merged" / "x.npz")
    before = contents(place)
    words = ("preview", recipe, "--data", f"a={place / 'merged' / 'x.npz'}:test", "-o", place / "report", "--force")
    run(*words, "--save-best", place / "merged", status=2)
    assert contents(place) == before


# Unfinished work of others.


def stop_after_saving(model: Path, data: str, out: Path, **options: Any) -> None:
    """A measurement that is stopped once it has saved what it had."""

    with pytest.raises(KeyboardInterrupt):
        estimate_curvature(
            str(model), data, out=out, batch_size=1, save_every=0, progress=Stop(after=3), device="cpu", **options
        )
    assert (out.with_name(out.name + ".gradmerge-partial") / "saved-sums-000000.safetensors").is_file()


# What has changed since.


@pytest.mark.parametrize("changed", ["tokenizer/tokenizer.json", "data/rows.jsonl", "models/a/model.safetensors"])
def test_a_measurement_does_not_go_on_with_changed_inputs(bert: Path, changed: str) -> None:
    model, data = bert / "models" / "a", str(bert / "data" / "rows.jsonl")
    stop_after_saving(model, data, bert / "out", model_args={"tokenizer": str(bert / "tokenizer")})
    status, content = (bert / changed).stat(), bytearray((bert / changed).read_bytes())
    content[-1] ^= 1
    (bert / changed).write_bytes(content)
    os.utime(bert / changed, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times
    with pytest.raises(gm.InputError):
        estimate_curvature(
            str(model),
            data,
            out=bert / "out",
            batch_size=1,
            resume=True,
            device="cpu",
            model_args={"tokenizer": str(bert / "tokenizer")},
        )


def test_a_measurement_whose_data_change_meanwhile_writes_nothing(bert: Path) -> None:
    model, data = bert / "models" / "a", bert / "data" / "rows.jsonl"

    with pytest.raises(gm.GradmergeError, match=r"rows\.jsonl") as failed:
        estimate_curvature(
            str(model),
            str(data),
            out=bert / "out",
            progress=Interfere(lambda: write_jsonl(data, labelled(7, seed=5))),
            device="cpu",
        )
    assert failed.value.status == 1 and not list(bert.glob("out*"))


class Interfere(NoProgress):
    """Does something to the inputs in the middle of the work."""

    def __init__(self, action: Any) -> None:
        self.action, self.done = action, False

    def advance(self, amount: int) -> None:
        if not self.done:
            self.done = True
            self.action()


def overwrites_in_place(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaces(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("action", [overwrites_in_place, replaces])
@pytest.mark.parametrize("name", ["models/base/model.safetensors", "models/a/curvature/curvature.safetensors"])
def test_an_input_that_changes_during_a_merge_is_noticed(recipe: Path, action: Any, name: str) -> None:
    place = recipe.parent
    with pytest.raises(gm.GradmergeError, match=name.rpartition("/")[2]) as failed:
        gm.merge(recipe, place / "out", progress=Interfere(lambda: action(place / name)))
    assert failed.value.status == 1 and not list(place.glob("out*"))


def test_a_truncated_result_is_not_taken_for_complete(recipe: Path) -> None:
    out = recipe.parent / "out"
    gm.merge(recipe, out)
    assert gm.merge(recipe, out, resume=True).already_done
    want = weight_bytes(out)
    os.truncate(out / "model.safetensors", 1000)
    with pytest.raises(gm.InputError):
        gm.merge(recipe, out, resume=True)
    gm.merge(recipe, out, resume=True, force=True)
    assert weight_bytes(out) == want
