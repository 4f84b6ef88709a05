"""Notes: text for people, with fields for programs."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import gradmerge as gm
from gradmerge.notes import Kind, Note
from gradmerge.text import to_json

from .making import random_curvature, three_models, write_model


def test_a_note_is_its_text_and_keeps_kind_and_data_when_it_is_copied() -> None:
    note = Note("it moves too far", Kind.UNTRUSTED, damping=0.1)
    assert note == "it moves too far" and json.loads(to_json([note])) == ["it moves too far"]
    for same in (note, copy.deepcopy(note), pickle.loads(pickle.dumps(note))):
        assert same.kind == "untrusted" and same.data == {"damping": 0.1} and same.is_warning
    plain = Note("by the way")
    assert plain.kind is Kind.NOTE and plain.data == {} and not plain.is_warning


def test_notes_of_a_merge_say_what_they_are_about(tmp_path: Path) -> None:
    folders, states = three_models(tmp_path)
    random_curvature(0, states[1]).save(tmp_path / "c")
    models = [{"model": str(folders[1]), "curvature": str(tmp_path / "c")}, str(folders[2])]
    (note,) = gm.merge({"method": "average", "base": str(folders[0]), "models": models}, tmp_path / "one").notes
    assert note.kind == Kind.UNUSED and note.data == {"keys": ["models[0].curvature"]} and not note.is_warning
    stranger = write_model(tmp_path / "other", {n: -v for n, v in states[0].items()})
    recipe = {"method": "average", "base": str(folders[0]), "models": [str(stranger)]}
    (note,) = gm.merge(recipe, tmp_path / "two").notes
    assert note.kind == Kind.STRANGERS and note.is_warning
    assert abs(note.data["distance"] - 2) < 1e-3 and abs(note.data["cosine"] + 1) < 1e-3
    record = json.loads((tmp_path / "two" / "gradmerge.json").read_text())
    assert record["notes"] == [str(note)]
