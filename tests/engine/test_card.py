"""The model card: names in it are text, and what it says of the Hub is true."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

import gradmerge as gm
from gradmerge.api.publishing import MeasuredCard
from gradmerge.engine.card import model_card
from gradmerge.markdown import split_card
from gradmerge.recipe import make_recipe
from gradmerge.text import printable

from ..making import near, random_curvature, random_state, read_model, write_model
from ..tasks.making import (
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_t5_checkpoint,
    tiny_vit_checkpoint,
    write_jsonl,
)

NASTY = [
    "a`b``c",
    "line\n---\nbase_model: x\n```\n# Heading",
    "<img src=x onerror=alert(1)>|<b>",
    "\x1b[31m\u202e\udce9",
    "```" + " word" * 60 + "\n```",
    "[link](javascript:alert(1)) ![i](x)",
]


@pytest.mark.parametrize("nasty", NASTY)
def test_a_name_is_text_wherever_it_stands(nasty: str) -> None:
    curvature = {"identity": 1.0}
    recipe = make_recipe(
        {
            "method": "gradient-matching",
            "base": {"model": nasty, "curvature": curvature},
            "models": [{"model": nasty, "curvature": nasty}],
        }
    )
    card = model_card(recipe, nasty, {"license_name": nasty})
    assert printable(card) == card
    front, text = split_card(card, "card")
    assert front == {"license_name": nasty}
    head, fence, rest = re.split(r"\n(`{3,})yaml\n", text)
    written, after = rest.split(f"\n{fence}\n")
    assert yaml.safe_load(written)["models"][0]["model"] == nasty
    assert fence not in written and after.strip().startswith("`gradmerge.json`")
    lines = [line for line in head.splitlines() if line]
    assert lines[0].startswith("# ") and not re.search(r"(?<!\\)[<\[`!]", lines[0])
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4
    # Four cells each, and every model and curvature in code.
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
    for row in rows[2:]:
        outside = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", row)
        assert re.fullmatch(r"\| (base|tuned) \|  \| 1? ?\| ?(1 · I)? *\|", outside), outside


def test_weights_by_filter_are_text_in_a_card() -> None:
    weight = [{"filter": "*|<b>[x](y)", "value": 2.0}, {"value": [0.5, 1.0]}]
    part = {"model": "./a", "weight": weight}
    for recipe in (
        {"method": "task-arithmetic", "base": "./b", "models": [part]},
        {"method": "weighted-average", "slices": [{"models": [part | {"layers": [0, 2]}]}]},
    ):
        assert r"\*\|\<b\>\[x\](y)" in model_card(make_recipe(recipe), "out", {})


def models(place: Path, **cards: str) -> dict[str, Path]:
    """Models of one shape, each with a README.md of this front matter, or none."""
    base = random_state(0)
    made = {name: write_model(place / name, near(base, seed)) for seed, name in enumerate(cards)}
    for name, front in cards.items():
        if front:
            (made[name] / "README.md").write_text(f"---\n{front}\n---\n# {name}\n")
    return made


def average(place: Path, *names: str, **more: Any) -> tuple[dict[str, Any], str, gm.MergeResult]:
    """The front matter and the text of a merge's card, which huggingface_hub reads as well."""
    recipe = make_recipe({"method": "average", "models": list(names), **more}, folder=place)
    result = gm.merge(recipe, place / "out", force=True)
    card = (place / "out" / "README.md").read_text()
    front, text = split_card(card, "card")
    assert ModelCard(card).data.to_dict() == front
    return front, text, result


def test_base_models_are_ids_of_the_hub_and_never_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = models(
        tmp_path, a="base_model: org/origin", b="", c="base_model: [./x, /d/e, models/f, gpt2, org/other]", d=""
    )
    config = made["b"] / "config.json"

    def state_base(value: Any) -> None:
        config.write_text(json.dumps({"model_type": "test", "_name_or_path": value}))

    state_base("google/base")
    # In the cache of the Hub, the folder says which model it is.
    snapshot = tmp_path / "cache/models--owner--its-name/snapshots/abc"
    shutil.copytree(made["d"], snapshot)
    front, text, _ = average(tmp_path, "./a", str(made["b"]), "c", str(snapshot))
    assert front["base_model"] == ["org/origin", "google/base", "org/other", "owner/its-name"]
    assert front["base_model_relation"] == "merge" and str(tmp_path) not in text
    # What names a folder, or a place where folders are kept, is no id.
    for stated in ("models/base", "./base", "runs/checkpoint-500", "~/m/base", "gpt2", "a/b/c", "org/x--y", 5):
        state_base(stated)
        assert "base_model" not in average(tmp_path, "b")[0], stated
    (tmp_path / "org" / "model").mkdir(parents=True)
    state_base("org/model")
    assert "base_model" not in average(tmp_path, "b")[0]


def test_folders_of_one_name_are_told_apart_without_their_paths(tmp_path: Path) -> None:
    base, names = random_state(0), ["yelp/step-5", "sst/step-5", "other"]
    for name in names:
        write_model(tmp_path / name, near(base, len(name)))
    _, text, _ = average(tmp_path, *(str(tmp_path / name) for name in names))
    rows = [line for line in text.splitlines() if line.startswith("| tuned")]
    assert [re.findall("`(.*?)`", row)[0] for row in rows] == names
    written = yaml.safe_load(re.findall("```yaml\n(.*?)```", text, re.S)[0])
    assert [model["model"] for model in written["models"]] == names


def test_a_license_that_all_have_is_carried_over_and_otherwise_asked_for(tmp_path: Path) -> None:
    other = "license: other\nlicense_name: own\nlicense_link: LICENSE"
    models(tmp_path, a="license: MIT", b="license: mit", c="license: gpl-3.0", d="", e=other, f=other, g="license: [1]")
    assert average(tmp_path, "a", "b")[0]["license"] == "mit"
    front, _, result = average(tmp_path, "e", "f")
    assert (front["license"], front["license_name"], front["license_link"]) == ("other", "own", "LICENSE")
    assert not result.notes
    for names in ("ac", "ad", "ae"):
        front, _, result = average(tmp_path, *names)
        assert "license" not in front and any("output.license" in note for note in result.notes)
        front, _, result = average(tmp_path, *names, output={"license": "apache-2.0"})
        assert front["license"] == "apache-2.0" and not result.notes
    front, _, result = average(tmp_path, "d", "g")
    assert "license" not in front and not result.notes
    with pytest.raises(gm.InputError, match="license"):
        make_recipe({"method": "average", "models": ["./a"], "output": {"license": "All rights reserved"}})


def test_languages_and_data_of_all_models_are_named_once(tmp_path: Path) -> None:
    models(
        tmp_path,
        a="language: en\ndatasets: [imdb, org/yelp]\npipeline_tag: translation",
        b="language: [no, en]\ndatasets: org/yelp",
        c="language: {x: 1}\ndatasets: ['<b>', 3, 'a b']\npipeline_tag: [1]",
    )
    results = "".join(f"  - task: {{type: retrieval, n: {n}}}\n    metrics: [{{value: {n}}}]\n" for n in range(9000))
    with (tmp_path / "a/README.md").open("w") as card:  # as of models that were evaluated on everything
        card.write("---\nmodel-index:\n- name: a\n  results:\n" + results)
        card.write("language: en\ndatasets: [imdb, org/yelp]\n# words\npipeline_tag: translation\n---\n# A\n")
    front, _, _ = average(tmp_path, "c", "a", "b")
    assert front["language"] == ["en", "no"] and front["datasets"] == ["imdb", "org/yelp"]
    assert front["pipeline_tag"] == "translation"


@pytest.mark.parametrize("front", ["a: [", "- 1", "!!python/object:os.system {}", "x: &a [*a]", "license: 2024-01-01"])
def test_a_card_that_cannot_be_read_says_nothing(front: str, tmp_path: Path) -> None:
    models(tmp_path, a=front)
    assert average(tmp_path, "a")[0].keys() == {"library_name", "tags"}


def test_curvature_is_listed_also_where_it_was_found_by_itself(tmp_path: Path) -> None:
    made = models(tmp_path, base="", a="", b="")
    for seed, name in enumerate(("base", "a")):
        random_curvature(seed, read_model(made[name]), examples=1234).save(made[name] / "curvature")
    random_curvature(5, read_model(made["b"])).save(tmp_path / "of-b")
    recipe = {"method": "gradient-matching", "base": "base", "models": ["a", {"model": "b", "curvature": "of-b"}]}
    gm.merge(make_recipe(recipe, folder=tmp_path), tmp_path / "out")
    text = (tmp_path / "out/README.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| base", "| tuned"))]
    assert all(part in row for row, part in zip(rows, ("1,234", "1,234", "`of-b`"), strict=True))


def run_usage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the lines of a card, as its reader would: beside the folder."""
    [code] = re.findall(r"## Usage\n\n```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    monkeypatch.chdir(folder.parent)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code, names)
    return names | {"said": said.getvalue()}


FAMILIES: dict[str, tuple[Callable[..., Path], str, str]] = {
    "bert": (tiny_bert_checkpoint, "text-classification", "score"),
    "gpt2": (tiny_gpt2_checkpoint, "text-generation", "generated_text"),
    "t5": (tiny_t5_checkpoint, "text-generation", ""),
    "vit": (tiny_vit_checkpoint, "image-classification", ""),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_usage_of_a_card_runs_and_loads_the_result(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, tag, said = FAMILIES[family]
    make(tmp_path / "a", seed=1)
    make(tmp_path / "b", seed=2)
    front, _, _ = average(tmp_path, "a", "b")
    assert (front["pipeline_tag"], front["library_name"]) == (tag, "transformers")
    names = run_usage(tmp_path / "out", monkeypatch)
    assert said in names["said"] and bool(names["said"]) is (family != "vit")
    model = names["pipe"].model if "pipe" in names else names["model"]
    stored, loaded = read_model(tmp_path / "out"), model.state_dict()
    shared = stored.keys() & loaded.keys()  # transformers has other names in memory for some of ViT's
    assert len(shared) > 5 and all((stored[name] == loaded[name]).all() for name in shared)
    if family == "vit":
        assert type(names["processor"]).__name__.startswith("ViTImageProcessor")


def test_the_usage_of_an_adapter_names_its_base_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, name in enumerate(("base", "tuned")):
        tiny_gpt2_checkpoint(tmp_path / name, seed=seed)
    gm.extract_lora(tmp_path / "tuned", tmp_path / "lora", base=tmp_path / "base", rank=2)
    card = (tmp_path / "lora/README.md").read_text()
    front, _ = split_card(card, "card")
    assert front == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["merge", "gradmerge", "lora"],
    }
    assert type(run_usage(tmp_path / "lora", monkeypatch)["model"]).__name__ == "PeftModelForCausalLM"
    (tmp_path / "base/README.md").write_text("---\nbase_model: org/origin\nlicense: mit\n---\n")
    (tmp_path / "tuned/README.md").write_text("---\nbase_model: org/tuned\nlicense: mit\n---\n")
    gm.extract_lora(tmp_path / "tuned", tmp_path / "lora", base=tmp_path / "base", rank=2, force=True)
    front, text = split_card((tmp_path / "lora/README.md").read_text(), "card")
    assert (front["base_model"], front["base_model_relation"], front["license"]) == (["org/origin"], "adapter", "mit")
    assert '"org/origin"' in text


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return {"config.json": {"architectures": [architecture], **more}}


@pytest.mark.parametrize(
    ("files", "tag", "loader"),
    [
        (
            config("LlavaForConditionalGeneration", vision_config={}),
            "image-text-to-text",
            "AutoModelForImageTextToText",
        ),
        (config("BertModel", model_type="bert"), None, "AutoModel"),
        (config("BertModel", model_type="bert") | {"modules.json": []}, "sentence-similarity", "SentenceTransformer"),
        (config("__import__('os')"), None, "AutoModel"),
        ({"config.json": {"architecture": "resnet18"}}, "image-classification", "timm"),
        (
            {"model_index.json": {"_class_name": "StableDiffusionImg2ImgPipeline"}},
            "image-to-image",
            "DiffusionPipeline",
        ),
        ({}, None, "open_checkpoint"),
    ],
)
def test_what_a_model_is_for_is_told_by_its_files(
    files: dict[str, Any], tag: str | None, loader: str, tmp_path: Path
) -> None:
    from gradmerge.engine.usage import pipeline_tag, usage

    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert pipeline_tag(tmp_path) == tag
    text = usage(tmp_path, "m")
    assert loader in text and "__import__" not in text


def test_metrics_that_were_measured_are_in_the_card_with_errors_and_rows(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        tiny_bert_checkpoint(tmp_path / name, seed=seed)
    average(tmp_path, "a", "b")
    out = tmp_path / "out"
    rows = [{"text": text, "label": place % 2} for place, text in enumerate(sentences(12))]
    data = write_jsonl(tmp_path / "dir/some data.jsonl", rows)
    numbers = gm.evaluate(out, data, card=True, device="cpu")
    card: Any = ModelCard((out / "README.md").read_text())
    found = {one.metric_name: one for one in card.data.eval_results}
    assert found.keys() == numbers.keys() - {"task", "examples", "standard_errors"}
    for name, one in found.items():
        assert one.metric_value == pytest.approx(numbers[name], rel=1e-5)
        assert (one.task_type, one.dataset_name) == ("text-classification", "some data.jsonl")
        assert re.fullmatch(r"[\w.-]+", one.dataset_type)
        assert f"`{name}` | {numbers[name]:.5g} |" in card.text
    assert found["macro_f1"].metric_type == "f1" and card.data.model_name == "out"
    record = json.loads((out / "gradmerge.json").read_text())
    assert [one["rows"] for one in record["evaluations"]] == [12]
    # Again on the same data takes the place of that; other data, and what the user wrote, stay.
    (out / "README.md").write_text((out / "README.md").read_text().replace("# out", "# My model"))
    for source in (data, write_jsonl(tmp_path / "more.jsonl", rows[:6]), f"file://{data}"):
        gm.evaluate(out, source, card=True, device="cpu")
    card = ModelCard((out / "README.md").read_text())
    assert len(card.data.eval_results) == 2 * len(found) and "# My model" in card.text
    assert card.text.count("## Evaluation") == 1 and card.text.index("## Evaluation") < card.text.index("## Recipe")
    gm.evaluate(out, write_jsonl(tmp_path / "other/more.jsonl", rows[:4]), card=True, device="cpu")
    card = ModelCard((out / "README.md").read_text())
    names = {one.dataset_name for one in card.data.eval_results}
    assert names == {"some data.jsonl", "more.jsonl", "other/more.jsonl"}
    with pytest.raises(gm.InputError, match="README"):
        gm.evaluate(tmp_path / "a", data, card=True)
    MeasuredCard(out).add(None, {"lm_eval": {"arc": {"acc": 0.5, "examples": 8, "standard_errors": {"acc": 0.25}}}})
    assert "| `arc` | 8 | `acc` | 0.5 | 0.25 |" in (out / "README.md").read_text()
    (out / "README.md").write_text("---\nmodel-index: 5\n---\n# M\n")
    with pytest.raises(gm.InputError, match="model-index"):
        gm.evaluate(out, data, card=True)
    (out / "README.md").write_text("# Words alone\n")
    gm.evaluate(out, data, card=True, device="cpu")
    assert "# Words alone\n" in (out / "README.md").read_text()
