"""`gradmerge refine` as a user runs it: folders in, a folder out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, BertForSequenceClassification, GPT2LMHeadModel

import gradmerge as gm
from gradmerge.curvature.losses import logits_of
from gradmerge.refinement import newton, resuming
from gradmerge.tasks import load_task

from ..making import read_model, run
from ..tasks.making import sentences, tiny_bert_checkpoint, tiny_gpt2_checkpoint, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model near the one that gave the labels, which is a teacher, and rows of two tasks."""
    folder = tmp_path_factory.mktemp("refine")
    tiny_bert_checkpoint(folder / "merged")
    shutil.copytree(folder / "merged", folder / "teacher")
    weights = load_file(folder / "merged" / "model.safetensors")
    for seed, name in enumerate(("a", "b")):
        write_jsonl(folder / f"{name}.jsonl", [{"text": text, "label": 0} for text in sentences(80, seed)])
        loaded = load_task(folder / "merged", folder / f"{name}.jsonl", device="cpu")
        with torch.no_grad():
            logits = torch.cat([logits_of(loaded.model, batch) for batch in loaded.batches(40)])
        side = logits[:, 1] - logits[:, 0]
        labels = (side > side.median()).int().tolist()
        rows = [{"text": text, "label": y} for text, y in zip(sentences(80, seed), labels, strict=True)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    torch.manual_seed(0)
    near = {name: value + 0.02 * torch.randn_like(value) for name, value in weights.items()}
    near["classifier.weight"] *= 4 / near["classifier.weight"].norm()
    save_file(near, folder / "merged" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module", autouse=True)
def short_rounds() -> Iterator[None]:
    """A step a round, to save time: more of them are tried in `tests/refinement/`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(newton, "STEPS", 1)
        yield


def given(place: Path, *names: str) -> list[str]:
    data = [text for name in names or ("a", "b") for text in ("--data", f"{name}={place / name}.jsonl")]
    return [*data, "--batch-size", "80"]


def test_a_folder_is_refined_and_written_as_it_was_with_a_record_a_card_and_a_report(
    place: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = run("refine", place / "merged", *given(place), "-o", out, "--batch-size", 40)
    assert "loss before" in result.output and "accuracy" in result.output
    start, refined = read_model(place / "merged"), read_model(out)
    assert {n: (v.dtype, v.shape) for n, v in start.items()} == {n: (v.dtype, v.shape) for n, v in refined.items()}
    assert any(not torch.equal(start[name], refined[name]) for name in start)
    record = json.loads((out / "gradmerge.json").read_text())
    facts = record["refinement"]
    assert facts["method"] == "newton" and 2 <= len(facts["rounds"]) <= 3
    assert facts["tasks"]["a"]["rows"] == 72 and facts["tasks"]["a"]["held_rows"] == 8
    for task in facts["tasks"].values():
        gained, before, after = task["gained"], task["before"], task["after"]
        for name in ("accuracy", "loss_per_example"):
            assert gained[name]["value"] == pytest.approx(after[name] - before[name]) and gained[name]["error"] > 0
            assert before["standard_errors"][name] > 0
    sums = [one["sum_of_held"] for one in facts["rounds"]]
    assert sums == sorted(sums, reverse=True) and len(set(sums)) == len(sums)
    assert all(step["length"] > 0 for one in facts["rounds"][1:] for step in one["steps"])
    card: Any = ModelCard((out / "README.md").read_text())
    assert "Refined from `merged`" in card.text and str(place) not in card.content
    measured = {(one.dataset_name, one.metric_name): one.metric_value for one in card.data.eval_results}
    for task in ("a", "b"):
        after = facts["tasks"][task]["after"]
        assert measured[f"{task} ({task}.jsonl)", "accuracy"] == pytest.approx(after["accuracy"], rel=1e-5)
        assert f"| `{task} ({task}.jsonl)` | 8 | `accuracy` |" in card.text
    assert [one["rows"] for one in record["evaluations"]] == [8, 8] and card.data.library_name == "transformers"
    assert "Loss on rows held back" in (out / "report.html").read_text()
    assert (out / "vocab.txt").read_bytes() == (place / "merged" / "vocab.txt").read_bytes()
    assert not list(tmp_path.glob("*partial*"))
    BertForSequenceClassification.from_pretrained(out)
    # The record's losses are those of the model that was written, on the rows that were held back.
    again = run("refine", out, *given(place), "-o", tmp_path / "again", "--with", "adamw", "--rounds", 1, "--json")
    first = json.loads(again.output)["rounds"][0]["held"]
    assert first == pytest.approx(facts["rounds"][-1]["held"], rel=1e-4)


def test_python_and_the_command_line_write_the_same_bytes(place: Path, tmp_path: Path) -> None:
    run("refine", place / "merged", *given(place), "-o", tmp_path / "one", "--rounds", 1, "--quiet")
    data = {name: str(place / f"{name}.jsonl") for name in ("a", "b")}
    done = gm.refine(place / "merged", data, out=tmp_path / "two", rounds=1, progress=False, batch_size=80)
    assert done.output == tmp_path / "two" and done.improved
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_adamw_and_rows_of_ones_own_to_judge_by(place: Path, tmp_path: Path) -> None:
    more = ["--valid", f"a={place / 'b.jsonl'}", "--with", "adamw", "--rounds", 1, "--examples", "a=1000", "--json"]
    result = run("refine", place / "merged", *given(place, "a"), *more, "-o", tmp_path / "out")
    found = json.loads(result.output)
    record = json.loads((tmp_path / "out" / "gradmerge.json").read_text())["refinement"]
    assert found["method"] == "adamw" and record["tasks"]["a"]["rows"] == 80 == record["tasks"]["a"]["held_rows"]
    assert record["tasks"]["a"]["examples"] == 1000
    assert len(record["rounds"]) <= 2


def test_bfloat16_shards_keep_their_types_and_places_and_what_is_not_refined_its_bits(
    place: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    model = BertForSequenceClassification.from_pretrained(place / "merged").to(torch.bfloat16)
    model.save_pretrained(start, max_shard_size="5KB")
    shutil.copyfile(place / "merged" / "vocab.txt", start / "vocab.txt")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(place / "merged" / name, start / name)
    shard = next(iter(sorted(start.glob("model-*.safetensors"))))
    tensors = load_file(shard)
    save_file({**tensors, "not.a.parameter": torch.tensor([1.5, -0.0])}, shard, {"format": "pt"})
    index = json.loads((start / "model.safetensors.index.json").read_text())
    index["weight_map"]["not.a.parameter"] = shard.name
    (start / "model.safetensors.index.json").write_text(json.dumps(index))
    run("refine", start, *given(place), "-o", tmp_path / "out", "--rounds", 1, "--quiet")

    def files(folder: Path) -> dict[str, dict[str, Tensor]]:
        return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}

    before, after = files(start), files(tmp_path / "out")
    assert len(before) > 1 and before.keys() == after.keys()
    changed = 0
    for name, tensors in before.items():
        assert {n: (v.dtype, v.shape) for n, v in tensors.items()} == {
            n: (v.dtype, v.shape) for n, v in after[name].items()
        }
        changed += sum(not torch.equal(value, after[name][key]) for key, value in tensors.items())
    assert changed > 10
    assert after[shard.name]["not.a.parameter"].tolist() == [1.5, -0.0]
    BertForSequenceClassification.from_pretrained(tmp_path / "out")
    record = json.loads((tmp_path / "out" / "gradmerge.json").read_text())["refinement"]
    tasks = record["tasks"].values()
    assert sum(t["after"]["loss_per_example"] for t in tasks) < sum(t["before"]["loss_per_example"] for t in tasks)


def test_of_an_adapter_the_adapter_alone_is_refined_and_written(place: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    base = BertForSequenceClassification.from_pretrained(place / "merged")
    torch.manual_seed(0)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    out = tmp_path / "out"
    judged = [text for name in "ab" for text in ("--valid", f"{name}={place / name}.jsonl")]
    more = ["--rounds", 1, "--tokenizer", place / "merged", *judged]
    run("refine", tmp_path / "adapter", *given(place), "-o", out, *more)
    before = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    after = load_file(out / "adapter_model.safetensors")
    assert before.keys() == after.keys() and not (out / "model.safetensors").exists()
    assert all(not torch.equal(before[name], after[name]) for name in before if "lora" in name)
    fresh = BertForSequenceClassification.from_pretrained(place / "merged")
    PeftModel.from_pretrained(fresh, out)
    metrics = gm.evaluate(out, place / "a.jsonl", tokenizer=str(place / "merged"), progress=False)
    assert (
        metrics["loss_per_example"]
        < gm.evaluate(tmp_path / "adapter", place / "a.jsonl", tokenizer=str(place / "merged"), progress=False)[
            "loss_per_example"
        ]
    )
    recipe = {"method": "task-arithmetic", "base": str(place / "merged"), "models": [str(out)]}
    gm.merge(recipe, tmp_path / "again", progress=False)


def test_a_language_model_with_tied_embeddings_is_refined(tmp_path: Path) -> None:
    tiny_gpt2_checkpoint(tmp_path / "gpt2")
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in sentences(12)])
    rows = f"a={tmp_path / 'a.jsonl'}"
    found = run("refine", tmp_path / "gpt2", "--data", rows, "--valid", rows, "-o", tmp_path / "out", "--rounds", 1)
    assert "1 round lowered the loss" in found.output
    after = gm.evaluate(tmp_path / "out", tmp_path / "a.jsonl", progress=False)
    before = gm.evaluate(tmp_path / "gpt2", tmp_path / "a.jsonl", progress=False)
    assert after["loss_per_example"] < before["loss_per_example"]


def run_until_a_round_is_written(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    write = resuming.SavedRounds.write

    def stop(saved: Any, state: Any) -> None:
        write(saved, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(resuming.SavedRounds, "write", stop)
        run(*arguments, status=1)


@pytest.mark.parametrize(("method", "rounds"), [("newton", 2), ("adamw", 4)])
def test_a_run_that_was_killed_after_a_round_goes_on_to_the_same_bytes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, rounds: int
) -> None:
    asked = ["refine", place / "merged", *given(place), "--with", method, "--rounds", rounds]
    run(*asked, "-o", tmp_path / "whole")
    run_until_a_round_is_written(monkeypatch, *asked, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists() and (tmp_path / "out.gradmerge-partial" / "so-far.json").is_file()
    other = run("refine", place / "merged", *given(place, "a"), "-o", tmp_path / "out", "--resume", status=2)
    assert "another model, other data" in other.output
    run(*asked, "-o", tmp_path / "out", "--resume")
    name = "model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert not list((tmp_path / "out").glob("so-far*"))
    records = [json.loads((tmp_path / f / "gradmerge.json").read_text())["refinement"] for f in ("whole", "out")]
    assert [one["held"] for one in records[0]["rounds"]] == [one["held"] for one in records[1]["rounds"]]
    assert len(records[0]["rounds"]) > 2 and records[1]["resumed"] == 1


def test_noise_gives_the_start_bit_for_bit_and_says_so(place: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [{"text": text, "label": int(torch.randint(0, 2, (1,), generator=generator))} for text in sentences(60, 9)]
    write_jsonl(tmp_path / "noise.jsonl", rows)
    out = tmp_path / "out"
    found = run("refine", place / "merged", "--data", f"n={tmp_path / 'noise.jsonl'}", "-o", out, "--json")
    numbers = json.loads(found.output)
    assert not numbers["improved"] and numbers["stopped"]
    for name, value in read_model(place / "merged").items():
        assert torch.equal(value, read_model(out)[name])


def test_a_penalty_of_the_record_is_used_and_one_can_be_given(place: Path, tmp_path: Path) -> None:
    tiny_bert_checkpoint(tmp_path / "base", seed=1)
    recipe = {
        "method": "gradient-matching",
        "base": {"model": "./base", "curvature": {"identity": 1.0}, "penalty": {"identity": 50.0}},
        "models": [{"model": str(place / "merged"), "curvature": {"identity": 1.0}}],
    }
    start = tmp_path / "merged"
    shutil.copytree(place / "merged", start)
    (start / "gradmerge.json").write_text(json.dumps({"recipe": recipe, "inputs": []}))

    def distance(*more: str | Path) -> tuple[float, Any]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        assert not run("refine", start, *given(place), "-o", out, "--rounds", 1, "--quiet", *more).output
        record = json.loads((out / "gradmerge.json").read_text())["refinement"]["penalty_of"]
        base, found = read_model(tmp_path / "base"), read_model(out)
        return sum(float((found[n] - base[n]).square().sum()) for n in base), record["penalty"]

    (held, recorded), (given_one, same), (free, none) = (
        distance(),
        distance("--penalty", "identity:50.0", "--base", tmp_path / "base"),
        distance("--penalty", "none"),
    )
    assert (recorded, same, none) == ("identity:50.0", "identity:50.0", None)
    assert held == given_one < 0.9 * free


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--rounds", "0"], "at least one"),
        (["--with", "sgd"], "known are newton, adamw"),
        (["--data", "a"], "--data a: give the task's name"),
        (["--data", "a=x.jsonl"], "a has one already"),
        (["--teacher", "x"], "--teacher yelp=./yelp-model"),
        (["--valid", "c=x.jsonl"], "no --data of that name"),
        (["--examples", "a=many"], "whole number"),
        (["--dtype", "bfloat16"], "kept in float32"),
        (["--penalty", "identity:-1", "--base", "x"], "not negative"),
        (["--penalty", "identity:1"], "names no base"),
        (["--base", "x"], "there is none"),
        (["--valid", "a=nowhere.jsonl"], "nowhere.jsonl"),
        (["--limit", "1"], "no validation row"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(place: Path, tmp_path: Path, more: list[str], says: str) -> None:
    result = run("refine", place / "merged", *given(place), "-o", tmp_path / "out", *more, status=2)
    assert says in result.output
    assert not list(tmp_path.iterdir())


def test_a_quantised_model_is_refused_before_it_is_loaded(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "merged", tmp_path / "codes")
    config = json.loads((tmp_path / "codes" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "codes" / "config.json").write_text(json.dumps(config))
    result = run("refine", tmp_path / "codes", *given(place), "-o", tmp_path / "out", status=2)
    assert "quantised with gptq, 4 bits" in result.output and "unquantised" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["codes"]


def test_rows_without_labels_are_refused(place: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in sentences(20)])
    result = run("refine", place / "merged", "--data", f"a={tmp_path / 'rows.jsonl'}", "-o", tmp_path / "out", status=2)
    assert "label" in result.output and not (tmp_path / "out").exists()


def test_a_teacher_counts_beside_the_labels_of_its_task_and_is_recorded(place: Path, tmp_path: Path) -> None:
    judged = [text for name in "ab" for text in ("--valid", f"{name}={place / name}.jsonl")]
    taught = ["--teacher", f"a={place / 'teacher'}", "--teaching", 0.7, "--with", "adamw", "--rounds", 1, "--limit", 40]
    found = run("refine", place / "merged", *given(place), *judged, *taught, "-o", tmp_path / "out")
    assert "lowered the taught loss" in found.output
    record = json.loads((tmp_path / "out" / "gradmerge.json").read_text())["refinement"]
    assert record["teachers"] == {"a": str(place / "teacher")} and record["teaching"] == 0.7
    folders = (place / "teacher", tmp_path / "out")
    models = [BertForSequenceClassification.from_pretrained(folder).double().eval() for folder in folders]
    tokenizer = AutoTokenizer.from_pretrained(place / "merged")
    losses, plain = [], []
    for row in gm.read_rows(str(place / "a.jsonl")).rows[:40]:
        with torch.no_grad():
            answer, z = (model(**tokenizer(row["text"], return_tensors="pt")).logits[0] for model in models)
        logs, p = z.log_softmax(-1), answer.softmax(-1)
        plain.append(-float(logs[row["label"]]))
        losses.append(0.3 * plain[-1] - 0.7 * float(p[0] * logs[0] + p[1] * logs[1]))
    assert record["rounds"][-1]["held"]["a"] == pytest.approx(sum(losses) / 40, rel=1e-5)
    assert record["tasks"]["a"]["after"]["loss_per_example"] == pytest.approx(sum(plain) / 40, rel=1e-5), "by labels"
    assert "of tasks with a teacher, 0.7 of them is to its answers" in (tmp_path / "out" / "README.md").read_text()
    assert "teacher of a" in (tmp_path / "out" / "report.html").read_text()
    data = {name: place / f"{name}.jsonl" for name in "ab"}
    options: Any = {"method": "adamw", "rounds": 1, "limit": 40, "batch_size": 80, "progress": False}
    options |= {"teachers": {"a": place / "teacher"}, "teaching": 0.7, "valid": data}
    gm.refine(place / "merged", data, out=tmp_path / "two", **options)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_taught_run_goes_on_with_the_same_teacher_alone(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = ["refine", place / "merged", *given(place, "a"), "--limit", 40, "--with", "adamw", "--rounds", 4]
    taught = [*asked, "--teacher", f"a={place / 'teacher'}"]
    run(*taught, "-o", tmp_path / "whole")
    run_until_a_round_is_written(monkeypatch, *taught, "-o", tmp_path / "out")
    for other in (asked, [*asked, "--teacher", f"a={place / 'merged'}"], [*taught, "--teaching", 1]):
        assert "other data or other options" in run(*other, "-o", tmp_path / "out", "--resume", status=2).output
    run(*taught, "-o", tmp_path / "out", "--resume")
    name = "model.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_an_adapter_teaches_an_adapter_as_the_whole_model_would(place: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    for seed, name in enumerate(("start", "teacher")):
        torch.manual_seed(seed)
        model: Any = get_peft_model(BertForSequenceClassification.from_pretrained(place / "merged"), config)
        model.save_pretrained(tmp_path / name)
    model.merge_and_unload().save_pretrained(tmp_path / "whole")
    found = []
    for teacher in ("teacher", "whole"):
        more = ["--tokenizer", place / "merged", "--with", "adamw", "--rounds", 1, "--limit", 40, "--json"]
        taught = ["--teacher", f"a={tmp_path / teacher}", "-o", tmp_path / f"by-{teacher}"]
        found.append(json.loads(run("refine", tmp_path / "start", *given(place, "a"), *taught, *more).output))
    assert found[0]["rounds"][0]["held"] == pytest.approx(found[1]["rounds"][0]["held"], rel=1e-5)
    assert (tmp_path / "by-teacher" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize("method", ["newton", "adamw"])
def test_a_language_model_is_taught_token_by_token(tmp_path: Path, method: str) -> None:
    for seed, name in enumerate(("merged", "teacher")):
        tiny_gpt2_checkpoint(tmp_path / name, seed)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in sentences(12)])
    rows = f"a={tmp_path / 'a.jsonl'}"
    more = ["--teacher", f"a={tmp_path / 'teacher'}", "--teaching", 1, "--with", method, "--rounds", 1, "--json"]
    found = run("refine", tmp_path / "merged", "-d", rows, "--valid", rows, "-o", tmp_path / "out", *more)
    models = [GPT2LMHeadModel.from_pretrained(tmp_path / name).double().eval() for name in ("teacher", "out")]
    losses = []
    loaded = load_task(tmp_path / "merged", tmp_path / "a.jsonl", device="cpu")
    for batch in loaded.batches(1):
        with torch.no_grad():
            answers, z = (model(batch["input_ids"]).logits[0] for model in models)
        pairs = zip(answers[:-1].softmax(-1), z[:-1].log_softmax(-1), batch["labels"][0, 1:].tolist(), strict=True)
        losses.append(-sum(float(p @ logs) for p, logs, label in pairs if label != -100))
    printed = json.loads(found.output)
    assert (printed["teachers"], printed["teaching"]) == ({"a": str(tmp_path / "teacher")}, 1)
    rounds = printed["rounds"]
    assert len(rounds) == 2 and rounds[1]["held"]["a"] < rounds[0]["held"]["a"]
    assert rounds[1]["held"]["a"] == pytest.approx(sum(losses) / 12, rel=1e-5)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"labels": 3}, "outputs of shape [3] for a row, the model of [2]"),
        ({"id2label": {0: "up", 1: "down"}, "label2id": {"up": 0, "down": 1}}, "'down' is 0 and 1"),
        ({"vocab_size": 70}, "a vocabulary of 70 tokens"),
        ({"words": True}, "another tokenizer than the model"),
        ({"nan": True}, "not finite"),
        ({"task": "b"}, "--teacher b=…: there is no --data of that name"),
        ({"teaching": "0"}, "more than 0"),
        ({"teaching": "1.01"}, "at most 1"),
        ({"folder": "nowhere"}, "nowhere"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_and_nothing_is_written(
    place: Path, tmp_path: Path, made: dict[str, Any], says: str
) -> None:
    start = tmp_path / "start"
    tiny_bert_checkpoint(start, id2label={0: "down", 1: "up"}, label2id={"down": 0, "up": 1})
    own = {key: value for key, value in made.items() if key in ("labels", "id2label", "label2id", "vocab_size")}
    folder = tiny_bert_checkpoint(tmp_path / "teacher", **own)
    if "words" in made:
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text.replace('"film"', '"movie"'))
    if "nan" in made:
        weights = load_file(folder / "model.safetensors")
        weights["classifier.bias"][0] = float("nan")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    teacher = f"{made.get('task', 'a')}={tmp_path / made.get('folder', 'teacher')}"
    more = ["--teacher", teacher, "--teaching", made.get("teaching", "0.5"), "--limit", 20]
    result = run("refine", start, *given(place, "a"), "-o", tmp_path / "out", *more, status=2)
    assert says in " ".join(result.output.split())
    assert {path.name for path in tmp_path.iterdir()} == {"start", "teacher"}
