"""Adapters whose adapter_config.json has fields of the wrong type: every reader refuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm
from gradmerge.checkpoints.lora import read_adapter_config
from tests.fuzz.models import ADAPTER, Adapters

WRONG: list[tuple[str, Any]] = [
    ("task_type", ["SEQ_CLS"]),
    ("base_model_name_or_path", ["base"]),
    ("revision", {}),
    ("r", "8"),
    ("lora_alpha", [16]),
    ("lora_alpha", None),
    ("lora_alpha", 10**400),
    ("lora_alpha", float("inf")),
    ("lora_dropout", "none"),
    ("rank_pattern", {"a": "8"}),
    ("alpha_pattern", {"a": float("nan")}),
    ("target_modules", [["a"]]),
    ("exclude_modules", 5),
    ("modules_to_save", [1]),
    ("layers_pattern", [None]),
    ("layers_to_transform", "0"),
    ("trainable_token_indices", "b"),
    ("bias", ["none"]),
    ("init_lora_weights", ["pissa"]),
    ("fan_in_fan_out", "false"),
    ("use_rslora", "false"),
    ("use_dora", []),
    ("lora_bias", 1),
    ("ensure_weight_tying", "yes"),
]


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Adapters:
    kind = Adapters(tmp_path / "adapters")
    monkeypatch.chdir(kind.place.inputs)
    return kind


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_field_of_the_wrong_type_is_refused_by_its_name(field: str, value: Any, kind: Adapters) -> None:
    Path("adapter/adapter_config.json").write_text(json.dumps(ADAPTER | {field: value}))
    with pytest.raises(gm.InputError, match=field):
        read_adapter_config(Path("adapter"))


@pytest.mark.parametrize("value", [["SEQ_CLS"], {"SEQ_CLS": 1}])
@pytest.mark.parametrize("format", ["model", "adapter"])
def test_a_merge_of_an_adapter_with_an_invalid_task_type_is_refused(format: str, value: Any, kind: Adapters) -> None:
    Path("adapter/adapter_config.json").write_text(json.dumps(ADAPTER | {"task_type": value}))
    recipe = {"method": "task-arithmetic", "base": "base", "models": ["adapter"], "output": {"format": format}}
    with pytest.raises(gm.InputError, match="task_type"):
        gm.merge(recipe, "out")
    assert not Path("out").exists()


@pytest.mark.parametrize("value", [["SEQ_CLS"], {"SEQ_CLS": 1}])
def test_an_evaluation_of_an_adapter_with_an_invalid_task_type_is_refused(value: Any, kind: Adapters) -> None:
    Path("adapter/adapter_config.json").write_text(json.dumps(ADAPTER | {"task_type": value}))
    Path("rows.jsonl").write_text('{"text": "good", "label": 0}\n')
    with pytest.raises(gm.InputError, match="task_type"):
        gm.evaluate("adapter", "rows.jsonl", device="cpu")


def test_a_field_that_is_null_or_unknown_is_allowed(kind: Adapters) -> None:
    optional = {name: None for name in ADAPTER if name not in ("peft_type", "lora_alpha")}
    config = ADAPTER | optional | {"base_model_name_or_path": "base", "loftq_config": None, "some_new_field": [1]}
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    assert read_adapter_config(Path("adapter")) == config
