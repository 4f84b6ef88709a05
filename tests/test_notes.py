"""Notes: text for people, with fields for programs."""

from __future__ import annotations

import copy
import json
import pickle

from gradmerge.notes import Kind, Note
from gradmerge.text import to_json


def test_a_note_is_its_text_and_keeps_kind_and_data_when_it_is_copied() -> None:
    note = Note("it moves too far", Kind.UNTRUSTED, damping=0.1)
    assert note == "it moves too far" and json.loads(to_json([note])) == ["it moves too far"]
    for same in (note, copy.deepcopy(note), pickle.loads(pickle.dumps(note))):
        assert same.kind == "untrusted" and same.data == {"damping": 0.1} and same.is_warning
    plain = Note("by the way")
    assert plain.kind is Kind.NOTE and plain.data == {} and not plain.is_warning
