"""Loading models, tokenizers and adapters, and refusing weights that would be random."""

from __future__ import annotations

import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from gradmerge.errors import InputError
from gradmerge.quiet import quiet_transformers
from gradmerge.tasks import evaluate, load_model, load_task
from gradmerge.tasks.model_files import TASKS
from gradmerge.tasks.models import model_with
from gradmerge.tasks.text import longest_sequence, num_positions

from .making import (
    VOCABULARY,
    labelled,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_llama_checkpoint,
    tiny_t5_checkpoint,
    tiny_vit_checkpoint,
    word_tokenizer,
    write_jsonl,
    write_sentence_model,
)

MAKERS: dict[str, Callable[..., Path]] = {
    "classify": tiny_bert_checkpoint,
    "causal-lm": tiny_gpt2_checkpoint,
    "seq2seq": tiny_t5_checkpoint,
    "image": tiny_vit_checkpoint,
    "embedding": write_sentence_model,
}


def tiny_roberta_config(**options: Any) -> RobertaConfig:
    return RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=34,
        **options,
    )


@pytest.mark.parametrize("task", TASKS)
def test_the_architecture_decides_the_task(tmp_path: Path, task: str) -> None:
    model, info = load_model(str(MAKERS[task](tmp_path / "model")), device="cpu")
    assert info.task == task
    assert not model.training
    assert not info.missing


def test_a_model_takes_other_weights_and_refuses_those_that_do_not_fit(tmp_path: Path) -> None:
    folder = tiny_gpt2_checkpoint(tmp_path / "model")
    model: Any = load_model(str(folder), device="cpu", dtype="float64")[0]
    state = {name: value * 2 for name, value in load_file(folder / "model.safetensors").items()}
    result = model_with(model, state)
    assert not result.training and result.dtype == torch.float64
    weight = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(result.get_parameter(weight), state[weight].double())
    assert torch.equal(model.get_parameter(weight) * 2, state[weight].double())
    for wrong in ({n: v for n, v in state.items() if n != weight}, state | {weight: torch.zeros(2, 3)}):
        with pytest.raises(InputError, match=weight):
            model_with(model, wrong, "tilted")


def test_types_are_as_stored_or_as_asked_for(tmp_path: Path) -> None:
    folder = tiny_bert_checkpoint(tmp_path / "model")
    assert load_model(str(folder), dtype="bfloat16")[0].dtype == torch.bfloat16
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.half().save_pretrained(folder)
    model, info = load_model(str(folder), device="cpu")
    assert model.dtype == torch.float32 and len(info.notes) == 1
    model.bfloat16().save_pretrained(folder)
    assert load_model(str(folder), device="cpu")[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("maker", "task"),
    [(tiny_gpt2_checkpoint, "classify"), (tiny_t5_checkpoint, "causal-lm"), (tiny_bert_checkpoint, "clasify")],
)
def test_a_model_that_does_not_fit_the_task_is_refused(tmp_path: Path, maker: Any, task: str) -> None:
    with pytest.raises(InputError):
        load_model(str(maker(tmp_path / "model")), task)


def test_weights_of_other_shapes_are_refused(tmp_path: Path) -> None:
    path = tiny_bert_checkpoint(tmp_path / "model", labels=3) / "config.json"
    config = json.loads(path.read_text()) | {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"classifier\.weight"):
        load_model(str(tmp_path / "model"))
    info = load_model(str(tmp_path / "model"), allow_missing=True)[1]
    assert set(info.missing) == {"classifier.weight", "classifier.bias"}


def test_folders_without_a_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_bert_checkpoint(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    for reference in (tmp_path / "nothing", tmp_path / "empty", folder / "model.safetensors"):
        with pytest.raises(InputError, match=str(reference)):
            load_model(str(reference))
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(InputError, match=str(folder)):
        load_model(str(folder))
    for config in ("{", json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]})):
        (folder / "config.json").write_text(config)
        with pytest.raises(InputError, match=str(folder)):
            load_model(str(folder))

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(InputError, match=r"org/name@v1"):
        load_model("org/name@v1")


def test_a_hub_model_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_bert_checkpoint(tmp_path / "cache")
    calls: list[Any] = []

    def download(repo: str, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        calls.append((repo, revision, "model*.safetensors" in allow_patterns, "*.bin" in allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_model("org/name@v1")[1].folder == folder
    assert calls == [("org/name", "v1", True, False)]


def test_devices_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    for device in ("nonsense", "meta", "cuda:99"):
        with pytest.raises(InputError, match="device"):
            load_model(str(tmp_path), device=device)
    with pytest.raises(InputError, match="dtype"):
        load_model(str(tmp_path), dtype="int8")


def test_a_tokenizer_that_is_missing_or_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "model")
    data = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "a good film !"}]))
    other = tmp_path / "tokenizer"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(other / name)
    with pytest.raises(InputError, match=rf"{folder}.*tokenizer="):
        load_task(str(folder), data)
    assert load_task(str(folder), data, model_args={"tokenizer": str(other)}).examples == 1
    small = tiny_llama_checkpoint(tmp_path / "small", vocab_size=VOCABULARY - 1)
    loaded = load_task(str(small), data, model_args={"tokenizer": str(other)})
    with pytest.raises(InputError, match=f"row 1: .*{VOCABULARY - 1}"):
        list(loaded.batches(1))
    (other / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=str(other)):
        load_task(str(folder), data, model_args={"tokenizer": str(other)})


def test_texts_are_cut_to_the_positions_of_the_model(tmp_path: Path) -> None:
    folder = str(tiny_bert_checkpoint(tmp_path / "model"))
    data = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "a " * 100, "label": 0}]))
    loaded = load_task(folder, data)
    assert next(loaded.batches(1))["input_ids"].shape == (1, 40)
    assert len(loaded.notes) == 1
    with pytest.raises(InputError, match="max_length=41"):
        load_task(folder, data, max_length=41)
    assert num_positions(RobertaForSequenceClassification(tiny_roberta_config())) == 32
    for length in (-5, "many", None, 1e30, math.nan, [3], 12.5):
        tokenizer = SimpleNamespace(model_max_length=length)
        assert longest_sequence(loaded.model, tokenizer, None) == (12 if length == 12.5 else 40)


def test_the_padding_token_of_the_model_comes_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = RobertaForSequenceClassification(tiny_roberta_config(pad_token_id=2))
    model.roberta.embeddings.position_embeddings.weight.data.normal_()
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    loaded = load_task(str(tmp_path / "model"), str(write_jsonl(tmp_path / "a.jsonl", labelled(6))), dtype="float64")
    losses = [evaluate(loaded, size)["loss_per_example"] for size in (1, 6)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
def test_an_adapter_is_merged_into_its_base_with_its_head(tmp_path: Path, classes: int) -> None:
    base = tiny_bert_checkpoint(tmp_path / "base", labels=2)
    torch.manual_seed(1)
    inner = AutoModelForSequenceClassification.from_pretrained(base, num_labels=classes, ignore_mismatched_sizes=True)
    tuned = get_peft_model(inner, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    for name, parameter in tuned.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            parameter.data.normal_()
    tuned.save_pretrained(tmp_path / "adapter")
    model, info = load_model(str(tmp_path / "adapter"), device="cpu")
    inputs = {"input_ids": torch.tensor([[2, 7, 9, 3]])}
    with torch.no_grad():
        assert torch.allclose(model(**inputs).logits, tuned.eval()(**inputs).logits, atol=1e-6)
    assert info.task == "classify"
    data = str(write_jsonl(tmp_path / "a.jsonl", labelled(4, classes)))
    assert load_task(str(tmp_path / "adapter"), data).examples == 4  # with the tokenizer of the base
    shutil.move(base, tmp_path / "elsewhere")
    with pytest.raises(InputError, match="base"):
        load_model(str(tmp_path / "adapter"))


@pytest.mark.parametrize("values", [{"architectures": [5]}, {"num_attention_heads": -1}])
def test_invalid_configs_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    model = tiny_bert_checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))
    data = str(write_jsonl(tmp_path / "a.jsonl", labelled(2)))
    with pytest.raises(InputError):
        evaluate(load_task(str(model), data, device="cpu"))


def test_a_config_of_a_far_larger_model_is_refused_before_memory_is_used(tmp_path: Path) -> None:
    folder = tiny_vit_checkpoint(tmp_path / "vit")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_channels": 10**9}))  # a terabyte of weights
    with pytest.raises(InputError):
        load_model(str(folder), device="cpu")


def test_a_quantized_model_is_dequantized(tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    codes, scales = (state[name] * 100).to(torch.float8_e4m3fn), torch.full((1, 1), 0.01)
    save_file(state | {name: codes, f"{name}_scale_inv": scales}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization, "dtype": "float32"}))
    model, info = load_model(str(folder), device="cpu")
    weight = dict(model.named_parameters())[name]
    torch.testing.assert_close(weight.detach(), codes.float() * 0.01)
    assert info.notes
    again = model_with(model, {n: v.float() for n, v in state.items()})
    torch.testing.assert_close(dict(again.named_parameters())[name].detach(), state[name].float())


def test_threads_load_models_one_after_the_other() -> None:
    order: list[str] = []
    inside = threading.Event()

    def second() -> None:
        inside.wait()
        with quiet_transformers():
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with quiet_transformers(), quiet_transformers():  # the same thread may enter again
        inside.set()
        time.sleep(0.1)  # a thread that does not wait would be done by now
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
