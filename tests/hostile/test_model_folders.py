"""Folders whose config or tokenizer says what cannot be: refused before a model is built of them, or when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm
from tests.fuzz.data import ImportConfig, Loaded

CONFIGS: dict[str, tuple[str, Any]] = {
    "more layers than can be built": ("num_hidden_layers", 2**31),
    "a whole number without end": ("num_hidden_layers", 10**30),
    "layers below nothing": ("num_hidden_layers", -1),
    "a type that is a mapping": ("model_type", {"x": "bert"}),
    "architectures that are lists": ("architectures", [["BertForSequenceClassification"]]),
    "architectures that are a number": ("architectures", 5),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_trainer_checkpoint_with_a_config_that_cannot_be_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = ImportConfig(tmp_path / "import")
    monkeypatch.chdir(kind.place.inputs)
    spoil(Path("config.json"), *CONFIGS[case])
    with pytest.raises(gm.InputError):
        gm.import_curvature(".", dataset_size=10, batch_size=2)


LOADED: dict[str, tuple[str, str, Any]] = {
    "architectures that are lists": ("bert/config.json", "architectures", [["BertForSequenceClassification"]]),
    "class numbers that are lists": ("vit/config.json", "label2id", {"no": [0], "yes": 1, "maybe": 2}),
    "a length that is a share": ("bert/tokenizer_config.json", "model_max_length", 0.5),
    "a length that is a list": ("bert/tokenizer_config.json", "model_max_length", [40]),
    "a length that is a word": ("bert/tokenizer_config.json", "model_max_length", "forty"),
}


@pytest.mark.parametrize("case", LOADED)
def test_a_folder_that_cannot_be_is_refused_or_read_without_what_is_wrong(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Loaded(tmp_path / "loaded")
    monkeypatch.chdir(kind.place.inputs)
    file, key, value = LOADED[case]
    spoil(Path(file), key, value)
    model = file.partition("/")[0]
    try:
        found = gm.evaluate(model, {"bert": "data.jsonl", "vit": "data.npz"}[model], device="cpu")
    except gm.InputError:
        return
    assert key == "model_max_length" and found["examples"] == 2


def spoil(path: Path, key: str, value: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def test_a_text_with_half_a_character_is_refused_by_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Loaded(tmp_path / "loaded")
    monkeypatch.chdir(kind.place.inputs)
    Path("half.jsonl").write_text('{"text": "good", "label": 0}\n{"text": "ba\\ud800d", "label": 1}\n')
    with pytest.raises(gm.InputError, match="row 2"):
        gm.evaluate("bert", "half.jsonl", device="cpu")
