"""Draws from the merged posterior, and merging on top of a merge."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import gradmerge as gm

from ..making import random_curvature, random_state, read_model, three_models, write_model

pytestmark = pytest.mark.filterwarnings("ignore:.*a draw is about:UserWarning")


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """A merge of two models with its curvature."""
    folders, states = three_models(tmp_path, torch.float64)
    for seed, (folder, state) in enumerate(zip(folders, states, strict=True)):
        random_curvature(seed, state).save(folder / "curvature")
    (folders[0] / "tokenizer.json").write_text("{}")
    recipe = {"method": "gradient-matching", "base": str(folders[0]), "models": [str(f) for f in folders[1:]]}
    gm.merge(recipe | {"damping": 0.5, "output": {"curvature": True}}, tmp_path / "merged")
    return tmp_path / "merged"


def write_merged(folder: Path, state: dict[str, Tensor], precision: dict[str, Tensor], **config: Any) -> Path:
    """A merged model by hand."""
    write_model(folder, state, config=config)
    gm.Curvature(precision, 10).save(folder / "curvature")
    return folder


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_draws_have_the_mean_and_the_variance_of_the_posterior(merged: Path, temperature: float) -> None:
    n = 800
    centre, precision = read_model(merged), gm.Curvature.load(merged).sum()
    draws = list(gm.sample_posterior(merged, n, temperature=temperature, seed=3))
    for name, mean in centre.items():
        values = np.stack([draw[name].numpy() for draw in draws])
        variance = temperature / precision[name].double().numpy()
        off = (values.mean(0) - mean.numpy()) / np.sqrt(variance / n)
        spread = (values.var(0, ddof=1) / variance - 1) / math.sqrt(2 / (n - 1))
        assert np.abs(off).max() < 5
        assert np.abs(spread).max() < 5.5
        assert abs((off**2).mean() - 1) < 5 * math.sqrt(2 / off.size)


def test_a_draw_is_the_merged_model_plus_scaled_normal_numbers(merged: Path) -> None:
    from gradmerge.engine.randomness import standard_normal

    centre, curvature = read_model(merged), gm.Curvature.load(merged)
    settings: dict[str, Any] = {"temperature": 0.3, "seed": 5, "damping": 2.0}
    for reduction in ("sum", "mean"):
        precision = getattr(curvature, reduction)()
        for sample, draw in enumerate(gm.sample_posterior(merged, 2, reduction=reduction, **settings)):
            for name, value in draw.items():
                noise = standard_normal(5, sample, name, 0, value.numel()).reshape(value.shape)
                want = centre[name] + (0.3 / (precision[name].double() + 2.0)).sqrt() * noise
                assert torch.allclose(value, want, rtol=1e-6, atol=1e-12)


def test_draws_depend_on_the_seed_and_the_number_and_on_nothing_else(merged: Path, monkeypatch) -> None:
    first = list(gm.sample_posterior(merged, 3, seed=1, threads=1))
    monkeypatch.setattr("gradmerge.api.posterior.BLOCK", 37)
    again = list(gm.sample_posterior(merged, 2, seed=1, threads=3))
    other = next(gm.sample_posterior(merged, 1, seed=2))
    for name, value in first[0].items():
        assert torch.equal(value, again[0][name]) and torch.equal(first[1][name], again[1][name])
        assert not torch.equal(value, first[1][name]) and not torch.equal(value, other[name])


def test_temperature_zero_gives_the_merged_model_to_the_last_bit(merged: Path, tmp_path: Path) -> None:
    for draw in gm.sample_posterior(merged, 2, temperature=0):
        assert all(torch.equal(draw[name], value) for name, value in read_model(merged).items())
    (written,) = gm.sample_posterior(merged, 1, temperature=0.0, out=tmp_path / "draws")
    assert (written / "model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()


def test_models_are_written_whole_with_config_and_tokenizer(merged: Path, tmp_path: Path) -> None:
    out = tmp_path / "draws"
    written = gm.sample_posterior(merged, 3, seed=7, out=out)
    assert written == [out / "0", out / "1", out / "2"]
    assert sorted(p.name for p in out.iterdir()) == ["0", "1", "2", "gradmerge.json"]
    for folder, draw in zip(written, gm.sample_posterior(merged, 3, seed=7), strict=True):
        assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert all(torch.equal(draw[name], value) for name, value in read_model(folder).items())
    with pytest.raises(gm.InputError, match="draws"):
        gm.sample_posterior(merged, 1, out=out)
    gm.sample_posterior(merged, 1, out=out, force=True)
    assert sorted(p.name for p in out.iterdir()) == ["0", "gradmerge.json"]


def test_nothing_is_left_of_a_failed_write_and_the_merged_model_is_not_overwritten(
    merged: Path, tmp_path: Path, monkeypatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("full")

    before = read_model(merged)
    with pytest.raises(gm.InputError, match=str(merged)):
        gm.sample_posterior(merged, 1, out=merged, force=True)
    monkeypatch.setattr("gradmerge.api.posterior.copy_sidecars", fail)
    with pytest.raises(OSError, match="full"):
        gm.sample_posterior(merged, 2, out=tmp_path / "draws")
    assert not list(tmp_path.glob("draws*"))
    assert all(torch.equal(value, before[name]) for name, value in read_model(merged).items())


def test_entries_without_precision_stay_and_a_warning_counts_them(tmp_path: Path) -> None:
    state = {"a.weight": torch.full((4, 5), -0.0), "b.weight": torch.ones(7), "steps": torch.arange(3)}
    precision = {"a.weight": torch.ones(4, 5), "b.weight": torch.full((7,), 4.0)}
    precision["a.weight"][1:3] = 0.0
    folder = write_merged(tmp_path / "m", state, precision)
    with pytest.warns(UserWarning, match="10 of 27"):
        draws = gm.sample_posterior(folder, 2)
    for draw in draws:
        assert all(bool(torch.isfinite(value).all()) for value in draw.values())
        assert torch.equal(draw["a.weight"][1:3], state["a.weight"][1:3])
        assert (draw["a.weight"][0] != 0).all() and (draw["b.weight"] != 1).all()
        assert torch.equal(draw["steps"], state["steps"])
    moved = next(gm.sample_posterior(folder, 1, damping=1.0))
    assert (moved["a.weight"] != 0).all()


def test_tensors_that_the_merge_left_out_stay_and_are_named(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(4), "classifier.weight": torch.ones(3)}
    folder = write_merged(tmp_path / "m", state, {"a.weight": torch.full((4,), 9.0)})
    with pytest.warns(UserWarning, match=r"(?s)3 entries.*classifier\.weight"):
        draw = next(gm.sample_posterior(folder, 1, damping=1.0))
    assert torch.equal(draw["classifier.weight"], state["classifier.weight"])


def test_tied_weights_that_are_stored_twice_stay_tied(tmp_path: Path) -> None:
    embedding = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    precision = {"model.embed_tokens.weight": torch.full((6, 4), 2.0), "lm_head.weight": torch.full((6, 4), 3.0)}
    for name, tied in (("tied", True), ("untied", False)):
        folder = write_merged(tmp_path / name, state, precision, tie_word_embeddings=tied)
        draw = next(gm.sample_posterior(folder, 1))
        assert torch.equal(draw["lm_head.weight"], draw["model.embed_tokens.weight"]) is tied


def test_draws_can_be_wider_than_the_merged_model(tmp_path: Path) -> None:
    state = {"a.weight": torch.ones(1000, dtype=torch.bfloat16)}
    folder = write_merged(tmp_path / "m", state, {"a.weight": torch.full((1000,), 1e10)})
    assert torch.equal(next(gm.sample_posterior(folder, 1))["a.weight"], state["a.weight"])
    (written,) = gm.sample_posterior(folder, 1, dtype="float32", out=tmp_path / "draws")
    values = read_model(written)["a.weight"]
    assert values.dtype == torch.float32
    assert 0.9e-5 < (values - 1).std().item() < 1.1e-5
    assert json.loads((written / "config.json").read_text())["dtype"] == "float32"


def test_a_posterior_so_wide_that_nothing_of_the_model_is_left_is_warned_of(tmp_path: Path) -> None:
    folder = write_merged(tmp_path / "m", {"a.weight": torch.ones(50)}, {"a.weight": torch.full((50,), 1e-10)})
    with pytest.warns(UserWarning, match=r"7\.07e\+05"):
        gm.sample_posterior(folder, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm.sample_posterior(folder, 1, damping=100.0)
        gm.sample_posterior(folder, 1, temperature=0.0)


def test_the_smallest_number_as_precision_gives_finite_draws_or_an_error(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float16):
        state = {"a.weight": torch.ones(50, dtype=dtype)}
        folder = write_merged(tmp_path / str(dtype), state, {"a.weight": torch.full((50,), 1e-45)})
        if dtype == torch.float32:
            assert torch.isfinite(next(gm.sample_posterior(folder, 1))["a.weight"]).all()
        else:
            with pytest.raises(gm.InputError, match=r"a\.weight.*float16"):
                gm.sample_posterior(folder, 1)


@pytest.mark.parametrize(
    "settings",
    [
        *({"n": 0}, {"n": 1.5}, {"temperature": -1.0}, {"temperature": math.inf}, {"damping": -1e-9}, {"seed": "x"}),
        *({"reduction": "median"}, {"dtype": "int8"}),
    ],
)
def test_a_wrong_setting_is_refused_at_the_call(merged: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(gm.InputError, match=f"^{min(settings)}"):
        gm.sample_posterior(merged, **{"n": 1} | settings)


def test_a_model_without_curvature_or_with_that_of_another_is_refused(tmp_path: Path) -> None:
    state = random_state(0)
    plain = write_model(tmp_path / "plain", state)
    save_file(state, tmp_path / "alone.safetensors")
    for model in (plain, tmp_path / "alone.safetensors", tmp_path / "nowhere"):
        with pytest.raises(gm.InputError, match=str(model)):
            gm.sample_posterior(model, 1)
    turned = {name: value.T.contiguous() if value.dim() == 2 else value for name, value in state.items()}
    for number, (odd, named) in enumerate(((turned, r"embed\.weight: \[8, 50\]"), ({"other": torch.ones(3)}, "other"))):
        random_curvature(0, odd).save(plain / "curvature", force=number > 0)
        with pytest.raises(gm.InputError, match=named):
            gm.sample_posterior(plain, 1)


def test_precision_that_is_negative_is_refused(merged: Path) -> None:
    state = {n: torch.full(v.shape, -1.0) for n, v in read_model(merged).items()}
    header = {"format": "gradmerge-curvature/1", "examples": "5", "likelihood": "empirical"}
    save_file(state, merged / "curvature" / "curvature.safetensors", header)
    with pytest.raises(gm.InputError, match="negative"):
        gm.sample_posterior(merged, 1)


# Merging on top of a merge. The losses are ½‖X_t θ − y_t‖²; the models to come are tuned from the merged one, under
# ½‖θ − θ̂‖² in the merged precision, and merged on top with that precision as the base's curvature.

FEATURES, TASKS = 6, 5
Task = tuple[Tensor, Tensor]


def regression(seed: int, diagonal: bool, exact: bool) -> Task:
    """XᵀX and Xᵀy of one task; ``diagonal``: its columns are orthogonal, ``exact``: float32 holds its values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randn(12, generator=generator, dtype=torch.float64)
    if not diagonal:
        return x.T @ x, x.T @ y
    x = torch.diag(x.diagonal())
    if exact:
        x = (x * 16).round() / 16
    return x.T @ x, x.T @ y[:FEATURES]


def trained(tasks: list[tuple[float, Task]], prior: Tensor, centre: Tensor) -> Tensor:
    """argmin Σ α_t ½‖X_t θ − y_t‖² + ½‖θ − centre‖²_prior."""
    matrix = prior + sum(weight * gram for weight, (gram, _) in tasks)
    right = prior @ centre + sum(weight * moment for weight, (_, moment) in tasks)
    return torch.linalg.solve(matrix, right)


WEIGHTS = [1.0, 0.5, 2.0, 0.75, 1.0]
STAGES = [[0, 1], [2], [3, 4]]


def start() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    prior = torch.rand(FEATURES, generator=generator, dtype=torch.float64)
    base = torch.randn(FEATURES, generator=generator, dtype=torch.float64)
    return base, (prior * 64).ceil() / 64


def test_merges_on_top_of_merges_end_at_the_jointly_trained_model_with_full_matrices() -> None:
    tasks = [regression(seed, diagonal=False, exact=False) for seed in range(TASKS)]
    base, diagonal = start()
    mode, precision = base, torch.diag(diagonal)
    for stage in STAGES:
        weights = [WEIGHTS[t] for t in stage]
        tuned = [trained([(1.0, tasks[t])], precision, mode) for t in stage]
        mode = gm.gradient_matching_full(mode, tuned, precision, [tasks[t][0] for t in stage], weights)
        precision = precision + sum(WEIGHTS[t] * tasks[t][0] for t in stage)
    joint = trained(list(zip(WEIGHTS, tasks, strict=True)), torch.diag(diagonal), base)
    assert (mode - joint).abs().max() < 1e-9
    forgetful = base + sum(
        w * (trained([(1.0, t)], torch.diag(diagonal), base) - base) for w, t in zip(WEIGHTS, tasks, strict=True)
    )
    assert (forgetful - joint).abs().max() > 0.1


@pytest.mark.parametrize(
    ("reduction", "exact", "tolerance"), [("sum", True, 1e-9), ("sum", False, 1e-6), ("mean", False, 1e-6)]
)
def test_merges_on_top_of_merges_end_at_the_jointly_trained_model_on_disk(
    tmp_path: Path, reduction: str, exact: bool, tolerance: float
) -> None:
    """Every stage starts from the folder that the last one wrote. Curvature files are float32; ``exact`` values fit.

    With the mean, a task of N examples has the curvature XᵀX / N and counts as its mean loss does.
    """
    examples = [3, 4, 9, 4, 2]
    tasks = [regression(seed, diagonal=True, exact=exact) for seed in range(TASKS)]
    base, diagonal = start()
    scale = [1 / n if reduction == "mean" else 1.0 for n in examples]
    folder = write_model(tmp_path / "base", {"w": base})
    first = 1 / 8 if reduction == "mean" else 1.0
    gm.Curvature({"w": diagonal}, 8).save(folder / "curvature")
    mode, precision = base, diagonal * first
    for number, stage in enumerate(STAGES):
        models = []
        for t in stage:
            reduced = (tasks[t][0] * scale[t], tasks[t][1] * scale[t])
            tuned = trained([(1.0, reduced)], torch.diag(precision), mode)
            path = write_model(tmp_path / f"tuned-{t}", {"w": tuned})
            gm.Curvature({"w": tasks[t][0].diagonal()}, examples[t]).save(path / "curvature")
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
    whole = diagonal * first + sum(w * t[0].diagonal() for w, t in zip(weights, tasks, strict=True))
    assert (mode - joint).abs().max() < tolerance
    assert torch.allclose(precision, whole, rtol=tolerance)
