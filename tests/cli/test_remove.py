"""`gradmerge remove --forget --retain` as a user runs it: folders in, a folder out."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForSequenceClassification

import gradmerge as gm

from ..making import random_curvature, read_model, run, three_models
from ..tasks.making import sentences, tiny_bert_checkpoint, write_jsonl

remove = partial(run, "remove")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remove")
    tiny_bert_checkpoint(folder / "base")
    for seed, (name, label) in enumerate((("retain", 0), ("forget", 1))):
        texts = sentences(12 if label else 40, seed)
        rows = [{"text": text, "label": label or place % 2} for place, text in enumerate(texts)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


def given(place: Path, base: str = "base", *more: str | int) -> list[Any]:
    sources = ["--forget", place / "forget.jsonl", "--retain", place / "retain.jsonl"]
    return ["--base", place / base, *sources, "--batch-size", 16, *more]


def record(out: Path) -> Any:
    return json.loads((out / "gradmerge.json").read_text())["removal"]


def test_a_folder_is_written_like_the_base_with_a_record_a_card_and_a_report(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    remove(*given(place), "--budget", "5%", "--retain-size", 400, "-o", out)
    before, after = read_model(place / "base"), read_model(out)
    assert {n: (v.dtype, v.shape) for n, v in before.items()} == {n: (v.dtype, v.shape) for n, v in after.items()}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    facts = record(out)
    assert facts["method"] == "influence" and facts["budget"] == 0.05 and facts["until"] is None
    assert (facts["forget_rows"], facts["retain_rows"], facts["held_out_rows"], facts["retain_size"]) == (
        12,
        36,
        4,
        400,
    )
    [step] = facts["steps"]
    assert facts["s"] == step["s"] > 0
    assert 0 < facts["after"]["retain"] <= 1.05 * facts["before"]["retain"]
    assert facts["used"] == pytest.approx(facts["after"]["retain"] / facts["before"]["retain"] - 1)
    # The losses on the forget set are those of the models, computed by another command.
    for when, folder in (("before", place / "base"), ("after", out)):
        found = gm.evaluate(folder, place / "forget.jsonl", progress=False)
        assert facts[when]["forget"] == pytest.approx(found["loss_per_example"], rel=1e-4)
        error = found["standard_errors"]["loss_per_example"]
        assert facts["standard_errors"][when]["forget"] == pytest.approx(error, rel=1e-4)
    assert facts["after"]["forget"] > facts["before"]["forget"]
    assert (out / "report.html").stat().st_size > 10_000
    assert (out / "vocab.txt").read_bytes() == (place / "base" / "vocab.txt").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    BertForSequenceClassification.from_pretrained(out)


def test_python_and_the_command_line_write_the_same_bytes_and_json_has_the_record(place: Path, tmp_path: Path) -> None:
    told = json.loads(remove(*given(place, "base", "--json"), "-o", tmp_path / "one").stdout)
    sources: Any = {"forget": place / "forget.jsonl", "retain": str(place / "retain.jsonl")}
    result = gm.remove(place / "base", tmp_path / "two", **sources, batch_size=16, progress=False)
    assert result.output == tmp_path / "two" and result.used <= 0.02
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert {key: told[key] for key in result.facts()} == json.loads(json.dumps(result.facts()))
    written = record(tmp_path / "two")
    assert written["steps"] == told["steps"]


def test_several_steps_stop_at_the_loss_on_unseen_rows(place: Path, tmp_path: Path) -> None:
    texts = sentences(12, 5)
    files = [write_jsonl(tmp_path / f"{y}.jsonl", [{"text": text, "label": y} for text in texts]) for y in range(2)]
    losses = [gm.evaluate(place / "base", file, progress=False)["loss_per_example"] for file in files]
    forget, unseen = (file for _, file in sorted(zip(losses, files, strict=True)))
    start = ["--base", place / "base", "--forget", forget, "--retain", place / "retain.jsonl", "--budget", "50%"]
    remove(*start, "--steps", 3, "--unseen", unseen, "-o", tmp_path / "unseen")
    facts = record(tmp_path / "unseen")
    assert facts["until"] == pytest.approx(max(losses), rel=1e-4)
    assert min(losses) < facts["after"]["forget"] <= facts["until"]
    assert facts["unseen"] == str(unseen) and facts["unseen_rows"] == 12


def test_bfloat16_keeps_its_dtypes_and_the_budget(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "base", tmp_path / "base")
    BertForSequenceClassification.from_pretrained(place / "base").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    sources: Any = {"forget": place / "forget.jsonl", "retain": place / "retain.jsonl"}
    result = gm.remove(tmp_path / "base", tmp_path / "out", **sources, budget=0.05, progress=False)
    after = read_model(tmp_path / "out")
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    assert result.used <= 0.05
    loss = gm.evaluate(tmp_path / "out", place / "forget.jsonl", dtype="float32", progress=False)["loss_per_example"]
    assert result.after.forget == pytest.approx(loss, rel=1e-4) and loss > result.before.forget


def test_of_an_adapter_the_adapter_alone_is_moved_and_written(place: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    base = BertForSequenceClassification.from_pretrained(place / "base")
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    more = ["--model-args", f"tokenizer={place / 'base'}"]
    remove(*given(place)[2:], *more, "--base", tmp_path / "adapter", "-o", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "out"))
    assert before.keys() == after.keys() and not (tmp_path / "out" / "model.safetensors").exists()
    assert any(not torch.equal(before[name], after[name]) for name in before if "lora" in name)


@pytest.mark.parametrize(
    "more",
    [
        "--steps 2",
        "--model x",
        "--set damping=1",
        "--dtype bfloat16",
        "--task causal-lm",
    ],
)
def test_wrong_requests_end_with_status_2_and_write_nothing(place: Path, tmp_path: Path, more: str) -> None:
    remove(*given(place), *more.split(), "-o", tmp_path / "out", status=2)
    assert not list(tmp_path.iterdir())


def test_rows_in_both_sets_rows_without_labels_and_too_few_rows_are_refused(place: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (place / "forget.jsonl").read_text().splitlines()]
    both = write_jsonl(tmp_path / "both.jsonl", [*rows[:3], {"text": "none of them", "label": 0}] * 5)
    bare = write_jsonl(tmp_path / "bare.jsonl", [{"text": row["text"]} for row in rows])
    single = write_jsonl(tmp_path / "single.jsonl", [{"text": "only one", "label": 0}])
    start = ["--base", place / "base", "--forget", place / "forget.jsonl", "-o", tmp_path / "out"]
    said = remove(*start, "--retain", both, status=2).output
    assert "3 of the 12" in " ".join(said.split())
    for retain in (bare, single):
        remove(*start, "--retain", retain, status=2)
    assert "--retain" in remove(*start, status=2).output and not (tmp_path / "out").exists()


def test_a_step_that_is_too_long_is_refused_or_noted(tmp_path: Path) -> None:
    folders, states = three_models(tmp_path)
    for seed, (folder, state) in enumerate(zip(folders, states, strict=True)):
        sums = random_curvature(seed, state).sum()
        if seed == 0:  # the base has no curvature for one layer
            sums["layers.0.linear.weight"][:] = 0.0
        gm.Curvature(sums, 100).save(folder / "curvature")
    words = ["--base", folders[0], "--model", folders[1]]
    unbounded = ["--set", "damping=1e-10", "--set", "cap=none", "-o", tmp_path / "out"]
    assert not remove(*words, "-o", tmp_path / "bounded").stderr
    remove(*words, *unbounded, status=2)
    assert not (tmp_path / "out").exists()
    (note,) = json.loads(remove(*words, *unbounded, "--json", "--accept-untrusted").stdout)["notes"]
    assert json.loads((tmp_path / "out" / "gradmerge.json").read_text())["notes"] == [note]
