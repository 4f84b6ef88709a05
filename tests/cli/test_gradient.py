"""`gradmerge gradient` as a user runs it, and the digest that ties a gradient to a model."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradmerge as gm
from gradmerge.tasks import load_task

from ..curvature import slow
from ..making import read_model, run, write_recipe
from ..tasks.making import (
    labelled,
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_t5_checkpoint,
    tiny_vit_checkpoint,
    write_jsonl,
)

DATA = {"bert": "labels.jsonl", "gpt2": "labels.jsonl", "t5": "pairs.jsonl", "vit": "images"}
OUTPUT = {"bert": "classes", "gpt2": "next-token", "t5": "tokens", "vit": "classes"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gradient")
    tiny_bert_checkpoint(folder / "bert", labels=3)
    tiny_bert_checkpoint(folder / "other", labels=3, seed=1)
    tiny_gpt2_checkpoint(folder / "gpt2")
    tiny_t5_checkpoint(folder / "t5")
    tiny_vit_checkpoint(folder / "vit")
    texts = sentences(7)
    write_jsonl(folder / "labels.jsonl", labelled(7, 3))
    write_jsonl(folder / "pairs.jsonl", [{"source": a, "target": b} for a, b in pairwise(texts)])
    generator = np.random.default_rng(0)
    for number in range(3):
        (folder / "images" / str(number)).mkdir(parents=True)
        for name in "ab":
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / str(number) / f"{name}.png")
    return folder


def by_hand(place: Path, name: str) -> tuple[dict[str, Tensor], float, int]:
    """The slow loop over the data's rows in float64, by the names of the checkpoint."""
    loaded = load_task(place / name, place / DATA[name], device="cpu", dtype="float64")
    total: dict[str, Tensor] = {}
    loss = 0.0
    for batch in loaded.batches(1):
        row = {key: value[0] for key, value in batch.items() if key != "attention_mask"}
        one = slow.loss_of(slow.logits_of(loaded.model, row), row["labels"], OUTPUT[name])
        for key, value in slow.gradients(loaded.model, one).items():
            total[key] = total[key] + value if key in total else value
        loss += float(one.detach())
    stored, weights = read_model(place / name), dict(loaded.model.named_parameters())
    named = {
        next(n for n, w in stored.items() if w.shape == v.shape and torch.equal(w, weights[own].float())): v
        for own, v in total.items()
    }
    return named, loss, loaded.examples


def assert_near(got: Any, want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    largest = max(float(value.abs().max()) for value in want.values())
    for name, value in want.items():
        assert float((got[name].double() - value).abs().max()) <= 2e-5 * largest, name


@pytest.mark.parametrize("name", DATA)
def test_what_is_written_is_the_slow_loop_under_the_names_of_the_checkpoint(
    place: Path, name: str, tmp_path: Path
) -> None:
    arguments = [place / name, "--data", place / DATA[name], "--device", "cpu"]
    facts = json.loads(run("gradient", *arguments, "--batch-size", 4, "-o", tmp_path / "g", "--json").stdout)
    want, loss, examples = by_hand(place, name)
    got = gm.Gradient.load(tmp_path / "g")
    assert got.keys() == read_model(place / name).keys()
    assert_near(got, want)
    assert got.loss == pytest.approx(loss, rel=1e-5) and got.examples == examples
    assert (facts["loss"], facts["examples"], facts["tensors"]) == (got.loss, examples, len(want))
    assert facts["norm"] == pytest.approx(got.norm) and got.model == name
    run("gradient", *arguments, "--batch-size", 1, "-o", tmp_path / "g", "--force", "--quiet")
    assert_near(gm.Gradient.load(tmp_path / "g"), want)


def test_from_python_a_folder_gives_the_same_with_and_without_writing(place: Path, tmp_path: Path) -> None:
    written = gm.estimate_gradient(place / "vit", place / "images", out=tmp_path / "g", device="cpu", progress=False)
    alone = gm.estimate_gradient(place / "vit", place / "images", device="cpu", progress=False)
    again = gm.Gradient.load(tmp_path / "g")
    for name, value in again.items():
        assert torch.equal(value, alone[name]) and torch.equal(value, written[name])
    assert again.digest == alone.digest != ""
    loaded = load_task(place / "vit", place / "images", device="cpu")
    module = gm.estimate_gradient(loaded.model, loaded.batches(), out=tmp_path / "m", progress=False)
    assert module.digest == "" and {*module} == {name for name, _ in loaded.model.named_parameters()}
    assert_near(gm.Gradient.load(tmp_path / "m"), {name: value.double() for name, value in again.items()})
    for arguments, options, message in (
        ((loaded.model, loaded.batches()), {"limit": 3}, "limit is an option for a model on disk"),
        ((loaded.model, "data.jsonl"), {}, "must be batches in memory"),
        ((place / "vit", [1]), {}, "must be the path or name of its data"),
        ((place / "vit", place / "images"), {"output": "classes"}, "output is an option for a module"),
        ((loaded.model, loaded.batches()), {"output": "class"}, "did you mean 'classes'"),
    ):
        with pytest.raises(gm.InputError, match=message):
            gm.estimate_gradient(*arguments, **options)  # type: ignore[arg-type]


def test_the_digest_is_that_of_inspect_and_of_a_merges_record(place: Path, tmp_path: Path) -> None:
    models = [place / "bert", place / "other"]
    shown = json.loads(run("inspect", *models, "--digest", "--json").stdout)["models"]
    digests = [fact["digest"] for fact in shown]
    assert digests[0] != digests[1]
    text = run("inspect", *models, "--digest").stdout
    assert all(f"digest {digest}" in text for digest in digests)
    recipe = {"method": "task-arithmetic", "base": str(models[0]), "models": [str(models[1])]}
    run("merge", write_recipe(tmp_path / "r.yml", recipe), "-o", tmp_path / "merged")
    recorded = json.loads((tmp_path / "merged" / "gradmerge.json").read_text())["inputs"]
    assert [entry["digest"] for entry in recorded] == digests
    for model, digest in zip(models, digests, strict=True):
        out = tmp_path / f"gradient-{model.name}"
        text = run("gradient", model, "--data", place / "labels.jsonl", "--device", "cpu", "-o", out).stdout
        assert digest in text and gm.Gradient.load(out).digest == digest


def test_a_model_in_bfloat16_is_differentiated_in_float32(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "bert", tmp_path / "bert")
    shutil.copy(place / "labels.jsonl", tmp_path)
    narrow = {name: value.bfloat16() for name, value in read_model(place / "bert").items()}
    save_file(narrow, tmp_path / "bert" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    found = gm.estimate_gradient(tmp_path / "bert", tmp_path / "labels.jsonl", device="cpu", progress=False)
    assert found.notes == ["the model is stored as BF16 and computes in float32 here"]
    assert_near(found, by_hand(tmp_path, "bert")[0])
    asked = gm.estimate_gradient(
        tmp_path / "bert", tmp_path / "labels.jsonl", device="cpu", dtype="bfloat16", progress=False
    )
    assert not asked.notes and asked.loss != found.loss


def test_an_adapter_has_the_gradient_of_its_own_tensors(place: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    inner: Any = BertForSequenceClassification.from_pretrained(place / "bert")
    settings = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "dense"], init_lora_weights=False)
    tuned = get_peft_model(inner, settings)
    tuned.save_pretrained(tmp_path / "adapter")
    run("gradient", tmp_path / "adapter", "--data", place / "labels.jsonl", "--device", "cpu", "-o", tmp_path / "g",
        "--tokenizer", place / "bert")  # fmt: skip
    got = gm.Gradient.load(tmp_path / "g")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name: value.shape for name, value in got.items()} == {name: v.shape for name, v in stored.items()}
    shown = json.loads(run("inspect", tmp_path / "adapter", "--digest", "--json").stdout)["models"][0]
    assert got.digest == shown["digest"]
    fresh: Any = BertForSequenceClassification.from_pretrained(place / "bert")
    model: Any = PeftModel.from_pretrained(fresh, str(tmp_path / "adapter"), is_trainable=True).double().eval()
    loaded = load_task(place / "bert", place / "labels.jsonl", device="cpu")
    want: dict[str, Tensor] = {}
    for batch in loaded.batches(1):
        logits = model(input_ids=batch["input_ids"]).logits[0]
        found = slow.gradients(model, slow.loss_of(logits, batch["labels"][0], "classes"))
        for name, value in found.items():
            name = name.replace(".default", "").replace(".modules_to_save", "")
            want[name] = want[name] + value if name in want else value
    assert_near(got, want)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{}/bert", "--data", "{}/nolabels.jsonl"), "label"),
        (("{}/nowhere", "--data", "{}/labels.jsonl"), "nowhere"),
        (("{}/bert", "--data", "{}/labels.jsonl", "--task", "image"), "cannot be loaded for task image"),
        (("{}/bert", "--data", "{}/labels.jsonl", "-o", "{}/bert"), "which would be lost"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_written(
    place: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    write_jsonl(place / "nolabels.jsonl", [{"text": "a film"}])
    filled = [part.format(place) for part in arguments]
    before = sorted(place.rglob("*"))
    result = run("gradient", *filled, *(() if "-o" in filled else ("-o", tmp_path / "g")), "--json", status=2)
    assert message in result.output and json.loads(result.stdout)["status"] == 2
    assert not list(tmp_path.iterdir()) and sorted(place.rglob("*")) == before


def test_a_folder_that_is_not_a_gradient_is_not_replaced(place: Path, tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "thesis.txt").write_text("years of work")
    arguments = ("gradient", place / "bert", "--data", place / "labels.jsonl", "--device", "cpu", "-o", tmp_path / "g")
    result = run(*arguments, "--force", status=2)
    assert "was not written by gradmerge" in result.output and (tmp_path / "g" / "thesis.txt").exists()


def test_help_has_an_example() -> None:
    text = run("gradient", "--help").stdout
    assert "gradmerge gradient ./yelp --data reviews.jsonl" in text and "--limit" in text
