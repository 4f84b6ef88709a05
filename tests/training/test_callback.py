"""CurvatureCallback: each source against a slow computation, and the folders that get the result."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import IterableDataset

import gradmerge as gm
from gradmerge.errors import InputError

from ..checkpoints.families import make, randomise
from ..curvature import slow
from ..curvature.training import Batch, as_stored
from .callback_runs import Watch, bert, read, sentences, squares, trainer_for

TOLERANCE = 2e-4
SOURCES = ("adam", "pass")


# adam


def test_adam_corrects_for_accumulated_losses_that_are_added_up(tmp_path: Path) -> None:
    """BERT's loss is a mean over its own batch: the gradient of two batches is twice the mean's."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer_for(tmp_path / "out", bert(), sentences(12), gm.CurvatureCallback(), **sizes).train()
    imported = gm.import_curvature(tmp_path / "out" / "checkpoint-6", dataset_size=12, batch_size=4).sum()
    slow.assert_same(read(tmp_path / "out"), {name: value / 4 for name, value in imported.items()}, 1e-6)


def test_adam_and_an_import_of_the_checkpoint_agree(tmp_path: Path) -> None:
    model = make("vit").double()
    images = torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    data = [{"pixel_values": image, "labels": torch.tensor(i % 3)} for i, image in enumerate(images)]
    trainer_for(tmp_path / "out", model, data, gm.CurvatureCallback(), num_train_epochs=1).train()
    imported = gm.import_curvature(tmp_path / "out" / "checkpoint-2", dataset_size=8, batch_size=4)
    slow.assert_same(read(tmp_path / "out" / "checkpoint-2"), imported.sum(), 1e-6)
    slow.assert_same(read(tmp_path / "out"), imported.sum(), 1e-6)


def test_other_optimizers_are_refused_before_the_first_step(tmp_path: Path) -> None:
    watch = Watch()
    trainer = trainer_for(tmp_path / "out", bert(), sentences(8), gm.CurvatureCallback(), watch, optim="sgd")
    with pytest.raises(InputError):
        trainer.train()
    assert not watch.weights


# pass


@pytest.mark.parametrize(("limit", "batch_size"), [(None, None), (7, 3)])
def test_pass_adds_up_the_first_examples_at_the_trained_weights(
    tmp_path: Path, limit: int | None, batch_size: int | None
) -> None:
    model, data = bert(dropout=0.1), sentences(10)
    callback = gm.CurvatureCallback("pass", limit=limit, batch_size=batch_size)
    trainer_for(tmp_path / "out", model, data, callback, num_train_epochs=1, save_steps=3).train()
    want = as_stored(tmp_path / "out" / "checkpoint-3", model, squares(model, data[:limit]))
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-3"):
        got = read(folder)
        assert (got.examples, got.likelihood) == (limit or 10, "empirical")
        slow.assert_same(got, want, TOLERANCE)


# adapters


def lora(model: Any, **changes: Any) -> Any:
    """A model under an adapter whose factors are all random, with dropout."""
    settings: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 5,
        "lora_dropout": 0.1,
        "target_modules": ["query", "value", "dense"],
        "modules_to_save": ["classifier"],
    }
    adapted = get_peft_model(model, LoraConfig(**settings | changes))
    randomise([p for _, p in sorted(adapted.named_parameters()) if p.requires_grad], 5, 0.1)
    return adapted


@pytest.mark.parametrize("source", SOURCES)
def test_the_adapters_own_tensors_go_by_the_names_of_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: str
) -> None:
    model, data = lora(bert()), sentences(8)
    with caplog.at_level(logging.WARNING, logger="gradmerge"):
        trainer_for(tmp_path / "out", model, data, gm.CurvatureCallback(source), num_train_epochs=1).train()
    assert caplog.text
    checkpoint = tmp_path / "out" / "checkpoint-2"
    got = read(checkpoint)
    assert {n: t.shape for n, t in got.items()} == {
        n: t.shape for n, t in load_file(checkpoint / "adapter_model.safetensors").items()
    }
    if source == "pass":
        slow.assert_same(got, as_stored(checkpoint, model, squares(model, data)), TOLERANCE)


# all


@pytest.mark.parametrize(("source", "bf16"), [("adam", False), ("pass", False), ("pass", True)])
def test_the_callback_does_not_change_training(tmp_path: Path, source: str, bf16: bool) -> None:
    results = []
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    for callback in (None, gm.CurvatureCallback(source)):
        model = bert(dropout=0.2)
        out = tmp_path / "out"
        trainer_for(out, model, sentences(20), callback, bf16=bf16, save_strategy="no", **settings).train()
        assert not model._forward_pre_hooks
        results.append((model.state_dict(), torch.rand(4)))
    (one, after), (two, after_two) = results
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(after, after_two)
    assert read(tmp_path / "out").examples == 20


def test_frozen_parameters_get_no_curvature_and_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    with caplog.at_level(logging.WARNING, logger="gradmerge"):
        trainer_for(tmp_path / "out", model, sentences(8), gm.CurvatureCallback("pass")).train()
    got = read(tmp_path / "out")
    assert set(got) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert "bert.embeddings" in caplog.text
    assert not model.bert.embeddings.word_embeddings.weight.requires_grad
    with pytest.raises(InputError):
        trainer_for(tmp_path / "none", bert().requires_grad_(False), sentences(8), gm.CurvatureCallback("pass")).train()


@pytest.mark.parametrize("source", SOURCES)
def test_the_output_gets_the_curvature_of_the_best_checkpoint(tmp_path: Path, source: str) -> None:
    model, data = bert().double(), sentences(16)
    settings = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.3}
    callback, held_back = gm.CurvatureCallback(source), sentences(6, 9)
    trainer_for(tmp_path / "out", model, data, callback, eval_dataset=held_back, **settings).train()
    curvatures = {p.parent.name: read(p.parent) for p in (tmp_path / "out").glob("checkpoint-*/curvature")}
    weights = {n: p.detach() for n, p in model.named_parameters()}
    saved = {name: bert().from_pretrained(tmp_path / "out" / name) for name in curvatures}
    best = [n for n, other in saved.items() if all(torch.equal(p, weights[k]) for k, p in other.named_parameters())]
    assert best and best != ["checkpoint-8"]
    got = read(tmp_path / "out")
    assert all(torch.equal(got[name], value) for name, value in curvatures[best[0]].items())
    if source == "pass":
        assert len(curvatures) == 1
        slow.assert_same(got, as_stored(tmp_path / "out" / best[0], model, squares(model, data)), TOLERANCE)


def test_an_older_curvature_is_replaced_and_other_folders_are_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    gm.Curvature({"w": torch.ones(2)}, 3).save(out / "curvature")
    trainer_for(out, bert(), sentences(8), gm.CurvatureCallback(precision="log8")).train()
    assert "w" not in read(out)
    other = tmp_path / "other"
    (other / "curvature").mkdir(parents=True)
    (other / "curvature" / "notes.txt").write_text("mine")
    with pytest.raises(InputError):
        trainer_for(other, bert(), sentences(8), gm.CurvatureCallback()).train()
    assert (other / "curvature" / "notes.txt").read_text() == "mine"


def test_data_without_a_length_counts_the_examples_seen(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Batch]:
            return iter(sentences(40))

    trainer_for(tmp_path / "adam", bert(), Stream(), gm.CurvatureCallback(), max_steps=5).train()
    assert read(tmp_path / "adam").examples == 20
    with pytest.raises(InputError):
        trainer_for(tmp_path / "pass", bert(), Stream(), gm.CurvatureCallback("pass"), max_steps=5).train()


def test_batches_without_labels_are_refused(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        return outputs["logits"].square().mean()

    data = [{"input_ids": row["input_ids"]} for row in sentences(8)]
    trainer = trainer_for(tmp_path / "out", bert(), data, gm.CurvatureCallback("pass"), compute_loss_func=loss)
    with pytest.raises(InputError):
        trainer.train()


def test_invalid_options() -> None:
    options: list[dict[str, Any]] = [
        {"source": "adams"},
        {"source": "adam", "limit": 5},
        {"source": "pass", "limit": 0},
        {"seed": "a"},
        {"likelihood": "sampled"},
        {"precision": "int4"},
    ]
    for each in options:
        with pytest.raises(InputError):
            gm.CurvatureCallback(**each)
