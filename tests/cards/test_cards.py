"""Model cards: names in them are text, their metadata is what the Hub accepts, and their code runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData

import gradmerge as gm
from gradmerge.cards.card import (
    as_block,
    as_text,
    evaluation,
    merge_text,
    pipeline_tag,
    recipe_text,
    render_card,
    usage,
    with_evaluations,
)
from gradmerge.cards.metadata import license_notes, read_all_metadata
from gradmerge.recipe import make_recipe
from gradmerge.text import printable

from ..making import near, random_state, read_model, write_model
from ..tasks.making import (
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_t5_checkpoint,
    tiny_vit_checkpoint,
    write_jsonl,
)

HOSTILE_NAMES = [
    "a`b``c",
    "line\n---\nbase_model: x\n```\n# Heading",
    "<img src=x onerror=alert(1)>|<b>",
    "\x1b[31m\u202e\udce9",
    "```" + " word" * 60 + "\n```",
    "[link](javascript:alert(1)) ![i](x)",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_hostile_name_is_text_wherever_it_stands(name: str) -> None:
    recipe = make_recipe(
        {
            "method": "gradient-matching",
            "base": {"model": name, "curvature": {"identity": 1.0}},
            "models": [{"model": name, "curvature": name}],
        }
    )
    text = render_card(
        ModelCardData(tags=["gradmerge"]),
        as_text(name),
        merge_text(recipe),
        recipe=as_block("yaml", recipe_text(recipe)),
    )
    assert printable(text) == text
    card: Any = ModelCard(text)
    assert card.data.to_dict() == {"tags": ["gradmerge"]}
    blocks = re.findall(r"^(`{3,})yaml\n(.*?)\n\1$", card.text, re.M | re.S)
    assert yaml.safe_load(blocks[0][1])["models"][0]["model"] == name
    assert all(fence not in block for fence, block in blocks)
    title, intro, *_ = [line for line in card.text.splitlines() if line]
    assert title.startswith("# ") and not re.search(r"(?<!\\)[<\[`!]", title)
    # Outside of code, nothing of the name is in the text.
    outside = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "NAME", intro)
    assert outside.startswith("Made from NAME and the base NAME with **gradient-matching** by gradmerge")


def write_models(folder: Path, **fronts: str) -> dict[str, Path]:
    """Write models of one shape, each with a card of this front matter if it is not empty."""
    base = random_state(0)
    models = {name: write_model(folder / name, near(base, seed)) for seed, name in enumerate(fronts)}
    for name, front in fronts.items():
        if front:
            (models[name] / "README.md").write_text(f"---\n{front}\n---\n# {name}\n")
    return models


def average(folder: Path, *names: str, **more: Any) -> tuple[dict[str, Any], str, gm.MergeResult]:
    """The metadata and the text of an average's card."""
    recipe = make_recipe({"method": "average", "models": list(names), **more}, folder=folder)
    result = gm.merge(recipe, folder / "out", force=True, progress=False)
    card = ModelCard.load(folder / "out" / "README.md")
    return card.data.to_dict(), card.text, result


def test_base_models_are_hub_ids_and_never_paths(tmp_path: Path) -> None:
    fronts = {"a": "base_model: org/origin", "c": "base_model: [./x, /d/e, models/f, gpt2, org/other]"}
    models = write_models(tmp_path, **fronts, b="", d="")
    config = models["b"] / "config.json"
    config.write_text(json.dumps({"model_type": "test", "_name_or_path": "google/base"}))
    snapshot = tmp_path / "cache/models--owner--its-name/snapshots/abc"
    shutil.copytree(models["d"], snapshot)
    data, text, _ = average(tmp_path, "./a", str(models["b"]), "c", str(snapshot))
    assert data["base_model"] == ["org/origin", "google/base", "org/other", "owner/its-name"]
    assert data["base_model_relation"] == "merge" and str(tmp_path) not in text
    (tmp_path / "org/model").mkdir(parents=True)
    names = ("models/base", "./base", "runs/checkpoint-500", "~/m/base", "gpt2", "a/b/c", "org/x--y", 5, "org/model")
    for name in names:
        config.write_text(json.dumps({"model_type": "test", "_name_or_path": name}))
        assert "base_model" not in average(tmp_path, "b")[0], name


def test_a_license_that_all_models_state_is_kept_and_otherwise_left_out_with_a_note(tmp_path: Path) -> None:
    other = "license: other\nlicense_name: own\nlicense_link: LICENSE"
    models = write_models(tmp_path, a="license: MIT", b="license: mit", c="license: gpl-3.0", d="", e=other, f=other)
    metadata = {name: read_all_metadata([gm.open_checkpoint(path)])[0] for name, path in models.items()}
    assert average(tmp_path, "a", "b")[0]["license"] == "mit"
    data = average(tmp_path, "e", "f")[0]
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "own", "LICENSE")
    for names, count in (("ab", 0), ("ef", 0), ("d", 0), ("ac", 1), ("ad", 1), ("ae", 1)):
        assert len(license_notes([metadata[name] for name in names], None)) == count
        assert not license_notes([metadata[name] for name in names], "mit")
    data, text, result = average(tmp_path, "a", "c")
    assert "license" not in data and "gpl-3.0" in text and any("gpl-3.0" in note for note in result.notes)
    data, text, result = average(tmp_path, "a", "c", output={"license": "apache-2.0"})
    assert data["license"] == "apache-2.0" and not result.notes


@pytest.mark.parametrize("front", ["a: [", "- 1", "!!python/object:os.system {}", "x: &a [*a]", "license: 2024-01-01"])
def test_a_broken_card_of_a_model_is_ignored(front: str, tmp_path: Path) -> None:
    write_models(tmp_path, a=front)
    assert average(tmp_path, "a")[0].keys() == {"library_name", "tags"}


def run_usage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the code of a card in the folder above, and return its variables."""
    [code] = re.findall(r"## Usage\n\n```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    monkeypatch.chdir(folder.parent)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


FAMILIES: dict[str, tuple[Callable[..., Path], str]] = {
    "bert": (tiny_bert_checkpoint, "text-classification"),
    "gpt2": (tiny_gpt2_checkpoint, "text-generation"),
    "t5": (tiny_t5_checkpoint, "text-generation"),
    "vit": (tiny_vit_checkpoint, "image-classification"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_code_of_a_card_loads_the_result(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, tag = FAMILIES[family]
    make(tmp_path / "a", seed=1)
    data, _, _ = average(tmp_path, "a")
    assert (data["pipeline_tag"], data["library_name"]) == (tag, "transformers")
    model = run_usage(tmp_path / "out", monkeypatch)["model"]
    stored, loaded = read_model(tmp_path / "out"), model.state_dict()
    shared = stored.keys() & loaded.keys()  # transformers renames some tensors of ViT in memory
    assert len(shared) > 5 and all((stored[name] == loaded[name]).all() for name in shared)


def test_the_card_of_an_adapter_names_its_base_and_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(("base", "tuned")):
        tiny_gpt2_checkpoint(tmp_path / name, seed=seed)
    options: Any = {"base": tmp_path / "base", "rank": 2, "progress": False}
    gm.extract_lora(tmp_path / "tuned", tmp_path / "lora", **options)
    data = ModelCard.load(tmp_path / "lora/README.md").data.to_dict()
    assert data.pop("tags") == ["gradmerge", "merge", "lora"]
    assert data == {"library_name": "peft", "pipeline_tag": "text-generation"}
    assert type(run_usage(tmp_path / "lora", monkeypatch)["model"]).__name__ == "PeftModelForCausalLM"
    (tmp_path / "base/README.md").write_text("---\nbase_model: org/origin\nlicense: mit\n---\n")
    (tmp_path / "tuned/README.md").write_text("---\nbase_model: org/tuned\nlicense: mit\n---\n")
    gm.extract_lora(tmp_path / "tuned", tmp_path / "lora", **options, force=True)
    card: Any = ModelCard.load(tmp_path / "lora/README.md")
    assert card.data.base_model == ["org/origin"] and card.data.base_model_relation == "adapter"
    assert card.data.license == "mit" and '"org/origin"' in card.text


def config(architecture: str, **more: Any) -> dict[str, Any]:
    return {"config.json": {"architectures": [architecture], **more}}


@pytest.mark.parametrize(
    ("files", "tag", "loader"),
    [
        (config("LlavaForConditionalGeneration", vision_config={}), "image-text-to-text", "ForImageTextToText"),
        (config("BertModel", model_type="bert"), None, "AutoModel.from"),
        (config("BertModel") | {"modules.json": []}, "sentence-similarity", "SentenceTransformer"),
        (config("__import__('os')"), None, "AutoModel.from"),
        ({}, None, "open_checkpoint"),
    ],
)
def test_the_task_and_the_code_follow_from_the_files(
    files: dict[str, Any], tag: str | None, loader: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert pipeline_tag(tmp_path) == tag
    code = usage(tmp_path, "m")
    assert loader in code and "__import__" not in code


def test_evaluations_are_in_the_card_with_standard_errors_and_rows(tmp_path: Path) -> None:
    tiny_bert_checkpoint(tmp_path / "a", seed=0)
    average(tmp_path, "a")
    path, rows = tmp_path / "out/README.md", [{"text": text, "label": i % 2} for i, text in enumerate(sentences(12))]
    first = write_jsonl(tmp_path / "dir/some data.jsonl", rows)
    numbers = gm.evaluate(path.parent, first, card=True, device="cpu")
    card: Any = ModelCard.load(path)
    results = {result.metric_name: result for result in card.data.eval_results}
    assert results.keys() == {name for name, value in numbers.items() if isinstance(value, float)}
    for name, result in results.items():
        assert result.metric_value == pytest.approx(numbers[name], rel=1e-5)
        assert (result.task_type, result.dataset_name) == ("text-classification", "some data.jsonl")
        assert re.fullmatch(r"[\w.-]+", result.dataset_type)
        assert f"`{name}` | {numbers[name]:.5g} |" in card.text
    assert [x["rows"] for x in json.loads((tmp_path / "out/gradmerge.json").read_text())["evaluations"]] == [12]
    # The same data replace their results. Other data, and what the user wrote, stay.
    path.write_text(path.read_text().replace("# out", "# My model"))
    more = [write_jsonl(tmp_path / name, rows[:6]) for name in ("more.jsonl", "other/more.jsonl")]
    for source in (*more, f"file://{first}"):
        gm.evaluate(path.parent, source, card=True, device="cpu")
    card = ModelCard.load(path)
    assert len(card.data.eval_results) == 3 * len(results) and "# My model" in card.text
    assert {x.dataset_name for x in card.data.eval_results} == {"some data.jsonl", "more.jsonl", "other/more.jsonl"}
    assert card.text.count("## Evaluation") == 1 and card.text.index("## Evaluation") < card.text.index("## Recipe")


def test_results_are_added_to_a_card_without_metadata_and_not_to_a_broken_one() -> None:
    item = evaluation(
        "arc", {"type": "arc", "name": "arc"}, {"acc": 0.5, "examples": 8, "standard_errors": {"acc": 0.25}}
    )
    card: Any = ModelCard(with_evaluations("# Only text\n", "out", [item]))
    assert "# Only text\n" in card.text and "| `arc` | 8 | `acc` | 0.5 | 0.25 |" in card.text
    assert [(x.metric_name, x.metric_value) for x in card.data.eval_results] == [("acc", 0.5)]
    with pytest.raises(gm.InputError, match=r"README\.md"):
        with_evaluations("---\nmodel-index: 5\n---\n# M\n", "out", [item])
