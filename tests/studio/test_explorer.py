"""Settings tried one after another in memory, against merges on disk that are evaluated."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gradmerge as gm
from gradmerge.compare.evaluate import Superseded
from gradmerge.studio.explorer import Explorer

from ..making import near, random_curvature, read_model, write_recipe
from ..tasks.making import (
    labelled,
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_t5_checkpoint,
    tiny_vit_checkpoint,
    write_jsonl,
)

#: Methods and keys of the recipe: of those that read nothing more, thresholds, random masks, curvature, products.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("gradient-matching", {"models.0.weight": 0.25, "models.1.weight": 0.7, "damping": 0.01}),
    ("ties", {"models.0.weight": 0.3, "options.density": 0.4, "options.scope": "tensor"}),
    ("average", {"options.include_base": True}),
    ("task-arithmetic", {"models.0.weight": 0.25, "exclude": ["bert.embeddings.*"]}),
]


def weights(a: float, b: float | None = None) -> dict[str, Any]:
    return {"models.0.weight": a} | ({} if b is None else {"models.1.weight": b})


def tuned(base: Path, out: Path, seed: int) -> Path:
    shutil.copytree(base, out)
    state = near(read_model(base), seed, 0.3)
    save_file(state, out / "model.safetensors", {"format": "pt"})
    return out


def data_of(folder: Path) -> dict[str, str]:
    return {name: str(folder / f"{name}.jsonl") for name in ("a", "b", "base")}


def numbers_of(chart: Any) -> list[dict[str, Any]]:
    """The rows that a chart draws."""
    drawn = chart.to_dict()
    return list(drawn["datasets"][drawn["data"]["name"]])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers, two models tuned from it, curvature of all, rows for each, and a recipe."""
    folder = tmp_path_factory.mktemp("explore")
    tiny_bert_checkpoint(folder / "base", labels=3, num_hidden_layers=2, id2label={0: "no", 1: "<b>so</b>", 2: "yes"})
    for seed, name in enumerate(("base", "a", "b")):
        if name != "base":
            tuned(folder / "base", folder / name, seed)
        random_curvature(seed, read_model(folder / name)).save(folder / f"curvature-{name}")
        write_jsonl(folder / f"{name}.jsonl", labelled(40, 3, seed))
    parts = {name: {"model": f"./{name}", "curvature": f"./curvature-{name}"} for name in ("base", "a", "b")}
    recipe = {"method": "gradient-matching", "base": parts["base"], "models": [parts["a"], parts["b"]]}
    write_recipe(folder / "recipe.yml", recipe)
    write_recipe(folder / "plain.yml", {"method": "ties", "base": "./base", "models": ["./a", "./b"]})
    return folder


@pytest.fixture(scope="module")
def shared(texts: Path) -> Iterator[Explorer]:
    """For tests that mind nothing in the history."""
    with contextlib.closing(Explorer(texts / "recipe.yml", data_of(texts), threads=2)) as found:
        yield found


@pytest.fixture
def explorer(shared: Explorer) -> Explorer:
    """The same, with nothing measured yet."""
    shared.history.clear()
    shared._compared = None
    return shared


@pytest.mark.parametrize(("method", "overrides"), SETTINGS, ids=lambda value: str(value)[:20])
def test_a_setting_has_the_numbers_of_the_merge_on_disk(
    shared: Explorer, texts: Path, tmp_path: Path, method: str, overrides: dict[str, Any]
) -> None:
    setting = shared.setting(method, overrides)
    found = shared.measure(setting)
    (tmp_path / "recipe.yml").write_text(shared.recipe_text(setting, tmp_path))
    gm.merge(tmp_path / "recipe.yml", tmp_path / "merged", progress=False)
    for task in ("a", "base"):
        there = gm.evaluate(tmp_path / "merged", data_of(texts)[task])
        assert found.metrics[task] == {name: there[name] for name in found.metrics[task]}
        assert float(found.rows[task]["accuracy"].mean()) == pytest.approx(there["accuracy"])


def test_nothing_is_read_from_disk_for_a_further_setting(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    explorer.measure(explorer.own)
    for method in ("ties", "gradient-matching"):
        explorer.measure(explorer.setting(method, weights(0.2)))

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("read from disk")

    monkeypatch.setattr(os, "pread", refuse)
    monkeypatch.setattr(os, "preadv", refuse)
    for method in ("ties", "gradient-matching", "fisher-averaging"):
        assert explorer.measure(explorer.setting(method, weights(0.4))).values


def test_a_measurement_stops_when_it_is_told_to(explorer: Explorer) -> None:
    shares: list[float] = []
    setting = explorer.setting(overrides=weights(0.1))
    explorer.measure(setting, advance=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 10
    for after in (1, 8, len(shares) - 2):
        asked = iter(range(1000))
        other = explorer.setting(overrides=weights(0.1 + 0.01 * after))
        with pytest.raises(Superseded):
            explorer.measure(other, stop=lambda asked=asked, after=after: next(asked) >= after)
        assert len(explorer.history) == 1
    assert explorer.measure(explorer.setting(overrides=weights(0.11))).values  # and is as it was


def test_answers_are_those_of_the_three_models(shared: Explorer, texts: Path, tmp_path: Path) -> None:
    setting = shared.setting(overrides=weights(0.35))
    found = shared.answers("a", setting, 5)
    shared.save(setting, tmp_path / "merged", progress=False)
    rows = [labelled(40, 3, 1)[number] for number in (0, 8, 16, 24, 32)]
    assert [answer.row.text for answer in found] == [row["text"] for row in rows]
    for place, folder in enumerate((texts / "base", texts / "a", tmp_path / "merged")):
        model, tokenizer = _transformers(folder, "AutoModelForSequenceClassification")
        for row, answer in zip(rows, found, strict=True):
            inputs = tokenizer(row["text"], return_tensors="pt")
            with torch.no_grad():
                chances = model(**inputs).logits[0].double().softmax(-1)
            said = answer.predictions[place]
            assert said is not None and said.text == model.config.id2label[int(chances.argmax())]
            assert said.probability == pytest.approx(float(chances.max()), abs=1e-5)
            assert said.right == (said.text == answer.row.label)
    assert len(shared.answers("base", setting)[0].predictions) == 2


def _transformers(folder: Path, kind: str) -> tuple[Any, Any]:
    import transformers

    return getattr(transformers, kind).from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(
        folder
    )


@pytest.mark.parametrize("other", ["base", "a"])
def test_flips_are_rows_that_one_model_gets_right_and_the_other_wrong(explorer: Explorer, other: str) -> None:
    setting = explorer.setting("task-arithmetic", weights(1.0, 0.9))
    answers = explorer.answers("a", setting, explorer.examples["a"])
    place = ("base", "a").index(other)
    want = [one.row for one in answers if one.predictions[place].right != one.predictions[-1].right]  # type: ignore[union-attr]
    flips = explorer.flips("a", setting, other)
    assert [flip.row for flip in flips] == want and want
    for flip in flips:
        before, after = (said is not None and said.right for said in flip.predictions)
        assert (flip.change == "right") == after == (not before)


def test_a_report_shows_what_was_measured(explorer: Explorer, tmp_path: Path) -> None:
    explorer.measure(explorer.own)
    assert "gradient-matching" in explorer.write_report(tmp_path / "report").read_text("utf-8")


def test_a_removal_compares_what_is_forgotten_with_what_is_kept(texts: Path) -> None:
    part = {name: {"model": str(texts / name), "curvature": str(texts / f"curvature-{name}")} for name in ("base", "a")}
    data = {name: data_of(texts)[name] for name in ("a", "base")}
    write_recipe(texts / "removal.yml", {"method": "removal", "base": part["base"], "models": [part["a"]]})
    with contextlib.closing(Explorer(texts / "removal.yml", data)) as found:
        assert ([*found.controls], found.removes) == (["removal", "task-arithmetic"], ["a"])
        assert found.setting("task-arithmetic").weights == (-1.0,)
        strengths = found.shared_weights(found.own)
        assert [setting.weights[0] for setting in strengths] == pytest.approx([0.2 * number for number in range(11)])
        for setting in strengths:
            found.measure(setting)
        assert found.measure(strengths[0]).metrics == found.evaluator.alone["base"] and found.best() is None
        points = numbers_of(found.trade_offs(strengths[0]))
        assert [point["x"] for point in points] == [row.values["a"] for row in found.history]


def test_controls_come_from_the_signature_of_the_method(shared: Explorer) -> None:
    for method, controls in shared.controls.items():
        for key, control in controls.items():
            for value in (control.low, control.high) if key.startswith("options.") else ():
                # For della, these two bound each other.
                if method != "della" or key not in ("options.epsilon", "options.density"):
                    shared.setting(method, {key: value})
    assert not shared.controls["average"] and "damping" in shared.controls["gradient-matching"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("ties", {"models.2.weight": 1.0}),
        ("ties", {"options.densty": 0.5}),
        ("ties", {"options.density": 2}),
        ("weighted-average", weights(1, -1)),
    ],
)
def test_a_setting_that_cannot_be_merged_is_refused(shared: Explorer, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(gm.InputError):
        shared.setting(*arguments)


def test_without_base_or_curvature_methods_that_need_them_are_not_offered(texts: Path) -> None:
    with contextlib.closing(Explorer(texts / "plain.yml", data_of(texts))) as found:
        assert not {"gradient-matching", "fisher-averaging", "removal", "regmean"} & {*found.controls}
    write_recipe(texts / "baseless.yml", {"method": "weighted-average", "models": ["./a", "./b"]})
    with contextlib.closing(
        Explorer(texts / "baseless.yml", {name: data_of(texts)[name] for name in ("a", "b")})
    ) as found:
        assert not {"ties", "task-arithmetic"} & {*found.controls}
        base, tuned, _ = found.answers("a", found.own)[0].predictions
        assert base is None and tuned is not None and found.flips("a", found.own, "base") == []


def make_images(folder: Path) -> dict[str, str]:
    tiny_vit_checkpoint(folder / "base")
    generator = np.random.default_rng(0)
    np.savez(folder / "a.npz", x=generator.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8), y=np.arange(6) % 3)
    return {"a": str(folder / "a.npz")}


def make_prompts(folder: Path) -> dict[str, str]:
    tiny_gpt2_checkpoint(folder / "base")
    rows = [{"prompt": one, "completion": " the"} for one in sentences(6)]
    return {"a": str(write_jsonl(folder / "a.jsonl", rows))}


def make_pairs(folder: Path) -> dict[str, str]:
    tiny_t5_checkpoint(folder / "base")
    rows = [{"source": one, "target": two} for one, two in zip(sentences(6), sentences(6, 1), strict=True)]
    return {"a": str(write_jsonl(folder / "a.jsonl", rows))}


@pytest.mark.parametrize("make", [make_images, make_prompts, make_pairs])
def test_every_task_is_measured_and_answered(tmp_path: Path, make: Any) -> None:
    data = make(tmp_path)
    tuned(tmp_path / "base", tmp_path / "a", 1)
    recipe = {"method": "task-arithmetic", "base": str(tmp_path / "base"), "models": [str(tmp_path / "a")]}
    with contextlib.closing(Explorer(recipe, data)) as found:
        for weight in (0.3, 0.6):  # the second into the same model
            setting = found.setting(overrides=weights(weight))
            outcome = found.measure(setting)
        found.save(setting, tmp_path / "merged", progress=False)
        there = gm.evaluate(tmp_path / "merged", data["a"])
        assert outcome.metrics["a"] == {name: there[name] for name in outcome.metrics["a"]}
        answers = found.answers("a", setting, 6)
        assert all((one.row.image is not None) == (make is make_images) == (one.row.text is None) for one in answers)
        assert all(said is not None for one in answers for said in one.predictions)


def test_a_calibrated_setting_measures_as_the_saved_merge_does_after_calibration(texts: Path, tmp_path: Path) -> None:
    """On disk: calibrated on the rows with even numbers, evaluated on those with odd ones."""
    for name in ("a", "b"):
        lines = (texts / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}-fit.jsonl").write_text("".join(lines[::2]))
        (tmp_path / f"{name}-rest.jsonl").write_text("".join(lines[1::2]))
    with contextlib.closing(
        Explorer(texts / "recipe.yml", {name: data_of(texts)[name] for name in ("a", "b")}, device="cpu")
    ) as explorer:
        setting = explorer.setting("task-arithmetic", weights(0.4, 0.4))
        explorer.save(setting, tmp_path / "merged", progress=False)
        result, tasks = explorer.calibrate(setting)
    rows = {name: str(tmp_path / f"{name}-fit.jsonl") for name in ("a", "b")}
    teachers = {name: str(texts / name) for name in ("a", "b")}
    gm.calibrate(
        str(tmp_path / "merged"),
        rows,
        teachers=teachers,
        out=tmp_path / "calibrated",
        curvature="none",
        device="cpu",
        progress=False,
    )
    for name, task in tasks.items():
        for value, model in ((task.before, "merged"), (task.after, "calibrated")):
            want = gm.evaluate(str(tmp_path / model), str(tmp_path / f"{name}-rest.jsonl"), device="cpu")
            assert value == pytest.approx(want[task.metric]) and task.rows == 20
    assert result.improved and tasks.keys() == {"a", "b"}
