"""Settings tried one after another in memory, against merges on disk that are evaluated."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

import gradmerge as gm
from gradmerge.compare import interactive
from gradmerge.compare.evaluate import TaskData
from gradmerge.compare.ranking import unbeaten

from ..making import near, random_curvature, read_model, weight_bytes, write_recipe
from ..tasks.making import (
    labelled,
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_t5_checkpoint,
    tiny_vit_checkpoint,
    write_jsonl,
    write_sentence_model,
)

LIST = [0.25, 1.0]
#: A method, weights and changes each: of those that read nothing more, thresholds, random masks, curvature, products.
SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gradient-matching", {"a": 0.3}, {}),
    ("gradient-matching", {"a": LIST, "b": 0.7}, {"damping": 0.01}),
    ("task-arithmetic", {"a": 0.3, "b": -0.2}, {"options.scale": 0.5}),
    ("ties", {"a": 0.3, "b": 0.9}, {"options.density": 0.4, "options.scope": "tensor"}),
    ("dare", {"b": 0.4}, {"options.density": 0.3, "options.seed": 7}),
    ("fisher-averaging", {"a": 2.0}, {"damping": 1e-3}),
    ("karcher", {"a": 0.5}, {}),
    ("average", {}, {"options.include_base": True}),
    ("task-arithmetic", {"a": LIST}, {"exclude": ["bert.embeddings.*"]}),
]


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
def shared(texts: Path) -> Iterator[gm.Explorer]:
    """For tests that mind nothing in the history."""
    with gm.explore(texts / "recipe.yml", data_of(texts), threads=2) as found:
        yield found


@pytest.fixture
def explorer(shared: gm.Explorer) -> gm.Explorer:
    """The same, with nothing measured yet."""
    shared.history.clear()
    shared._compared = None
    return shared


@pytest.mark.parametrize(("method", "weights", "changes"), SETTINGS, ids=lambda value: str(value)[:20])
def test_a_setting_has_the_numbers_of_the_merge_on_disk(
    shared: gm.Explorer, texts: Path, tmp_path: Path, method: str, weights: dict[str, Any], changes: dict[str, Any]
) -> None:
    setting = shared.setting(method, weights, changes)
    found = shared.measure(setting)
    (tmp_path / "recipe.yml").write_text(shared.recipe_text(setting, tmp_path))
    gm.merge(tmp_path / "recipe.yml", tmp_path / "merged", progress=False)
    for task in ("a", "base"):
        there = gm.evaluate(tmp_path / "merged", data_of(texts)[task])
        assert found.metrics[task] == {name: there[name] for name in found.metrics[task]}
        assert float(found.rows[task]["accuracy"].mean()) == pytest.approx(there["accuracy"])


def test_nothing_is_read_from_disk_for_a_further_setting(
    explorer: gm.Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer.measure(explorer.own)
    for method in ("ties", "gradient-matching"):
        explorer.measure(explorer.setting(method, {"a": 0.2}))

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("read from disk")

    monkeypatch.setattr(os, "pread", refuse)
    monkeypatch.setattr(os, "preadv", refuse)
    for method in ("ties", "gradient-matching", "fisher-averaging"):
        assert explorer.measure(explorer.setting(method, {"a": 0.4})).values
    assert explorer.predict(explorer.setting(weights={"a": 0.6}))


def test_what_does_not_fit_memory_is_streamed_and_gives_the_same(
    texts: Path, shared: gm.Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = (texts / "base" / "model.safetensors").stat().st_size + 1
    for memory, streamed in ((0, "6 of 6"), (some, "5 of 6")):
        monkeypatch.setattr(interactive, "free_memory", lambda memory=memory: 2 * memory)
        with gm.explore(texts / "recipe.yml", data_of(texts)) as found:
            assert any(streamed in note and "read from disk" in note for note in found.notes)
            setting = found.setting(weights={"a": 0.45})
            assert found.measure(setting).metrics == shared.measure(setting).metrics
    assert not any("read from disk" in note for note in shared.notes)


def test_a_prediction_is_a_multiple_of_the_recipe_s_own(shared: gm.Explorer, texts: Path) -> None:
    assert shared.predict(shared.own) == {"a": 1.0, "b": 1.0, "base": 1.0}
    setting = shared.setting("task-arithmetic", {"a": 0.5, "b": 0.5})
    previewed = gm.preview(texts / "recipe.yml", weights="0.5,1", methods="gradient-matching,task-arithmetic")
    rows = {(row.setting.method, row.setting.weights): row for row in previewed.rows}
    one, own = rows["task-arithmetic", (0.5, 0.5)], rows["gradient-matching", (1.0, 1.0)]
    wanted = {task: one.costs[task] / own.costs[task] for task in one.costs}
    assert shared.predict(setting) == pytest.approx(wanted)


def test_of_a_large_model_a_sample_is_predicted(
    shared: gm.Explorer, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [shared.setting("task-arithmetic", {"a": 0.5, "b": 0.5}), shared.setting(weights={"a": 0.2})]
    whole = [shared._predicted(setting) for setting in settings]
    monkeypatch.setattr(interactive, "SAMPLED_ENTRIES", 2400)
    monkeypatch.setattr(interactive, "RANGE", 16)
    sampled = interactive.SampledPredictor(shared.recipe, shared._moves.plan, 1)
    assert isinstance(sampled.plan, interactive.SampledPlan)
    seen: dict[str, list[tuple[int, int]]] = {}
    for block in sampled.plan.blocks():
        seen.setdefault(block.job.name, []).append((block.start, block.stop))
    assert {*seen} == {job.name for job in sampled.plan.jobs}
    for job in sampled.plan.jobs:
        stretches = seen[job.name]
        assert all(a < b <= c for (a, b), (c, _) in itertools.pairwise(stretches))
        assert stretches[-1][1] <= job.info.numel
        total = sum(stop - start for start, stop in stretches)
        assert sampled.plan.scale(job) == pytest.approx(job.info.numel / total)
    assert 2000 < sum(stop - start for stretches in seen.values() for start, stop in stretches) < 3200
    for setting, wanted in zip(settings, whole, strict=True):
        found = sampled.evaluate([setting])[0]
        assert wanted is not None and found.parts.keys() == wanted.parts.keys()
        for task, cost in wanted.costs.items():
            assert found.costs[task] == pytest.approx(cost, rel=0.25)
            assert found.costs[task] != cost


def test_without_a_base_there_is_nothing_that_needs_one(texts: Path, tmp_path: Path) -> None:
    recipe = {"method": "weighted-average", "models": [str(texts / "a"), str(texts / "b")]}
    data = {name: data_of(texts)[name] for name in ("a", "b")}
    with gm.explore(recipe, data) as found:
        assert "karcher" in found.methods and not {"ties", "task-arithmetic"} & {*found.methods}
        setting = found.setting(weights={"a": 3.0})
        outcome = found.measure(setting)
        found.save(setting, tmp_path / "merged", progress=False)
        assert outcome.metrics["a"]["accuracy"] == gm.evaluate(tmp_path / "merged", data["a"])["accuracy"]
        answer = found.answers("a", [0], setting)[0]
        assert answer.base is None and answer.tuned is not None
        assert found.flips("a", setting, "base") == [] and found.predict(setting) is None
        assert {*found.figures(outcome)} == {"tasks", "front"}


def test_without_curvature_there_are_no_predictions_and_no_methods_that_need_it(texts: Path) -> None:
    with gm.explore(texts / "plain.yml", data_of(texts)) as found:
        assert found.predict(found.own) is None
        assert found.methods[0] == "ties" and "task-arithmetic" in found.methods
        assert not {"gradient-matching", "fisher-averaging", "removal", "regmean", "slerp"} & {*found.methods}


def test_layers_without_curvature_show_how_far_the_tuned_models_are(texts: Path) -> None:
    with gm.explore(texts / "plain.yml", data_of(texts)) as found:
        outcome = found.measure(found.setting("task-arithmetic", {"a": 0.3, "b": 0.0}))
        cells = numbers_of(found.figures(outcome)["layers"])
    base, a, b = (read_model(texts / name) for name in ("base", "a", "b"))
    merged = {name: base[name].double() + 0.3 * (a[name].double() - base[name].double()) for name in base}
    layer = [name for name in base if name.startswith("bert.encoder.layer.1.")]
    for model, state in (("a", a), ("b", b)):
        far, near_ = (
            sum(float((one[name].double() - state[name].double()).square().sum()) for name in layer)
            for one in (base, merged)
        )
        shown = [c["value"] for c in cells if c["row"] == "bert.encoder.layer.1" and c["column"] == model]
        assert shown == [pytest.approx((near_ / far) ** 0.5, rel=1e-4)]


def test_a_measurement_stops_when_it_is_told_to(explorer: gm.Explorer) -> None:
    shares: list[float] = []
    setting = explorer.setting(weights={"a": 0.1})
    explorer.measure(setting, advance=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 10
    for after in (1, 8, len(shares) - 2):
        asked = iter(range(1000))
        other = explorer.setting(weights={"a": 0.1 + 0.01 * after})
        with pytest.raises(gm.Superseded):
            explorer.measure(other, stop=lambda asked=asked, after=after: next(asked) >= after)
        assert len(explorer.history) == 1
    assert explorer.measure(explorer.setting(weights={"a": 0.11})).values  # and is as it was


def test_models_are_evaluated_with_the_first_setting_and_none_of_them_twice(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    evaluate = TaskData.evaluate
    monkeypatch.setattr(TaskData, "evaluate", lambda data, model: asked.append(data.name) or evaluate(data, model))
    with gm.explore(texts / "plain.yml", data_of(texts)) as found:
        assert found.notes and asked == []  # a page is there before anything is evaluated
        polls = iter(range(1000))
        with pytest.raises(gm.Superseded):
            found.measure(found.own, lambda: next(polls) >= 6)  # in the second task, of five batches each
        assert asked == ["a", "b"]
        shares: list[float] = []
        found.measure(found.own, advance=shares.append)
        assert asked == ["a", "b", *["b", "base"], *["a", "b", "base"] * 3]
        assert shares == sorted(shares) and shares[-1] == 1.0
        alone = gm.evaluate(texts / "a", data_of(texts)["b"])
        assert found.alone["a"]["b"] == {name: alone[name] for name in found.alone["a"]["b"]}
        assert {*found.alone} == {"base", "a", "b"} and len(asked) == 13


def test_who_waits_for_another_measurement_can_be_stopped(explorer: gm.Explorer) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow() -> bool:
        began.set()
        go_on.wait(20)
        return False

    first = threading.Thread(target=lambda: explorer.measure(explorer.setting(weights={"a": 0.2}), slow))
    first.start()
    assert began.wait(20)
    with pytest.raises(gm.Superseded):
        explorer.measure(explorer.setting(weights={"a": 0.3}), stop=lambda: True)
    assert explorer.predict(explorer.setting(weights={"a": 0.3})) is not None  # which does not wait
    go_on.set()
    first.join(20)
    assert [row.setting.weights for row in explorer.history] == [(0.2, 1.0)]


def test_the_best_of_settings_that_are_tied_is_the_recipe_s_own(explorer: gm.Explorer) -> None:
    assert explorer.best() is None
    for weight in (0.95, 1.0, 1.05):
        explorer.measure(explorer.setting(weights={"a": weight}))
    best, (low, own, _) = explorer.best(), explorer.history
    assert best is own and explorer.tied(low, own)
    far = explorer.measure(explorer.setting("task-arithmetic", {"a": 20.0, "b": -20.0}))
    assert explorer.best() is own or not explorer.tied(far, own)


def test_the_front_is_of_settings_that_none_beats_on_every_task(explorer: gm.Explorer) -> None:
    for weight in (0.0, 0.5, 1.0, 3.0):
        explorer.measure(explorer.setting("task-arithmetic", {"a": weight}))
    wanted = [
        row
        for row in explorer.history
        if not any(
            all(other.values[task] >= row.values[task] for task in explorer.tasks) and other.values != row.values
            for other in explorer.history
        )
    ]
    assert explorer.front() == wanted and wanted
    assert unbeaten([("x", (1.0, 0.0)), ("y", (0.0, 1.0)), ("z", (0.0, 0.0))]) == ["x", "y"]


def test_answers_are_those_of_the_three_models(shared: gm.Explorer, texts: Path, tmp_path: Path) -> None:
    setting = shared.setting(weights={"a": 0.35})
    rows = shared.shown_rows("a", 5)
    assert rows == [0, 8, 16, 24, 32]
    found = shared.answers("a", rows, setting)
    shared.save(setting, tmp_path / "merged", progress=False)
    models = {"base": texts / "base", "tuned": texts / "a", "merged": tmp_path / "merged"}
    wanted = labelled(40, 3, 1)
    for name, folder in models.items():
        model, tokenizer = _transformers(folder, "AutoModelForSequenceClassification")
        for answer in found:
            inputs = tokenizer(wanted[answer.row]["text"], return_tensors="pt")
            with torch.no_grad():
                chances = model(**inputs).logits[0].double().softmax(-1)
            said = getattr(answer, name)
            assert said.text == model.config.id2label[int(chances.argmax())]
            assert said.probability == pytest.approx(float(chances.max()), abs=1e-5)
            assert said.right == (said.text == answer.truth)
    assert [answer.text for answer in found] == [wanted[row]["text"] for row in rows]
    assert shared.answers("base", [0], setting)[0].tuned is None


def _transformers(folder: Path, kind: str) -> tuple[Any, Any]:
    import transformers

    return getattr(transformers, kind).from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(
        folder
    )


@pytest.mark.parametrize("against", ["base", "tuned", "own", "best"])
def test_flips_are_rows_that_one_model_gets_right_and_the_other_wrong(explorer: gm.Explorer, against: str) -> None:
    setting = explorer.setting("task-arithmetic", {"a": 1.0, "b": 0.9})
    explorer.measure(explorer.own)
    rows = list(range(explorer.examples["a"]))
    best = explorer.best()
    assert best is not None
    if against in ("own", "best"):
        before = [answer.merged for answer in explorer.answers("a", rows, explorer.own)]
    else:
        before = [getattr(answer, against) for answer in explorer.answers("a", rows, setting)]
    after = [answer.merged for answer in explorer.answers("a", rows, setting)]
    flips = explorer.flips("a", setting, against)
    assert [flip.row for flip in flips] == [row for row in rows if before[row].right != after[row].right]
    for flip in flips:
        assert (flip.turned == "right") == flip.after.right == (not flip.before.right)
        assert (flip.before, flip.after) == (before[flip.row], after[flip.row])


def test_a_saved_setting_is_the_merge_of_its_recipe(shared: gm.Explorer, texts: Path, tmp_path: Path) -> None:
    setting = shared.setting("ties", {"a": LIST}, {"density": 0.5})
    assert setting == shared.setting("ties", {"a": LIST}, {"options.density": 0.5})
    told: list[str] = []

    class Told:
        def begin(self, what: str, total: int, done: int = 0) -> None:
            told.append(what)

        def advance(self, amount: int) -> None: ...

    shared.save(setting, tmp_path / "saved", progress=Told())
    assert told
    text = shared.recipe_text(setting, texts)
    assert yaml.safe_load(text)["models"][0] == {"model": "./a", "curvature": "./curvature-a", "weight": LIST}
    (texts / "saved.yml").write_text(text)
    gm.merge(texts / "saved.yml", tmp_path / "merged", progress=False)
    kept, merged = weight_bytes(tmp_path / "saved"), weight_bytes(tmp_path / "merged")
    assert kept.keys() == merged.keys()
    assert kept["model.safetensors"] == merged["model.safetensors"]


def test_figures_and_a_report_show_what_was_measured(explorer: gm.Explorer, tmp_path: Path) -> None:
    with pytest.raises(gm.InputError):
        explorer.write_report(tmp_path / "report")
    for weight in (0.5, 1.0):
        outcome = explorer.measure(explorer.setting(weights={"a": weight}))
    charts = explorer.figures(outcome)
    assert {*charts} == {"tasks", "front", "layers"}
    bars = numbers_of(charts["tasks"])
    now = {bar["group"]: bar for bar in bars if bar["series"] == "gradient-matching now"}
    for task in explorer.tasks:
        assert now[task]["x"] == outcome.values[task]
        assert now[task]["x error"] == outcome.metrics[task]["standard_errors"]["accuracy"]
    # Layers are in per cent of what the recipe's own costs a task in all.
    for task, share in (explorer.predict(outcome.setting) or {}).items():
        cells = [cell for cell in numbers_of(charts["layers"]) if cell["column"] == task]
        assert sum(cell["value"] for cell in cells) == pytest.approx(100 * share, abs=0.01 * len(cells))
    page = explorer.write_report(tmp_path / "report")
    assert "gradient-matching" in page.read_text("utf-8") and (tmp_path / "report" / "preview.csv").is_file()
    with pytest.raises(gm.InputError, match="report"):
        explorer.write_report(tmp_path / "report")


def test_removal_is_explored_by_what_is_forgotten_and_what_is_kept(texts: Path) -> None:
    part = {name: {"model": str(texts / name), "curvature": str(texts / f"curvature-{name}")} for name in ("base", "a")}
    data = {name: data_of(texts)[name] for name in ("a", "base")}
    with gm.explore({"method": "removal", "base": part["base"], "models": [part["a"]]}, data) as found:
        assert (found.methods, found.removes) == (["removal", "task-arithmetic"], ["a"])
        strengths = found.strengths()
        assert [setting.weights[0] for setting in strengths] == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5]
        assert found.strengths("task-arithmetic")[4].weights == (-1.0,)
        assert found.setting("task-arithmetic").weights == (-1.0,)
        for setting in strengths:
            outcome = found.measure(setting)
        assert found.measure(strengths[0]).metrics == found.alone["base"]
        charts = found.figures(outcome)
        assert "trade-off" in charts and "front" not in charts and found.best() is None
        for setting in found.strengths("task-arithmetic"):
            found.measure(setting)
        assert found.preview().best() is None
        assert str(found.strengths("task-arithmetic")[0].weights[0]) == "0.0"
        points = numbers_of(charts["trade-off"])
        assert [point["x"] for point in points] == [row.values["a"] for row in found.history][: len(strengths)]
        for row in found.front():
            assert not any(
                other.values["a"] < row.values["a"] and other.values["base"] > row.values["base"]
                for other in found.history
            )


def test_controls_are_those_of_the_method_s_signature(shared: gm.Explorer) -> None:
    assert shared.layer_groups == ["first layers", "last layers"]
    for method in shared.methods:
        options = {option.name: option for option in gm.METHODS[method].options}
        for control in shared.controls(method):
            assert control.meaning and control.label
            if control.key == "damping":
                assert control.logarithmic and control.low and control.low > 0
                continue
            option = options[control.key.removeprefix("options.")]
            assert control.value == option.default
            if control.low is not None and control.high is not None:
                values = [control.low, control.high]
            else:
                values = list(control.choices or ())
            assert len(values) > 1
            for value in values:
                # Of della, these two bound each other.
                if method != "della" or control.key not in ("options.epsilon", "options.density"):
                    shared.setting(method, {}, {control.key: value})
    density = {control.key: control for control in shared.controls("ties")}["options.density"]
    assert (density.low, density.high, density.value, density.choices) == (0, 1, 0.2, None)
    assert shared.weight_control("average") is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("tise",), "'ties'"),
        (("regmean",), "regmean"),
        (("ties", {"c": 1.0}), "'c'"),
        (("ties", {"a": [1, 2, 3, 4, 5]}), "first layers, last layers"),
        (("ties", {"a": "much"}), "a is 'much'"),
        (("ties", {}, {"densty": 0.5}), "'density'"),
        (("ties", {}, {"options.density": 2}), "density"),
        (("weighted-average", {"a": 1, "b": -1}), "weights"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(shared: gm.Explorer, arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(gm.InputError, match=named):
        shared.setting(*arguments)


def test_wrong_requests_are_refused(texts: Path, shared: gm.Explorer, tmp_path: Path) -> None:
    for recipe, data in (
        (texts / "recipe.yml", None),
        (tmp_path, None),
        (texts / "recipe.yml", {"c": "c.jsonl"}),
        ({"method": "regmean", "models": [str(texts / "a")]}, data_of(texts)),
    ):
        with pytest.raises(gm.InputError):
            gm.explore(recipe, data)  # type: ignore[arg-type]
    for task, row in (("c", 0), ("a", 40)):
        with pytest.raises(gm.InputError, match=task):
            shared.answers(task, [row], shared.own)
    with pytest.raises(gm.InputError, match="'best'"):
        shared.flips("a", shared.own, "bst")
    with pytest.raises(gm.InputError):
        shared.measure(shared.setting("task-arithmetic", {"a": 1e30}))
    assert not any(row.setting.weights == (1e30, 1.0) for row in shared.history)


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


def make_embeddings(folder: Path) -> dict[str, str]:
    write_sentence_model(folder / "base")
    texts = zip(sentences(6), sentences(6, 1), sentences(6, 2), strict=True)
    rows = [dict(zip(("anchor", "positive", "negative"), each, strict=True)) for each in texts]
    return {"a": str(write_jsonl(folder / "a.jsonl", rows))}


@pytest.mark.parametrize("make", [make_images, make_prompts, make_pairs, make_embeddings])
def test_every_task_is_measured_and_answered(tmp_path: Path, make: Any) -> None:
    data = make(tmp_path)
    tuned(tmp_path / "base", tmp_path / "a", 1)
    recipe = {"method": "task-arithmetic", "base": str(tmp_path / "base"), "models": [str(tmp_path / "a")]}
    with gm.explore(recipe, data) as found:
        for weight in (0.3, 0.6):  # the second into the same model
            setting = found.setting(weights={"a": weight})
            outcome = found.measure(setting)
        found.save(setting, tmp_path / "merged", progress=False)
        there = gm.evaluate(tmp_path / "merged", data["a"])
        assert outcome.metrics["a"] == {name: there[name] for name in outcome.metrics["a"]}
        answer = found.answers("a", [1], setting)[0]
        assert (answer.image is not None) == (make is make_images)
        assert (answer.text is not None) == (make is not make_images)
        assert answer.base is not None and answer.tuned is not None
        if make in (make_prompts, make_pairs):
            kind = "AutoModelForCausalLM" if make is make_prompts else "AutoModelForSeq2SeqLM"
            model, tokenizer = _transformers(tmp_path / "merged", kind)
            ids = tokenizer(answer.text, return_tensors="pt").input_ids
            written = model.generate(ids, max_new_tokens=8, do_sample=False)[0]
            wanted = tokenizer.decode(written[ids.shape[1] if make is make_prompts else 1 :], skip_special_tokens=True)
            assert answer.merged.text.startswith(wanted.strip()) or answer.merged.text == wanted
            changed = found.flips("a", setting, "tuned")
            assert {flip.turned for flip in changed} <= {"better", "worse"} and len(changed) == 6
        else:
            assert answer.merged.probability is not None
            right = [one.merged.right for one in found.answers("a", list(range(6)), setting)]
            assert sum(map(bool, right)) / 6 == pytest.approx(outcome.values["a"])


def test_the_folder_of_a_demo_is_a_recipe_with_data(tmp_path: Path) -> None:
    demo = tmp_path / "demo"
    tiny_vit_checkpoint(demo / "models" / "base")
    generator = np.random.default_rng(0)
    arrays = {"x_valid": generator.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8), "y_valid": np.arange(6) % 3}
    (demo / "data").mkdir()
    for name in ("upright", "tilted", "rest"):
        np.savez(demo / "data" / f"{name}.npz", **arrays)
    tuned(demo / "models" / "base", demo / "models" / "tilted", 1)
    shutil.copytree(demo / "models" / "tilted", demo / "models" / "joint-tilted")
    (demo / "recipes").mkdir()
    for recipe, model in (("gradient-matching", "tilted"), ("negation", "joint-tilted")):
        write_recipe(
            demo / "recipes" / f"{recipe}.yml",
            {"method": "task-arithmetic", "base": "../models/base", "models": [f"../models/{model}"]},
        )
    with gm.explore(demo) as found:
        assert found.tasks == ["tilted", "base"] and found.examples == {"tilted": 6, "base": 6}
    with gm.explore(demo / "recipes" / "negation.yml") as found:
        assert found.tasks == ["joint-tilted", "base"]


def test_a_calibrated_setting_measures_as_the_saved_merge_does_after_calibration(texts: Path, tmp_path: Path) -> None:
    """On disk: calibrated on the rows with even numbers, evaluated on those with odd ones."""
    for name in ("a", "b"):
        lines = (texts / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}-fit.jsonl").write_text("".join(lines[::2]))
        (tmp_path / f"{name}-rest.jsonl").write_text("".join(lines[1::2]))
    with gm.explore(
        texts / "recipe.yml", {name: data_of(texts)[name] for name in ("a", "b")}, device="cpu"
    ) as explorer:
        setting = explorer.setting("task-arithmetic", {"a": 0.4, "b": 0.4})
        explorer.save(setting, tmp_path / "merged", progress=False)
        found = explorer.calibrate(setting)
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
    for metrics, model in ((found.before, "merged"), (found.after, "calibrated")):
        for name in ("a", "b"):
            want = gm.evaluate(str(tmp_path / model), str(tmp_path / f"{name}-rest.jsonl"), device="cpu")
            assert metrics[name]["loss_per_example"] == pytest.approx(want["loss_per_example"], rel=1e-3), model
    assert found.rows == {"a": 20, "b": 20} and found.result.improved


def test_others_measure_while_a_setting_is_calibrated(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gm.explore(texts / "recipe.yml", {"a": data_of(texts)["a"]}, device="cpu", limit=8) as explorer:

        def calibrate(*given: Any, **options: Any) -> Any:
            other = threading.Thread(target=explorer.measure, args=[explorer.setting("average")])
            other.start()
            other.join(60)
            assert not other.is_alive()
            return gm.calibrate(*given, **options)

        monkeypatch.setattr("gradmerge.api.explore.calibrate", calibrate)
        explorer.calibrate(explorer.own)
        assert [row.setting.method for row in explorer.history] == ["average"]


def test_calibration_needs_four_rows_and_memory(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gm.explore(texts / "recipe.yml", {"a": data_of(texts)["a"]}, device="cpu", limit=4) as explorer:
        assert explorer.calibrate(explorer.own).rows == {"a": 2}
        monkeypatch.setattr("gradmerge.compare.interactive.free_memory", lambda: 1000)
        with pytest.raises(gm.InputError):
            explorer.calibrate(explorer.own)
    monkeypatch.undo()
    with gm.explore(texts / "recipe.yml", {"a": data_of(texts)["a"]}, device="cpu", limit=3) as explorer:
        with pytest.raises(gm.InputError):
            explorer.calibrate(explorer.own)
