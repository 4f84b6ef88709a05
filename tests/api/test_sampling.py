"""Samples from the posterior of a merge, and merging on top of a merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.engine.randomness import standard_normal

from ..compare.test_identities import FEATURES, Loss, make_loss, numbers, trained
from ..making import random_curvature, random_state, read_model, three_models, write_model


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """A merge of two models with its curvature."""
    folders, _ = three_models(tmp_path, torch.float64, curvature=True)
    (folders[0] / "tokenizer.json").write_text("{}")
    recipe = {"method": "gradient-matching", "base": str(folders[0]), "models": [str(f) for f in folders[1:]]}
    gm.merge(recipe | {"damping": 0.5, "output": {"curvature": True}}, tmp_path / "merged")
    return tmp_path / "merged"


def write_merged(folder: Path, state: dict[str, Tensor], precision: dict[str, Tensor], **config: Any) -> Path:
    write_model(folder, state, config=config)
    gm.Curvature(precision, 10).save(folder / "curvature")
    return folder


def draws(folder: Path, n: int, **options: Any) -> list[dict[str, Tensor]]:
    """Draw models, and return their tensors."""
    out = folder.with_name("draws of " + folder.name)
    return [read_model(written) for written in gm.sample_posterior(folder, n, out=out, force=True, **options)]


def test_a_sample_is_the_merged_model_plus_scaled_normal_numbers(merged: Path) -> None:
    mean, curvature = read_model(merged), gm.Curvature.load(merged)
    settings: dict[str, Any] = {"temperature": 0.3, "seed": 5, "damping": 2.0}
    for reduction in ("sum", "mean"):
        precision = getattr(curvature, reduction)()
        for sample, draw in enumerate(draws(merged, 2, reduction=reduction, **settings)):
            for name, value in draw.items():
                noise = standard_normal(5, sample, name, 0, value.numel()).reshape(value.shape)
                want = mean[name] + (0.3 / (precision[name].double() + 2.0)).sqrt() * noise
                assert torch.allclose(value, want, rtol=1e-6, atol=1e-12)
    for draw in draws(merged, 1, temperature=0):
        assert all(torch.equal(draw[name], value) for name, value in mean.items())


def test_models_are_written_with_config_and_tokenizer(merged: Path, tmp_path: Path) -> None:
    out = tmp_path / "draws"
    written = gm.sample_posterior(merged, 3, seed=7, out=out)
    assert written == [out / "0", out / "1", out / "2"]
    assert sorted(p.name for p in out.iterdir()) == ["0", "1", "2", "gradmerge.json"]
    for folder in written:
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in folder.iterdir()}
    with pytest.raises(gm.InputError):
        gm.sample_posterior(merged, 1, out=out)
    gm.sample_posterior(merged, 1, out=out, force=True)
    assert sorted(p.name for p in out.iterdir()) == ["0", "gradmerge.json"]
    with pytest.raises(gm.InputError):
        gm.sample_posterior(merged, 1, out=merged, force=True)


def test_entries_and_tensors_without_precision_stay(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(4, 5), "classifier.weight": torch.ones(3), "steps": torch.arange(3)}
    precision = {"a.weight": torch.ones(4, 5)}
    precision["a.weight"][1:3] = 0.0
    folder = write_merged(tmp_path / "m", state, precision)
    draw = draws(folder, 1)[0]
    assert torch.equal(draw["a.weight"][1:3], state["a.weight"][1:3]) and (draw["a.weight"][0] != 1).all()
    draw = draws(folder, 1, damping=1.0)[0]
    assert (draw["a.weight"] != 1).all()
    assert all(torch.equal(draw[name], state[name]) for name in ("classifier.weight", "steps"))


def test_tied_weights_that_are_stored_twice_stay_tied(tmp_path: Path) -> None:
    embedding = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    precision = {"model.embed_tokens.weight": torch.full((6, 4), 2.0)}
    folder = write_merged(tmp_path / "m", state, precision, tie_word_embeddings=True)
    draw = draws(folder, 1)[0]
    assert torch.equal(draw["lm_head.weight"], draw["model.embed_tokens.weight"])
    assert not torch.equal(draw["lm_head.weight"], embedding)


def test_a_model_without_its_own_curvature_is_refused(tmp_path: Path) -> None:
    state = random_state(0)
    plain = write_model(tmp_path / "plain", state)
    for model in (plain, tmp_path / "nowhere"):
        with pytest.raises(gm.InputError):
            gm.sample_posterior(model, 1, out=tmp_path / "draws")
    random_curvature(0, {"other": torch.ones(3)}).save(plain / "curvature")
    with pytest.raises(gm.InputError):
        gm.sample_posterior(plain, 1, out=tmp_path / "draws")
    random_curvature(0, {name: value.flatten() for name, value in state.items()}).save(plain / "curvature", force=True)
    with pytest.raises(gm.InputError):
        gm.sample_posterior(plain, 1, out=tmp_path / "draws")


# Merging on top of a merge. Further models are fine-tuned from the merge under ½‖θ − θ̂‖² in its precision, which is the
# base's curvature in the next merge.

WEIGHTS = [1.0, 0.5, 2.0, 0.75, 1.0]
STAGES = [[0, 1], [2], [3, 4]]


def short(loss: Loss) -> Loss:
    """The loss with inputs of few digits: float32 holds its Hessian."""
    return Loss(loss.kind, (loss.x * 16).round() / 16, loss.y)


@pytest.mark.parametrize(("reduction", "exact", "tolerance"), [("sum", True, 1e-9), ("mean", False, 1e-6)])
def test_merges_on_top_of_merges_end_at_the_jointly_trained_model_on_disk(
    tmp_path: Path, reduction: str, exact: bool, tolerance: float
) -> None:
    """Every stage starts from the folder that the last one wrote. Curvature files are float32; ``exact`` values fit.

    With the mean, a task of N examples has the curvature XᵀX / N and counts as its mean loss does.
    """
    examples = [3, 4, 9, 4, 2]
    tasks = [make_loss("linear", seed, diagonal=True) for seed in range(len(WEIGHTS))]
    tasks = [short(task) for task in tasks] if exact else tasks
    base, diagonal = numbers(50, FEATURES), (numbers(51, FEATURES).square() * 64).ceil() / 64
    scale = [1 / n if reduction == "mean" else 1.0 for n in examples]
    folder = write_model(tmp_path / "base", {"w": base})
    first = 1 / 8 if reduction == "mean" else 1.0
    gm.Curvature({"w": diagonal}, 8).save(folder / "curvature")
    mode, precision = base, diagonal * first
    for number, stage in enumerate(STAGES):
        models = []
        for t in stage:
            tuned = trained([(scale[t], tasks[t])], torch.diag(precision), mode)
            path = write_model(tmp_path / f"tuned-{t}", {"w": tuned})
            gm.Curvature({"w": tasks[t].hessian(base).diagonal()}, examples[t]).save(path / "curvature")
            models.append({"model": str(path), "weight": WEIGHTS[t]})
        recipe = {
            "method": "gradient-matching",
            "base": str(folder),
            "models": models,
            "damping": 0.0,
            "reduction": reduction,
            "output": {"curvature": True},
        }
        folder = tmp_path / f"merged-{number}"
        gm.merge(recipe, folder)
        mode = read_model(folder)["w"]
        precision = getattr(gm.Curvature.load(folder), reduction)()["w"].double()
        assert mode.dtype == torch.float64
    weights = [w * s for w, s in zip(WEIGHTS, scale, strict=True)]
    joint = trained(list(zip(weights, tasks, strict=True)), torch.diag(diagonal * first), base)
    whole = diagonal * first + sum(w * t.hessian(base).diagonal() for w, t in zip(weights, tasks, strict=True))
    assert (mode - joint).abs().max() < tolerance
    assert torch.allclose(precision, whole, rtol=tolerance)
