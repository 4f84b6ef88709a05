"""Fine-tuning as the experiments do it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from experiments.common.training import Training, fine_tune
from transformers import BertConfig, BertForSequenceClassification

ROWS = [{"input_ids": [1, 2 + i % 5, 3 + i % 3], "labels": i % 2} for i in range(24)]


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def small_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=16, max_position_embeddings=8, **shape))


def trained(folder: Path, training: Training) -> tuple[dict, dict[str, torch.Tensor]]:
    model = small_model()
    found = fine_tune(model, ROWS, collate, folder, training, seed=3, device="cpu")
    return found, {name: p.detach().clone() for name, p in model.named_parameters()}


def test_every_row_is_seen_in_every_epoch_and_nothing_is_left_behind(tmp_path: Path) -> None:
    found, after = trained(tmp_path, Training(1e-3, epochs=3, batch_size=5))
    assert found["examples"] == 24 and found["steps"] == 3 * 5
    assert 0 < found["last_loss"] < 1
    assert any(not torch.equal(p, after[name]) for name, p in small_model().named_parameters())
    assert not list(tmp_path.iterdir())


def test_adafactor_makes_steps_as_large_as_a_tensor_allows(tmp_path: Path) -> None:
    """The rate times the entries' root mean square at most: large ones move farther than AdamW ever would."""
    model = small_model()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.mul_(1000)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = Training(1e-2, epochs=1, batch_size=24, optimizer="Adafactor")
    fine_tune(model, ROWS, collate, tmp_path, training, seed=0, device="cpu")
    moved = {name: p.detach() - start[name] for name, p in model.named_parameters()}
    for name, change in moved.items():
        size = max(1e-3, float(start[name].square().mean().sqrt()))
        assert float(change.square().mean().sqrt()) <= 1.001e-2 * size, name
    assert float(moved["bert.embeddings.word_embeddings.weight"].abs().max()) > 2e-2


class Stopped(Exception):
    pass


def test_an_interrupted_training_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    training = Training(1e-3, epochs=2, batch_size=4, save_every=5)
    _, whole = trained(tmp_path / "whole", training)
    calls = 0

    def stopping(rows: list[dict]) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise Stopped
        return collate(rows)

    with pytest.raises(Stopped):
        fine_tune(small_model(), ROWS, stopping, tmp_path / "stopped", training, seed=3, device="cpu")
    assert (tmp_path / "stopped" / "trainer" / "checkpoint-5").is_dir()
    _, resumed = trained(tmp_path / "stopped", training)
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_a_strong_penalty_keeps_the_model_where_it_began(tmp_path: Path) -> None:
    begun = {name: p.detach() for name, p in small_model().named_parameters()}

    def moved(strength: float) -> float:
        _, after = trained(tmp_path, Training(1e-3, epochs=2, batch_size=4, strength=strength))
        return sum(float((after[name] - p).square().sum()) for name, p in begun.items())

    assert moved(1e6) < 1e-6 * moved(0.0)
