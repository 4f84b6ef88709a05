"""Folders that would have transformers or peft open a pickle, look elsewhere, or run code: refused before that."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, model_info
from huggingface_hub.errors import OfflineModeIsEnabled
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from gradmerge.errors import InputError
from gradmerge.tasks import load_model, load_task
from gradmerge.tasks.model_files import offline

from .making import labelled, tiny_bert_checkpoint, write_jsonl


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_bert_checkpoint(tmp_path / "model")


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Path:
    inner = AutoModelForSequenceClassification.from_pretrained(model)
    get_peft_model(inner, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])).save_pretrained(
        tmp_path / "adapter"
    )
    return tmp_path / "adapter"


def pickled(folder: Path, stem: str, name: str) -> None:
    """Replace a safetensors file by a pickle."""
    torch.save(load_file(folder / f"{stem}.safetensors"), folder / name)
    (folder / f"{stem}.safetensors").unlink()


def write_index(folder: Path, stem: str, filename: str) -> None:
    """Replace a safetensors file by an index, and move it out of the folder."""
    names = load_file(folder / f"{stem}.safetensors")
    text = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, filename)})
    (folder / f"{stem}.safetensors.index.json").write_text(text)
    (folder / f"{stem}.safetensors").rename(folder.parent / "elsewhere.safetensors")


def index_of(filename: str) -> Callable[[Path], None]:
    """An index of a pickle in the folder, or of a file elsewhere."""

    def change(folder: Path) -> None:
        if "/" not in filename:
            torch.save(load_file(folder / "model.safetensors"), folder / filename)
        write_index(folder, "model", filename)

    return change


def a_link(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / "secret")
        (folder / name).symlink_to("../secret")

    return change


def a_pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def too_large(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        os.truncate(folder / name, 100_000_001)

    return change


def config(name: str = "config.json", **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


HOSTILE: dict[str, Callable[[Path], None]] = {
    "an index of pickles": index_of("weights.bin"),
    "an index of pickles under another name": index_of("weights.safetensors"),
    "an index that leads out": index_of("../elsewhere.safetensors"),
    "nothing but a pickle": lambda folder: pickled(folder, "model", "pytorch_model.bin"),
    "weights linked from elsewhere": a_link("model.safetensors"),
    "a config linked from elsewhere": a_link("config.json"),
    "a tokenizer linked from elsewhere": a_link("tokenizer.json"),
    "a generation config that is a pipe": a_pipe("generation_config.json"),
    "a tokenizer that is a pipe": a_pipe("tokenizer.json"),
    "a tokenizer without end": too_large("tokenizer.json"),
    "a tokenizer by the name of another folder": config(
        "tokenizer_config.json", fast_tokenizer_files=["../tokenizer.4.0.json"]
    ),
    "attention of the Hub": config(_attn_implementation_internal="org/repo"),
    "attention of the Hub for a part": config(attn_implementation={"": "sdpa", "text": "org/repo"}),
    "attention of the Hub in a part": config(text_config={"_attn_implementation": "org/repo"}),
    "experts of the Hub": config(experts_implementation="org/repo"),
    "weights of another name": config(transformers_weights="more/other.safetensors"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused(model: Path, tmp_path: Path, case: str) -> None:
    data = str(write_jsonl(tmp_path / "a.jsonl", labelled(2)))
    load_task(str(model), data)
    HOSTILE[case](model)
    with pytest.raises(InputError, match=str(model)):
        load_task(str(model), data)


@pytest.mark.parametrize("shards", [False, True])
def test_an_adapter_that_peft_would_read_from_a_pickle_is_refused(adapter: Path, shards: bool) -> None:
    load_model(str(adapter))
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    write_index(adapter, "adapter_model", "part.safetensors")
    if shards:
        (adapter.parent / "elsewhere.safetensors").rename(adapter / "part.safetensors")
    else:
        (adapter / "adapter_model.safetensors.index.json").unlink()
    with pytest.raises(InputError, match=r"adapter_model\.safetensors"):
        load_model(str(adapter))


def test_the_base_of_an_adapter_is_held_to_the_same(adapter: Path, model: Path) -> None:
    index_of("weights.bin")(model)
    with pytest.raises(InputError, match=r"\.safetensors"):
        load_model(str(adapter))


def test_a_tokenizer_given_apart_is_held_to_the_same(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, other / name)
    data = str(write_jsonl(tmp_path / "a.jsonl", labelled(2)))
    load_task(str(model), data, model_args={"tokenizer": str(other)})
    a_link("tokenizer.json")(other)
    with pytest.raises(InputError, match=str(other)):
        load_task(str(model), data, model_args={"tokenizer": str(other)})


def test_code_beside_a_model_is_not_run(model: Path) -> None:
    code = "raise SystemExit('it ran')"
    (model / "modeling_theirs.py").write_text(code)
    own = {"AutoConfig": "modeling_theirs.C", "AutoModelForSequenceClassification": "modeling_theirs.M"}
    config(auto_map=own)(model)
    config("tokenizer_config.json", auto_map={"AutoTokenizer": ["modeling_theirs.T", None]})(model)
    loaded, _ = load_model(str(model))
    assert type(loaded).__name__ == "BertForSequenceClassification"
    config(model_type="theirs")(model)
    with pytest.raises(InputError, match=r"config\.json"):
        load_model(str(model))
    assert not any("modeling_theirs" in name for name in sys.modules)


def test_the_hub_is_not_asked_while_a_folder_is_loaded() -> None:
    before = constants.HF_HUB_OFFLINE
    with offline(), pytest.raises(OfflineModeIsEnabled):
        model_info("org/name")
    assert before == constants.HF_HUB_OFFLINE
