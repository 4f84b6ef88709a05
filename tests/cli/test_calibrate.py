"""`gradmerge calibrate`: from a merge and its fine-tuned models on disk to a new folder."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import gradmerge as gm
from gradmerge.refinement.blocks import BlockModel, HiddenCache
from gradmerge.refinement.structure import find_structure

from ..making import run
from ..refinement.calibration_families import FAMILIES, calibrated, make, rows, solve_all
from ..tasks.making import sentences, tiny_bert_checkpoint, tiny_llama_checkpoint, write_jsonl


def fine_tune(base, folder, seed, head=False):
    """A copy of a model folder whose weights moved."""
    shutil.copytree(base, folder)
    state = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, value in state.items():
        if head or not name.startswith("classifier"):
            state[name] = value + 0.3 * value.std(correction=0) * torch.randn(value.shape, generator=generator)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_texts(place, count=60, make=tiny_llama_checkpoint):
    """Write a base, two fine-tuned models, their merge, and unlabeled rows."""
    make(place / "base")
    for number, name in enumerate(("yelp", "imdb"), 1):
        fine_tune(place / "base", place / name, number)
        write_jsonl(place / f"{name}.jsonl", [{"text": text} for text in sentences(count, seed=number)])
    gm.merge(merge_recipe(place), place / "merged", progress=False)
    return place


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts"))


def merge_recipe(place, **keys):
    recipe = {"method": "average", "base": str(place / "base"), "models": [str(place / "yelp"), str(place / "imdb")]}
    path = place / "recipe.json"
    path.write_text(json.dumps(recipe | keys))
    return path


def data_of(place, *names):
    return [word for name in names for word in ("--data", f"{name}={place / name}.jsonl")]


def state_of(folder):
    return load_file(folder / "model.safetensors")


def test_it_writes_a_model_that_is_closer_to_the_fine_tuned_ones(texts, tmp_path):
    out = tmp_path / "out"
    result = run("calibrate", texts / "merged", *data_of(texts, "yelp", "imdb"), "--json", "-o", out)
    facts = json.loads(result.stdout)
    assert facts["improved"] and facts["rows"] == {"yelp": 60, "imdb": 60}
    assert facts["distances"][facts["chosen"]]["total"] < facts["distances"]["merge"]["total"]
    before, after = state_of(texts / "merged"), state_of(out)
    assert {n: (v.shape, v.dtype) for n, v in before.items()} == {n: (v.shape, v.dtype) for n, v in after.items()}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {n for n in before if "norm" not in n and "embed" not in n}
    AutoModelForCausalLM.from_pretrained(out)
    assert {"README.md", "gradmerge.json", "report.html", "config.json"} <= {p.name for p in out.iterdir()}
    record = json.loads((out / "gradmerge.json").read_text())
    assert [entry["role"] for entry in record["inputs"]] == ["merged", "teacher", "teacher"]
    assert all(entry["files"] for entry in record["inputs"])
    assert record["calibration"]["chosen"] == facts["chosen"]
    # The models are still there for a later command, relative to the new folder.
    assert {name: (out / path).resolve() for name, path in record["models"].items()} == {
        name: texts / name for name in ("yelp", "imdb")
    }


def test_two_runs_write_the_same_bytes_whatever_the_cache(texts, tmp_path):
    folders = []
    for number, memory in enumerate(("1GB", "1kB")):
        out = tmp_path / str(number)
        words = ["--curvature", "none", "--cache-memory", memory]
        run("calibrate", texts / "merged", *data_of(texts, "yelp", "imdb"), *words, "-o", out)
        folders.append((out / "model.safetensors").read_bytes())
        assert not list(out.glob("*hidden*"))
    assert folders[0] == folders[1]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "t5"])
def test_streaming_gives_what_a_module_in_memory_gives(name, tmp_path):
    from gradmerge.refinement.model_io import open_model_files

    merged, teachers = make(name)
    data = {task: [batch] for task, batch in rows(name).items()}
    merged.save_pretrained(tmp_path / "merged")
    for task, model in teachers.items():
        model.save_pretrained(tmp_path / task)
    files = {task: open_model_files(str(tmp_path / task)) for task in ("merged", *teachers)}
    cpu = torch.device("cpu")
    source = files["merged"].source(cpu)
    structure = find_structure(files["merged"].module, data["task0"][0], source)
    assert structure.lists
    streamed = BlockModel(files["merged"].module, structure, source)
    guides = {task: BlockModel(files[task].module, structure, files[task].source(cpu)) for task in teachers}
    cache, store = HiddenCache(0, tmp_path), HiddenCache(0, tmp_path)
    done = solve_all(streamed, guides, data, cache=cache, store=store)
    assert all(parameter.device.type == "meta" for parameter in streamed.module.parameters())
    whole, _ = calibrated(merged, teachers, data)
    whole.save_pretrained(tmp_path / "whole")
    wanted = load_file(tmp_path / "whole" / "model.safetensors")
    written = files["merged"].new_tensors(done.weights)
    assert len(written) >= len(done.weights) > 4
    for key, value in written.items():
        torch.testing.assert_close(value(), wanted[key], rtol=1e-5, atol=1e-6)


def write_adapters(place):
    """Write a base, LoRA adapters `code` and `chat` of it with their rows, and their merge as an adapter."""
    base = tiny_llama_checkpoint(place / "base")
    for number, name in enumerate(("code", "chat")):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(base)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=2))
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.data.normal_(std=0.3)
        adapted.peft_config["default"].base_model_name_or_path = str(base)
        adapted.save_pretrained(place / name)
        write_jsonl(place / f"{name}.jsonl", [{"text": text} for text in sentences(40, seed=number)])
    recipe = {"method": "average", "base": str(base), "models": [str(place / "code"), str(place / "chat")]}
    (place / "recipe.json").write_text(json.dumps(recipe | {"output": {"format": "adapter", "rank": 4}}))
    gm.merge(place / "recipe.json", place / "merged", progress=False)
    return base


def test_lora_adapters_are_teachers_and_an_adapter_becomes_a_full_model(tmp_path):
    base = write_adapters(tmp_path)
    assert (tmp_path / "merged" / "adapter_config.json").is_file()
    out = tmp_path / "out"
    words = [*data_of(tmp_path, "code", "chat"), "--curvature", "none"]
    run("calibrate", tmp_path / "merged", *words, "-o", out)
    AutoModelForCausalLM.from_pretrained(out)
    assert state_of(out).keys() == load_file(base / "model.safetensors").keys()
    assert not (out / "adapter_config.json").exists()


def test_a_dry_run_writes_nothing(texts, tmp_path):
    words = ["--dry-run", "--json", "-o", tmp_path / "out"]
    result = run("calibrate", texts / "merged", *data_of(texts, "yelp", "imdb"), *words)
    facts = json.loads(result.stdout)
    size = sum(value.nbytes for value in state_of(texts / "merged").values())
    assert facts["fits"] and facts["bytes_written"] == size
    assert facts["bytes_read"] == 3 * facts["bytes_written"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["calibrate", "distill"])
def test_running_out_of_memory_names_the_options_that_need_less(texts, tmp_path, monkeypatch, command):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("gradmerge.refinement.calibrate.input_products", fail)
    monkeypatch.setattr("gradmerge.refinement.distill.batch_losses", fail)
    result = run(command, texts / "merged", *data_of(texts, "yelp"), "-o", tmp_path / "out", status=1)
    assert "--batch-size" in result.output and ("--cache-memory" in result.output) is (command == "calibrate")
    assert list(tmp_path.iterdir()) == []


def test_a_merge_of_encoders_is_evaluated_with_the_head_of_a_task(texts, tmp_path):
    tiny_bert_checkpoint(tmp_path / "base")
    for number, (name, labels) in enumerate({"yelp": 2, "imdb": 3}.items(), 1):
        tiny_bert_checkpoint(tmp_path / f"{name}-base", labels=labels, seed=0)
        fine_tune(tmp_path / f"{name}-base", tmp_path / name, number, head=True)
    gm.merge(merge_recipe(tmp_path, exclude=["classifier.*"]), tmp_path / "merged", progress=False)
    rows = [{"text": text, "label": number % 3} for number, text in enumerate(sentences(30))]
    source = write_jsonl(tmp_path / "labeled.jsonl", rows)
    words = ["--head", tmp_path / "imdb", "--json"]
    result = run("evaluate", tmp_path / "merged", "--data", source, *words)
    # By hand: the encoder of the merge and the classifier of imdb in one folder.
    both = state_of(tmp_path / "merged") | {n: v for n, v in state_of(tmp_path / "imdb").items() if "classifier" in n}
    save_file(both, tmp_path / "imdb" / "model.safetensors", metadata={"format": "pt"})
    by_hand = gm.evaluate(tmp_path / "imdb", source, progress=False)
    found = json.loads(result.stdout)
    assert found["loss_per_example"] == pytest.approx(by_hand["loss_per_example"])
    run("evaluate", tmp_path / "merged", "--data", source, "--head", texts / "yelp", status=2)
