"""`gradmerge remove --forget --keep` as a user runs it: folders in, a folder out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import BertForSequenceClassification
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app

from ..making import read_model, three_models
from ..tasks.making import sentences, tiny_bert_checkpoint, tiny_gpt2_checkpoint, write_jsonl


def run(*arguments: str | Path | int, status: int = 0) -> Any:
    result = CliRunner().invoke(app, ["remove", *(str(a) for a in arguments)])
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output and "internal" not in result.output
    return result


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remove")
    tiny_bert_checkpoint(folder / "base")
    for seed, (name, label) in enumerate((("keep", 0), ("forget", 1))):
        texts = sentences(12 if label else 40, seed)
        rows = [{"text": text, "label": label or place % 2} for place, text in enumerate(texts)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


def given(place: Path, base: str = "base", *more: str | int) -> list[Any]:
    sources = ["--forget", place / "forget.jsonl", "--keep", place / "keep.jsonl"]
    return ["--base", place / base, *sources, "--batch-size", 16, *more]


def test_a_folder_is_written_as_the_base_was_with_a_record_a_card_and_a_report(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(*given(place), "--budget", "5%", "--rounds", 2, "--keep-size", 400, "-o", out)
    assert "to be forgotten" in result.output and "budget 5 %" in result.output
    before, after = read_model(place / "base"), read_model(out)
    assert {n: (v.dtype, v.shape) for n, v in before.items()} == {n: (v.dtype, v.shape) for n, v in after.items()}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    facts = json.loads((out / "gradmerge.json").read_text())["removal"]
    assert facts["method"] == "influence" and facts["budget"] == 0.05 and len(facts["rounds"]) == 2
    assert (facts["forget_rows"], facts["keep_rows"], facts["held_rows"], facts["keep_size"]) == (12, 36, 4, 400)
    assert facts["s"] == pytest.approx(sum(one["chosen"]["s"] for one in facts["rounds"]))
    assert 0 < facts["after"]["kept"] <= 1.05 * facts["before"]["kept"]
    assert facts["used"] == pytest.approx(facts["after"]["kept"] / facts["before"]["kept"] - 1)
    # What the record says of the rows to forget is what the models have on them, computed apart.
    for when, folder in (("before", place / "base"), ("after", out)):
        found = gm.evaluate(folder, place / "forget.jsonl", progress=False)
        assert facts[when]["forget"] == pytest.approx(found["loss_per_example"], rel=1e-4)
        error = found["standard_errors"]["loss_per_example"]
        assert facts["standard_errors"][when]["forget"] == pytest.approx(error, rel=1e-4)
    assert facts["after"]["forget"] > facts["before"]["forget"]
    card: Any = ModelCard((out / "README.md").read_text())
    assert "influence steps" in card.text and "report.html" not in card.text and str(place) not in card.content
    [kept] = card.data.eval_results
    assert kept.metric_value == pytest.approx(facts["after"]["kept"], rel=1e-5) and kept.dataset_name == "keep.jsonl"
    assert "| `keep.jsonl` | 4 | `loss_per_example` |" in card.text
    assert card.data.tags == ["gradmerge", "removal"] and card.data.pipeline_tag == "text-classification"
    report = (out / "report.html").read_text()
    assert "Kept loss against the loss of what is forgotten" in report and "--forget" in report
    assert "budget, +5 %" in (out / "trade-off.csv").read_text()
    assert (out / "vocab.txt").read_bytes() == (place / "base" / "vocab.txt").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    BertForSequenceClassification.from_pretrained(out)


def test_python_and_the_command_line_write_the_same_bytes_and_json_holds_the_record(
    place: Path, tmp_path: Path
) -> None:
    words = given(place, "base", "--rounds", 1, "--widest", 0, "--json")
    told = json.loads(run(*words, "-o", tmp_path / "one").stdout)
    sources: Any = {"forget": place / "forget.jsonl", "keep": str(place / "keep.jsonl")}
    done = gm.remove(place / "base", tmp_path / "two", **sources, rounds=1, widest=0, batch_size=16, progress=False)
    assert done.output == tmp_path / "two" and done.used <= 0.02
    name = "model.safetensors"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    record = json.loads((tmp_path / "two" / "gradmerge.json").read_text())["removal"]
    assert {key: told[key] for key in done.facts()} == json.loads(json.dumps(done.facts()))
    assert record["rounds"] == told["rounds"] and record["widest"] == 0


def test_bfloat16_keeps_its_types_and_the_budget(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "base", tmp_path / "base")
    BertForSequenceClassification.from_pretrained(place / "base").to(torch.bfloat16).save_pretrained(tmp_path / "base")
    sources: Any = {"forget": place / "forget.jsonl", "keep": place / "keep.jsonl"}
    done = gm.remove(tmp_path / "base", tmp_path / "out", **sources, rounds=1, budget=0.05, progress=False)
    after = read_model(tmp_path / "out")
    assert {value.dtype for value in after.values()} == {torch.bfloat16}
    assert done.used <= 0.05
    loss = gm.evaluate(tmp_path / "out", place / "forget.jsonl", dtype="float32", progress=False)["loss_per_example"]
    assert done.after.forget == pytest.approx(loss, rel=1e-4) and loss > done.before.forget


def test_of_an_adapter_the_adapter_alone_is_moved_and_written(place: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], init_lora_weights=False)
    base = BertForSequenceClassification.from_pretrained(place / "base")
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    more = ["--model-args", f"tokenizer={place / 'base'}", "--rounds", 1]
    run(*given(place)[2:], *more, "--base", tmp_path / "adapter", "-o", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "out"))
    assert before.keys() == after.keys() and not (tmp_path / "out" / "model.safetensors").exists()
    assert any(not torch.equal(before[name], after[name]) for name in before if "lora" in name)


def test_a_language_model_forgets_text(tmp_path: Path) -> None:
    tiny_gpt2_checkpoint(tmp_path / "base")
    write_jsonl(tmp_path / "keep.jsonl", [{"text": text} for text in sentences(20)])
    write_jsonl(tmp_path / "forget.jsonl", [{"text": text} for text in sentences(6, 1)])
    told = json.loads(run(*given(tmp_path, "base", "--rounds", 1, "--json"), "-o", tmp_path / "out").stdout)
    assert told["after"]["forget"] > told["before"]["forget"] and told["used"] <= 0.02


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--budget", "0"], "more than 0"),
        (["--budget=-2%"], "more than 0"),
        (["--budget", "much"], "budget much"),
        (["--budget", "2"], "write 2% or 200%"),
        (["--model", "x"], "--model is for removal with tuned models"),
        (["--strength", "0.5"], "--strength is for removal"),
        (["--set", "damping=1"], "--set is for removal"),
        (["--resume"], "--resume is for removal"),
        (["--method", "negation"], "--forget is for --method influence"),
        (["--method", "ties"], "remove knows influence, removal and negation"),
        (["--keep-size", "10"], "--keep-size 10: 40 examples"),
        (["--widest", "-1"], "--widest"),
        (["--dtype", "bfloat16"], "float32"),
        (["--task", "causal-lm"], ""),
    ],
)
def test_wrong_requests_end_with_status_2_and_write_nothing(
    place: Path, tmp_path: Path, more: list[str], says: str
) -> None:
    assert says in " ".join(run(*given(place), *more, "-o", tmp_path / "out", status=2).output.split())
    assert not list(tmp_path.iterdir())


def test_rows_in_both_and_rows_without_labels_are_refused(place: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (place / "forget.jsonl").read_text().splitlines()]
    both = write_jsonl(tmp_path / "both.jsonl", [*rows[:3], {"text": "none of them", "label": 0}] * 5)
    bare = write_jsonl(tmp_path / "bare.jsonl", [{"text": row["text"]} for row in rows])
    start = ["--base", place / "base", "--forget", place / "forget.jsonl"]
    said = run(*start, "--keep", both, "-o", tmp_path / "out", status=2).output
    assert "3 of the 12 examples to forget are also among those to keep" in " ".join(said.split())
    assert "label" in run(*start, "--keep", bare, "-o", tmp_path / "out", status=2).output
    missing = run(*start, "-o", tmp_path / "out", status=2).output
    assert "--keep is missing" in missing and not (tmp_path / "out").exists()


def test_few_rows_to_keep_take_the_newton_length_and_say_so(place: Path, tmp_path: Path) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", [{"text": text, "label": 0} for text in sentences(5)])
    told = run("--base", place / "base", "--forget", place / "forget.jsonl", "--keep", few, "-o", tmp_path / "out")
    assert "Newton length" in told.output
    facts = json.loads((tmp_path / "out" / "gradmerge.json").read_text())["removal"]
    assert facts["budget"] is None and facts["held_rows"] == 0 and len(facts["rounds"]) == 1
    assert facts["s"] == facts["rounds"][0]["newton"]


def test_repairs_that_teach_more_than_the_steps_take_out_are_not_kept(place: Path, tmp_path: Path) -> None:
    """All rows have one label, which the model has yet to learn."""
    alike = write_jsonl(tmp_path / "alike.jsonl", [{"text": text, "label": 1} for text in sentences(40)])
    asked = ["--base", place / "base", "--forget", place / "forget.jsonl", "--keep", alike, "--budget", "0.1%"]
    told = run(*asked, "--rounds", 2, "-o", tmp_path / "two")
    facts = json.loads((tmp_path / "two" / "gradmerge.json").read_text())["removal"]
    first, second = (one["chosen"]["forget"] for one in facts["rounds"])
    assert second < first == facts["after"]["forget"] and first > facts["before"]["forget"]
    assert "no worse than before" not in told.output


def test_negation_has_its_name_here_too(tmp_path: Path) -> None:
    folders, states = three_models(tmp_path)
    base, tuned = (str(folder) for folder in folders[:2])
    run("--method", "negation", "--base", base, "--model", f"{tuned}=0.5", "-o", tmp_path / "out")
    gm.remove(base, tmp_path / "python", models={tuned: 0.5}, method="negation", progress=False)
    for name, value in read_model(tmp_path / "out").items():
        torch.testing.assert_close(value, states[0][name] - 0.5 * (states[1][name] - states[0][name]))
        torch.testing.assert_close(read_model(tmp_path / "python")[name], value)
    said = run("--method", "negation", "--base", base, "--model", tuned, "--limit", 3, "-o", tmp_path / "no", status=2)
    assert "--limit is for --method influence" in said.output
    said = run("--base", base, "--model", tuned, "--widest", 9, "-o", tmp_path / "no", status=2)
    assert "--widest is for --method influence" in said.output
    assert "--model MODEL" in run("--method", "removal", "--base", base, "-o", tmp_path / "no", status=2).output
