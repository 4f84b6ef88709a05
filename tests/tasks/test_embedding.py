"""Task embedding: sentence-transformers folders on pairs with scores, and on positives with negatives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import gradmerge as gm
from gradmerge.errors import InputError
from gradmerge.tasks import load_task
from tests.tasks.making import sentences, write_jsonl, write_sentence_model


class Slow:
    """An independent implementation: one text after the other, without padding, in float64."""

    def __init__(self, folder: Path, pooling: str | list[str] = "mean", first: str = "") -> None:
        self.model = AutoModel.from_pretrained(folder / first, dtype=torch.float64).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder / first)
        self.pooling = pooling
        self.first = f"{first}/" if first else ""

    def embed(self, text: str) -> Tensor:
        ids = self.tokenizer(text, truncation=True, max_length=16)["input_ids"]
        hidden = self.model(torch.tensor([ids])).last_hidden_state[0]
        how = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0), "lasttoken": hidden[-1]}
        vector = torch.cat([how[mode] for mode in ([self.pooling] if isinstance(self.pooling, str) else self.pooling)])
        return vector / vector.norm()

    def cosines(self, row: dict[str, Any]) -> Tensor:
        texts = [row[name] for name in ("anchor", "positive", "negative", "negative_2") if name in row]
        first, *others = [self.embed(text) for text in texts]
        return torch.stack([first @ other for other in others])

    def loss(self, row: dict[str, Any]) -> Tensor:
        cosines = self.cosines(row)
        if "negative" in row:
            return -(cosines * 20).log_softmax(0)[0]
        return (cosines[0] - row["score"]).square()

    def gradients(self, row: dict[str, Any]) -> dict[str, Tensor]:
        named = {self.first + name: p for name, p in self.model.named_parameters()}
        found = torch.autograd.grad(self.loss(row), list(named.values()), allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


def pairs(count: int = 9, seed: int = 0) -> list[dict[str, Any]]:
    one, two = sentences(count, seed), sentences(count, seed + 100, longest=20)
    return [
        {"anchor": a, "positive": b, "score": round((i * 7 % count) / count, 3)}
        for i, (a, b) in enumerate(zip(one, two, strict=True))
    ]


def triplets(count: int = 7, negatives: int = 2) -> list[dict[str, Any]]:
    names = ["anchor", "positive", "negative", "negative_2"][: 2 + negatives]
    texts = [sentences(count, seed) for seed in range(len(names))]
    return [dict(zip(names, row, strict=True)) for row in zip(*texts, strict=True)]


DATA = {"scores": pairs(), "negative": triplets(negatives=1), "negatives": triplets()}
FOLDERS: dict[str, dict[str, Any]] = {
    "mean": {},
    "transformer in a folder": {"first": "0_Transformer", "pooling": "max"},
    "two": {"pooling": ["cls", "mean"]},
    "decoder": {"pooling": "lasttoken", "kind": "llama"},
}


@pytest.mark.parametrize(
    ("kind", "data"), [*((kind, "negatives") for kind in FOLDERS), ("mean", "scores"), ("two", "negative")]
)
def test_curvature_is_the_sum_over_examples_of_squared_gradients(kind: str, data: str, tmp_path: Path) -> None:
    settings = FOLDERS[kind]
    folder = write_sentence_model(tmp_path / "model", **settings)
    source = write_jsonl(tmp_path / "data.jsonl", DATA[data])
    result = gm.estimate_curvature(
        folder, source, out=tmp_path / "curvature", dtype="float64", batch_size=4, device="cpu", progress=False
    )
    assert isinstance(result, gm.Estimate) and result.task == "embedding" and result.examples == len(DATA[data])
    found = gm.Curvature.load(tmp_path / "curvature")
    slow = Slow(folder, settings.get("pooling", "mean"), settings.get("first", ""))
    every = [slow.gradients(row) for row in DATA[data]]
    want = {name: sum((g[name].square() for g in every), torch.zeros(())) for name in every[0]}
    assert set(found) == set(want)
    largest = max(float(value.max()) for value in want.values())
    for name, value in want.items():
        torch.testing.assert_close(found[name].double(), value, rtol=2e-6, atol=1e-9 * largest, msg=name)
    with gm.open_checkpoint(folder) as opened:
        assert set(found) <= set(opened.tensors)


def test_scored_pairs_are_evaluated_by_the_correlation_of_ranks(tmp_path: Path) -> None:
    folder = write_sentence_model(tmp_path / "model")
    rows = [row | {"score": round(row["score"], 1)} for row in pairs(12)]  # with ties
    found = gm.evaluate(folder, write_jsonl(tmp_path / "d.jsonl", rows), dtype="float64", device="cpu", progress=False)
    told = [Slow(folder).cosines(row)[0].item() for row in rows]
    true = [row["score"] for row in rows]
    assert found["spearman_r"] == pytest.approx(stats.spearmanr(told, true).statistic, abs=1e-9)
    assert found["mse"] == pytest.approx(sum((t - y) ** 2 for t, y in zip(told, true, strict=True)) / 12, abs=1e-6)
    assert found["task"] == "embedding" and found["examples"] == 12


def test_candidates_are_evaluated_by_the_place_of_the_positive(tmp_path: Path) -> None:
    folder = write_sentence_model(tmp_path / "model")
    rows = triplets(12)
    found = gm.evaluate(folder, write_jsonl(tmp_path / "d.jsonl", rows), dtype="float64", device="cpu", progress=False)
    every = [Slow(folder).cosines(row).tolist() for row in rows]
    places = [sum(other >= one[0] for other in one) for one in every]
    assert found["accuracy"] == pytest.approx(places.count(1) / 12)
    assert found["mean_reciprocal_rank"] == pytest.approx(sum(1 / place for place in places) / 12)
    losses = [math.log(sum(math.exp(20 * (other - one[0])) for other in one)) for one in every]
    assert found["loss_per_example"] == pytest.approx(sum(losses) / 12, rel=1e-6)


def test_a_preview_runs_merges_of_embedding_models(tmp_path: Path) -> None:
    base = write_sentence_model(tmp_path / "base")
    tuned = write_sentence_model(tmp_path / "a", 1, like=base)
    data = write_jsonl(tmp_path / "a.jsonl", pairs(8))
    recipe = {"method": "task-arithmetic", "base": str(base), "models": [str(tuned)]}
    found = gm.preview(recipe, data={"a": str(data)}, weights="1", progress=False)
    alone = gm.evaluate(tuned, data, progress=False)
    assert found.rows[0].values["a"] == pytest.approx(alone["spearman_r"], abs=1e-6)


def test_pairs_may_lack_scores_and_the_prompt_of_a_folder_is_put_before_every_text(tmp_path: Path) -> None:
    folder = write_sentence_model(tmp_path / "model")
    rows = [{"query": text, "positive": text} for text in sentences(3)]
    loaded = load_task(folder, write_jsonl(tmp_path / "pairs.jsonl", rows))
    assert next(loaded.batches())["labels"].tolist() == [1, 1, 1] and loaded.notes, (
        "without scores, cosines are to be 1"
    )
    plain = gm.evaluate(folder, write_jsonl(tmp_path / "d.jsonl", pairs()), progress=False)
    settings = {"prompts": {"query": "what is "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    prompted = gm.evaluate(folder, tmp_path / "d.jsonl", progress=False)
    rows = [row | {"anchor": f"what is {row['anchor']}", "positive": f"what is {row['positive']}"} for row in pairs()]
    (folder / "config_sentence_transformers.json").write_text("{}")
    written = gm.evaluate(folder, write_jsonl(tmp_path / "e.jsonl", rows), progress=False)
    assert prompted == written != plain


def test_unsupported_models_and_data_are_refused(tmp_path: Path) -> None:
    def check(rows: list[dict[str, Any]], folder: Path, **loading: Any) -> None:
        with pytest.raises(InputError):
            gm.evaluate(folder, write_jsonl(tmp_path / "d.jsonl", rows), progress=False, **loading)

    folder = write_sentence_model(tmp_path / "model")
    check([pairs()[0] | {"score": 4.5}], folder)
    check([pairs()[0] | {"score": "much"}], folder)
    check(pairs(), write_sentence_model(tmp_path / "weighted", pooling="weightedmean"))
    with pytest.raises(InputError, match="kronecker"):
        gm.estimate_curvature(folder, write_jsonl(tmp_path / "d.jsonl", pairs()), out=tmp_path / "k", kind="kronecker")
    assert not list(tmp_path.glob("k*"))
    with pytest.raises(InputError):
        gm.remove(folder, tmp_path / "out", forget=tmp_path / "d.jsonl", retain=tmp_path / "d.jsonl", progress=False)
    assert not (tmp_path / "out").exists()
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    check(pairs(), folder)
    (folder / "modules.json").unlink()
    check(pairs(), folder, task="embedding")
