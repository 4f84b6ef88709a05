"""Comparing checkpoints before a merge: every incompatibility in one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.checkpoints import Checkpoint, compare
from gradmerge.errors import InputError
from gradmerge.notes import Kind, Note
from tests.making import assert_close, near, random_curvature, random_state, read_model, write_model

State = dict[str, Tensor]


def merge(tmp_path: Path, base: State, *tuned: State, method: str = "average", **recipe: Any) -> gm.MergeResult:
    write_model(tmp_path / "base", base)
    folders = [write_model(tmp_path / f"tuned{i}", state, i + 1) for i, state in enumerate(tuned)]
    recipe = {"method": method, "base": str(tmp_path / "base"), "models": [str(f) for f in folders], **recipe}
    return gm.merge(recipe, tmp_path / "out")


def problems(base: State, *tuned: State, **more: Any) -> list[str]:
    others = [Checkpoint(f"tuned{i}", memory=state) for i, state in enumerate(tuned)]
    return compare(Checkpoint("base", memory=base), others, **more).problems


def without(state: State, *names: str) -> State:
    return {name: value for name, value in state.items() if name not in names}


BASE = random_state(0)


def test_every_difference_of_every_model_is_in_one_message(tmp_path: Path) -> None:
    square = {f"{letter}.weight": (4, 4) for letter in "abc"}
    shapes = {"model.embed_tokens.weight": (50, 8), **square, "d.weight": (4,)}
    base = random_state(0, shapes)
    first = random_state(1, shapes | {"model.embed_tokens.weight": (51, 8), "b.weight": (4, 5), "extra.weight": (2,)})
    first = without(first, "a.weight") | {"d.weight": torch.arange(4)}
    second = random_state(2, shapes | {"c.weight": (1, 4)})
    random_curvature(3, without(base, "d.weight")).save(tmp_path / "curvature")
    models = [
        {"model": str(tmp_path / "tuned0"), "curvature": str(tmp_path / "curvature")},
        {"model": str(tmp_path / "tuned1"), "curvature": {"identity": 1.0}},
    ]
    with pytest.raises(InputError) as error:
        merge(tmp_path, base, first, second, method="fisher-averaging", models=models)
    message = str(error.value)
    assert not list(tmp_path.glob("out*")) and message.count("•") == 6
    for name in ("model.embed_tokens", "a", "extra", "b", "d", "c"):
        assert f"{name}.weight" in message


OLD_BUFFERS = {
    "embeddings.position_ids": torch.arange(4),
    "h.0.attn.bias": torch.ones(1, 1, 4, 4),
    "h.1.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
    "h.0.attn.masked_bias": torch.tensor(-1e4),
    "layers.0.self_attn.rotary_emb.inv_freq": torch.tensor([1.0, 0.1]),
    "bn.num_batches_tracked": torch.tensor(5),
}


def test_buffers_of_older_checkpoints_are_not_compared(tmp_path: Path) -> None:
    tuned = near(BASE, 1)
    merge(tmp_path / "new-base", BASE, tuned | OLD_BUFFERS)
    assert_close(read_model(tmp_path / "new-base/out"), tuned, 0)
    merge(tmp_path / "old-base", BASE | OLD_BUFFERS, tuned)
    assert_close(read_model(tmp_path / "old-base/out"), tuned | OLD_BUFFERS, 0)


def write_tokenizer(folder: Path, vocabulary: dict[str, int], **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, **more}))


def test_a_tokenizer_with_other_rows_is_a_warning(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "base", {"a": 0, "b": 1})
    write_tokenizer(tmp_path / "tuned0", {"a": 1, "b": 0})
    write_tokenizer(tmp_path / "tuned1", {"a": 0, "b": 1}, padding={"strategy": "longest"})
    notes = merge(tmp_path, BASE, near(BASE, 1), near(BASE, 2)).notes
    (found,) = [note for note in notes if note.data == {"moved": 2}]
    assert found.is_warning


@pytest.mark.parametrize("text", ["", '{"model": 3}', "\xff\xfe", "[" * 5000])
def test_an_unreadable_tokenizer_does_not_stop_a_merge(text: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "base", {"a": 0})
    (tmp_path / "tuned0").mkdir()
    (tmp_path / "tuned0/tokenizer.json").write_text(text, "latin-1")
    tuned = near(BASE, 1)
    merge(tmp_path, BASE, tuned)
    assert_close(read_model(tmp_path / "out"), tuned, 0)


def test_patterns_that_match_nothing_are_an_error_or_a_note() -> None:
    with pytest.raises(InputError):
        problems(BASE, near(BASE, 1), include=["clasifier.weight"])
    base = Checkpoint("base", memory=BASE)
    assert len(compare(base, [base], exclude=["clasifier.*"]).notes) == 1
    assert len(compare(base, [base], exclude=["*"]).problems) == 1


# Models that are not fine-tuned from the base

MATRICES = random_state(0, {"a.weight": (300, 200), "b.weight": (80, 50), "head.weight": (3, 50), "norm.weight": (50,)})


def warnings(ours: State, theirs: State, **more: Any) -> list[Note]:
    notes = compare(Checkpoint("base", memory=ours), [Checkpoint("tuned", memory=theirs)], **more).notes
    return [note for note in notes if isinstance(note, Note) and note.kind is Kind.STRANGERS]


def test_an_unrelated_model_gets_a_warning_with_distance_and_cosine() -> None:
    theirs = random_state(1, {n: tuple(v.shape) for n, v in MATRICES.items()})
    (note,) = warnings(MATRICES, theirs)
    matrices = [n for n in MATRICES if MATRICES[n].dim() == 2]
    ours_flat, theirs_flat = (torch.cat([s[n].double().flatten() for n in matrices]) for s in (MATRICES, theirs))
    distance = float((theirs_flat - ours_flat).norm() / ours_flat.norm())
    cosine = float(ours_flat @ theirs_flat / ours_flat.norm() / theirs_flat.norm())
    assert abs(note.data["distance"] - distance) < 0.03 and abs(note.data["cosine"] - cosine) < 0.02


def test_fine_tuned_models_with_new_heads_get_no_warning() -> None:
    tuned = near(MATRICES, 1, 0.5) | {"head.weight": torch.randn(3, 50), "norm.weight": torch.randn(50) * 100}
    assert not warnings(MATRICES, tuned)
    moved = tuned | {"a.weight": torch.randn(300, 200)}
    assert warnings(MATRICES, moved) and not warnings(MATRICES, moved, exclude=["a.*"])


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_models_of_zeros_or_of_no_numbers_get_no_warning(value: float) -> None:
    odd = {name: torch.full_like(tensor, value) for name, tensor in MATRICES.items()}
    assert not warnings(odd, odd) and not warnings(odd, MATRICES)
