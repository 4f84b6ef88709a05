"""Image tasks added to a vision transformer: the whole experiment at its smallest, its numbers against slow ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from experiments.common.training import Training
from experiments.vision.__main__ import main
from experiments.vision.data import Images, Part, fitted, load_part, words, write_task
from experiments.vision.merging import Measures, Merge, merged, merges, prior_scalar, scores
from experiments.vision.models import (
    Heads,
    clip_classifier,
    enlarged,
    fit_head,
    load_classifier,
    new_classifier,
    save_classifier,
)
from experiments.vision.report import at, best, mean_curve, tables
from experiments.vision.settings import HUB, LOCAL, PRETRAINED, SCALES, epochs_on
from PIL import Image
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, ViTConfig, ViTForImageClassification

import gradmerge as gm
from tests.making import near, random_curvature, random_state

CLASSES = {"gtsrb": 7, "intel_scenes": 3}
TASKS = ("mnist", "usps", "gtsrb", "intel_scenes")


def archive(path: Path, classes: int, shape: tuple[int, ...], seed: int, train: int = 60, test: int = 20) -> None:
    """Images of one brightness a class, with noise, and labels in order, as files often have them."""
    random = np.random.default_rng(seed)
    found: dict[str, Any] = {"classes": np.array([f"kind_{k}" for k in range(classes)])}
    for split, rows in (("train", train), ("test", test)):
        labels = np.sort(np.arange(rows) % classes)
        level = (40 + 200 * labels / classes).reshape(-1, *[1] * len(shape))
        noise = random.normal(0, 15, (rows, *shape))
        found |= {f"x_{split}": np.clip(level + noise, 0, 255).astype(np.uint8), f"y_{split}": labels.astype(np.uint8)}
    np.savez(path, **found)


@pytest.fixture(scope="module", autouse=True)
def little_work() -> Iterator[None]:
    """Half of the tasks, of every size and number of classes, for one epoch, to save time."""
    tiny = SCALES["tiny"]
    with pytest.MonkeyPatch.context() as patch:
        short = replace(tiny.fine_tuning, epochs=1)
        patch.setitem(SCALES, "tiny", replace(tiny, tasks=TASKS, fine_tuning=short, joint=short))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    shapes = {"usps": (16, 16), "gtsrb": (32, 32, 3), "cifar10": (32, 32, 3), "intel_scenes": (32, 32, 3)}
    for number, task in enumerate(LOCAL):
        archive(folder / f"{task}.npz", CLASSES.get(task, 10), shapes.get(task, (28, 28)), number)
    return folder


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "vision"
    assert main(["--scale", "tiny", "--data-dir", str(data), "-o", str(out), "--seeds", "0,1", "--device", "cpu"]) == 0
    return out


def files_of(out: Path) -> dict[str, bytes]:
    kept = [out / "results.json", out / "results.md", *sorted((out / "figures").iterdir())]
    return {path.name: path.read_bytes() for path in kept}


def test_the_results_hold_every_merge_of_every_seed_and_start_from_the_base(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert results["experiment"] == "vision" and results["seeds"].keys() == {"0", "1"}
    assert results["data"]["gtsrb"] == {"classes": 7, "train": 54, "validation": 6, "test": 20}
    for one in results["seeds"].values():
        assert {"task-arithmetic", "gradient-matching", "gradient-matching, sum", "ties"} < one["curves"].keys()
        assert {"gradient-matching, sampled labels", "tsv", "iso-c"} < one["curves"].keys()
        fisher = {f"fisher-averaging, {kind}" for kind in ("mean", "sum", "mean, sampled labels")}
        assert {"average", "regmean", *fisher} == one["fixed"].keys()
        assert one["references"].keys() == {"base", "joint", "individual"}
        for curve in one["curves"].values():
            assert at(curve["test"], 0) == one["references"]["base"]["test"]
            assert at(curve["loss"], 0) == pytest.approx(one["references"]["base"]["loss"], rel=1e-6)
        assert one["scalar"]["sum"] == pytest.approx(54 * one["scalar"]["mean"])
    assert results["seeds"]["0"]["curves"] != results["seeds"]["1"]["curves"]


def test_running_again_changes_no_file_and_makes_no_stage_again(finished: Path, data: Path) -> None:
    before = files_of(finished)
    stages = {path: path.stat().st_mtime_ns for path in finished.rglob(".stages/*.json")}
    main(["--scale", "tiny", "--data-dir", str(data), "-o", str(finished), "--seeds", "0,1", "--device", "cpu"])
    assert files_of(finished) == before
    assert {path: path.stat().st_mtime_ns for path in finished.rglob(".stages/*.json")} == stages


def test_a_run_that_was_stopped_ends_with_the_same_numbers(finished: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    shutil.copytree(finished, out)
    for gone in ("results.json", "results.md"):
        (out / gone).unlink()
    for gone in ("tuned-usps", "merges"):
        shutil.rmtree(out / "seed-1" / gone)
    (out / "seed-1" / "tuned-usps.partial").mkdir()
    main(["--scale", "tiny", "--data-dir", str(data), "-o", str(out), "--seeds", "0,1", "--device", "cpu"])

    def numbers(folder: Path) -> dict[str, Any]:
        found = json.loads((folder / "results.json").read_text())["seeds"]
        return {s: {k: one[k] for k in ("references", "fixed", "curves", "scalar")} for s, one in found.items()}

    assert numbers(out) == numbers(finished)


def test_tables_and_figures_are_made_of_the_results_alone(finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "results.json", tmp_path)
    assert main(["--render-only", "-o", str(tmp_path)]) == 0
    assert files_of(tmp_path) == files_of(finished)
    text = (tmp_path / "results.md").read_text()
    assert "| 1 | " in text and "26.5" in text and "62.6" in text and "±" in text
    assert "gradient matching" in (tmp_path / "figures" / "scaling.svg").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--scale", "tiny"], "needs --data-dir"),
        (["--scale", "tiny", "--data-dir", "."], "neither mnist.npz nor a folder mnist"),
        (["--scale", "tiny", "--data-dir", ".", "--model", "x"], "leave --model out"),
        (["--scale", "tiny", "--data-dir", ".", "--weights", "0,0.5"], "1 is not among the weights"),
        (["--render-only"], "there is no"),
    ],
)
def test_wrong_options_end_with_status_2(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main([*options, "-o", str(tmp_path / "out")])
    assert stop.value.code == 2 and said in capsys.readouterr().err


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP model of a few thousand parameters that reads letter by letter."""
    folder = tmp_path_factory.mktemp("clip")
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.:\"'"
    vocabulary = {token: k for k, token in enumerate([*letters, *(f"{c}</w>" for c in letters)])}
    vocabulary |= {token: len(vocabulary) + k for k, token in enumerate(["<|startoftext|>", "<|endoftext|>"])}
    CLIPTokenizer(vocabulary, []).save_pretrained(folder)
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {
        "bos_token_id": vocabulary["<|startoftext|>"],
        "eos_token_id": vocabulary["<|endoftext|>"],
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config=small | ids | {"vocab_size": len(vocabulary), "max_position_embeddings": 77, "projection_dim": 8},
        vision_config=small | {"image_size": 32, "patch_size": 16, "projection_dim": 8},
        projection_dim=8,
    )
    CLIPModel(config).save_pretrained(folder)
    return folder


def test_the_full_scale_runs_on_a_local_model_and_local_images(clip: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number, task in enumerate(HUB):
        shape = {"mnist": (28, 28), "svhn": (32, 32, 3)}.get(task, (40, 48, 3))
        archive(data / f"{task}.npz", 4, shape, number, train=20, test=8)
    (data / "dtd.npz").unlink()  # and one as a folder of images by class
    for split, rows in (("train", 8), ("test", 2)):
        for kind in range(4):
            folder = data / "dtd" / split / f"kind_{kind}"
            folder.mkdir(parents=True)
            for row in range(rows):
                pixels = np.random.default_rng([kind, row]).integers(0, 255, (50, 36 + row, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{row}.png")
    out = tmp_path / "out"
    options = ["--data-dir", str(data), "-o", str(out), "--device", "cpu", "--weights", "0,1", "--strength", "10"]
    assert main(["--model", str(clip), *options]) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["scale"] == "full" and results["data"]["dtd"]["train"] == 29
    assert np.load(out / "data" / "mnist" / "train-x.npy", mmap_mode="r").shape[1:] == (28, 28, 3)
    assert np.load(out / "data" / "cars" / "train-x.npy", mmap_mode="r").shape[1:] == (32, 32, 3)
    assert len(results["seeds"]["0"]["curves"]["gradient-matching"]["test"]["svhn"]) == 2
    assert results["command"].endswith("--seeds 0 --strength 10 --weights 0,1")
    assert results["settings"]["fine_tuning"]["strength"] == 10
    assert "paper" in tables(results)


def test_a_clip_head_is_the_cosine_with_the_text_times_the_scale_of_the_model(clip: Path) -> None:
    classes = {"mnist": ["0", "1", "2"], "sun397": ["abbey", "attic"]}
    classifier = clip_classifier(str(clip), classes).eval()
    model = CLIPModel.from_pretrained(clip).eval()
    tokenizer = CLIPTokenizer.from_pretrained(clip)
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        logits = classifier(pixels, torch.tensor([1, 1]))
        scaled = (pixels / 255 - classifier.mean) / classifier.std
        for column, name in enumerate(classes["sun397"]):
            units = []
            for template in ("a photo of a {}.", "a photo of the {}."):
                one = model(**tokenizer(template.format(name), return_tensors="pt"), pixel_values=scaled)
                units.append(one.text_embeds[0] / one.text_embeds[0].norm())
            text = (units[0] + units[1]) / 2
            image = one.image_embeds / one.image_embeds.norm(dim=-1, keepdim=True)
            expected = model.logit_scale.exp() * image @ (text / text.norm())
            torch.testing.assert_close(logits[:, column], expected, rtol=1e-4, atol=1e-4)
    assert logits[:, 2].max() < -1e30  # sun397 has no third class here


@pytest.mark.parametrize("decay", [1e-4, 1e-2])
def test_heads_of_a_model_that_others_trained_are_logistic_regressions(decay: float) -> None:
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 90)
    features = random.normal(labels[:, None] * [1.0, -0.5, 0.2, 0.0], [1.0, 2.0, 0.1, 5.0], (90, 4))
    scaled = (features - features.mean(0)) / (features.std(0, ddof=1) + 1e-6)
    slow = LogisticRegression(C=1 / (2 * decay * 90), tol=1e-10, max_iter=10_000).fit(scaled, labels)
    weight, bias = fit_head(torch.tensor(features), torch.tensor(labels), 3, decay)
    found = (torch.tensor(features).float() @ weight.float().T + bias).softmax(-1).double()
    torch.testing.assert_close(found, torch.tensor(slow.predict_proba(scaled)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("before", "after"), [(7, 12), (32, 40), (28, 224), (12, 7)])
def test_images_are_enlarged_as_torch_does_it(before: int, after: int) -> None:
    pixels = torch.rand(2, 3, before, before, generator=torch.Generator().manual_seed(0)) * 255
    expected = F.interpolate(pixels, after, mode="bicubic", antialias=True)
    torch.testing.assert_close(enlarged(pixels, after), expected, rtol=1e-4, atol=1e-2)


def test_a_model_that_others_trained_is_the_base(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=40)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    pixels = {"image_processor_type": "ViTImageProcessor", "image_mean": [0.4] * 3, "image_std": [0.3] * 3}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(pixels))
    tiny, few = SCALES["tiny"], Training(1e-3, 1, 32)
    shorter = replace(PRETRAINED, tasks=LOCAL[:2], fine_tuning=few, joint=few, weights=tiny.weights, base_rows=8)
    shorter = replace(shorter, curvature_rows=20, head_decay=0.03)
    monkeypatch.setattr("experiments.vision.__main__.PRETRAINED", shorter)
    options = ["--scale", "small", "--data-dir", str(data), "--device", "cpu", "-o", str(tmp_path / "out")]
    assert main([*options, "--model", str(tmp_path / "vit")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["model"] == "vit" and "mean loss" in (tmp_path / "out" / "results.md").read_text()
    again = load_classifier(tmp_path / "out" / "seed-0" / "base", "cpu")
    assert again.enlarges and again.mean.flatten().tolist() == pytest.approx([0.4] * 3)
    # Curvature is of so many rows, the heads are shrunk so much, and only means are merged with.
    seed = tmp_path / "out" / "seed-0"
    for place, rows in (("base", 2 * 8), *((task, 20) for task in LOCAL[:2])):
        assert gm.Curvature.load(seed / f"sampled-{place}" / "curvature").examples == rows
    (found,) = results["seeds"].values()
    assert not any("sum" in name for name in (*found["curves"], *found["fixed"]))
    images = Images([load_part(tmp_path / "out" / "data" / LOCAL[0], 0, "train")], 32)
    batch = images.batch(range(len(images)))
    with torch.no_grad():
        features = again.eval().features(batch["pixels"])
    weight, _ = fit_head(features, batch["labels"], 10, 0.03)
    torch.testing.assert_close(again.heads.weight[0, :10], weight, rtol=1e-2, atol=1e-2 * float(weight.abs().max()))
    pixels_in = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    larger = F.interpolate(pixels_in.float(), 40, mode="bicubic", antialias=True).clamp(0, 255)
    want = again.encoder((larger / 255 - 0.4) / 0.3).last_hidden_state[:, 0]
    torch.testing.assert_close(again.features(pixels_in), want)
    with pytest.raises(SystemExit):
        main([*options, "--model", str(tmp_path / "out" / "seed-0" / "nothing")])
    capsys.readouterr()


def test_a_saved_classifier_comes_back_with_fixed_heads(tmp_path: Path) -> None:
    made = new_classifier(SCALES["tiny"].encoder, [3, 5]).eval()
    save_classifier(made, tmp_path)
    again = load_classifier(tmp_path, "cpu").eval()
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    task = torch.tensor([0, 1, 0, 1])
    assert torch.equal(made(pixels, task), again(pixels, task))
    trained = {name for name, parameter in again.named_parameters() if parameter.requires_grad}
    assert trained == again.state().keys()


def test_every_example_is_judged_by_the_head_of_its_own_task() -> None:
    torch.manual_seed(0)
    heads = Heads([2, 4, 3], 5).double()
    torch.nn.init.normal_(heads.bias)
    features, task = torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 3
    logits = heads(features, task)
    labels = torch.tensor([1, 3, 2, 0, 0, 1, 1, 2, 0])
    for row in range(9):
        own, classes = int(task[row]), (2, 4, 3)[int(task[row])]
        alone = F.linear(features[row], heads.weight[own, :classes], heads.bias[own, :classes])
        torch.testing.assert_close(
            F.cross_entropy(logits[row], labels[row]), F.cross_entropy(alone, labels[row]), rtol=1e-12, atol=1e-12
        )


def test_a_batch_of_several_tasks_is_its_rows_one_by_one_enlarged_as_pillow_does_it() -> None:
    random = np.random.default_rng(0)
    parts = [
        Part(task, random.integers(0, 256, (rows, side, side, 3), np.uint8), random.integers(0, 9, rows))
        for task, rows, side in ((0, 4, 32), (1, 6, 20), (2, 5, 28))
    ]
    images = Images(parts, 32)
    rows = [14, 0, 5, 9, 10, 3, 4]
    batch = images.batch(rows)
    every = [(part, row) for part in parts for row in range(len(part.labels))]
    assert len(images) == 15
    for place, row in enumerate(rows):
        part, own = every[row]
        expected = np.asarray(Image.fromarray(part.pixels[own]).resize((32, 32), Image.Resampling.BICUBIC)).astype(int)
        got = batch["pixels"][place].permute(1, 2, 0).numpy().astype(int)
        assert abs(got - expected).max() <= 1
        assert int(batch["task"][place]) == part.task and int(batch["labels"][place]) == part.labels[own]
    assert torch.equal(torch.cat([b["labels"] for b in images.batches(4)]), images.batch(range(15))["labels"])


def test_an_image_is_cut_to_its_middle_with_the_short_side_kept() -> None:
    pixels = np.zeros((10, 30, 3), np.uint8)
    pixels[:, 10:20] = 200
    assert np.asarray(fitted(Image.fromarray(pixels), 10)).min() == 200
    assert (
        fitted(Image.fromarray(pixels[:, :, 0]), 7).size == (7, 7) and fitted(Image.new("L", (5, 9)), 8).mode == "RGB"
    )


def test_validation_rows_are_taken_out_of_training_and_no_row_is_lost(tmp_path: Path) -> None:
    x = np.repeat(np.arange(50, dtype=np.uint8), 64).reshape(50, 8, 8)
    y = np.arange(50) % 5
    np.savez(tmp_path / "set.npz", x_train=x, y_train=y, x_test=x[:7], y_test=y[:7], classes=np.array(list("abcde")))
    found = write_task(
        str(tmp_path / "set.npz"),
        tmp_path / "out",
        8,
        share=0.2,
        most=100,
        train_most=None,
        test_most=None,
        enlarge=True,
    )
    assert found == {"classes": list("abcde"), "train": 40, "validation": 10, "test": 7}
    marks = {s: np.load(tmp_path / "out" / f"{s}-x.npy")[:, 0, 0, 0] for s in ("train", "validation", "test")}
    assert sorted([*marks["train"], *marks["validation"]]) == list(range(50))
    assert marks["test"].tolist() == list(range(7))
    for split, numbers in marks.items():
        assert np.array_equal(np.load(tmp_path / "out" / f"{split}-y.npy"), numbers % 5)
    assert marks["train"].tolist() != sorted(marks["train"])


def test_names_of_classes_become_words() -> None:
    names = ("SeaLake", "sea_ice", "AM General Hummer", "7")
    assert [words(n) for n in names] == ["Sea Lake", "sea ice", "AM General Hummer", "7"]


def test_the_scalar_of_the_prior_is_the_mean_entry_of_the_curvature() -> None:
    like = random_state(0)
    curvature = [random_curvature(seed, like, examples=10 * seed) for seed in (1, 2, 3)]
    for reduction in ("mean", "sum"):
        entries = [
            float(entry) / (one.examples if reduction == "mean" else 1)
            for one in curvature
            for value in one.values()
            for entry in value.flatten()
        ]
        assert prior_scalar(curvature, reduction) == pytest.approx(sum(entries) / len(entries), rel=1e-9)


def test_the_main_merge_is_the_formula_with_the_mean_of_squared_gradients_and_c_times_the_identity() -> None:
    base = random_state(0)
    tuned = [near(base, seed) for seed in (1, 2)]
    curvature = [random_curvature(seed, base, examples=30 * seed) for seed in (3, 4)]
    of_base = random_curvature(5, base)
    every = {m.name: m for m in merges({"empirical": Measures(of_base, curvature)}, [], (0.0, 0.3), (0.1,))}
    scalar = prior_scalar(curvature, "mean")
    for name, prior in (("gradient-matching", scalar), ("gradient-matching, 0.1 · c", 0.1 * scalar)):
        found = merged(base, tuned, every[name], 0.3)
        for tensor, start in base.items():
            h = [c[tensor].double() / c.examples for c in curvature]
            total = prior + 0.3 * (h[0] + h[1])
            steps = [(prior + h[t]) * (tuned[t][tensor].double() - start.double()) for t in (0, 1)]
            expected = start.double() + 0.3 * (steps[0] + steps[1]) / total
            torch.testing.assert_close(found[tensor].double(), expected, rtol=1e-5, atol=1e-6)
    found = merged(base, tuned, every["gradient-matching, Fisher of the base, no penalty"], 0.3)
    for tensor, start in base.items():
        h = [c[tensor].double() / c.examples for c in curvature]
        total = of_base[tensor].double() / of_base.examples + 1e-10 + 0.3 * (h[0] + h[1])
        steps = [h[t] * (tuned[t][tensor].double() - start.double()) for t in (0, 1)]
        torch.testing.assert_close(
            found[tensor].double(), start.double() + 0.3 * (steps[0] + steps[1]) / total, rtol=1e-5, atol=1e-6
        )
    ties = merged(base, tuned, Merge("ties", "ties"), 0.0)
    assert all(torch.equal(ties[n], base[n]) for n in base)


def test_accuracy_and_loss_are_those_of_the_rows_one_by_one() -> None:
    classifier = new_classifier(SCALES["tiny"].encoder, [3, 5]).eval()
    random = np.random.default_rng(1)
    parts = [
        Part(t, random.integers(0, 256, (11, 32, 32, 3), np.uint8), random.integers(0, 3 + 2 * t, 11)) for t in (0, 1)
    ]
    images = {str(part.task): Images([part], 32) for part in parts}
    found = scores(classifier, images, 4, "cpu")
    for part in parts:
        right, losses = 0, []
        for row in range(11):
            pixels = torch.from_numpy(part.pixels[row]).permute(2, 0, 1)[None]
            logits = classifier(pixels, torch.tensor([part.task]))[0, : 3 + 2 * part.task]
            right += int(logits.argmax()) == part.labels[row]
            losses.append(-float(logits.double().log_softmax(-1)[part.labels[row]]))
        assert found[str(part.task)]["accuracy"] == pytest.approx(100 * right / 11)
        assert found[str(part.task)]["loss"] == pytest.approx(sum(losses) / 11, rel=1e-5)


def test_the_tuned_weight_is_the_smallest_of_the_best_mean() -> None:
    curve = {"a": [10.0, 30.0, 20.0, 30.0], "b": [40.0, 30.0, 10.0, 30.0]}
    assert mean_curve(curve) == [25.0, 30.0, 15.0, 30.0] and best(curve) == 1 and at(curve, 2) == {"a": 20.0, "b": 10.0}


def test_larger_tasks_are_trained_longer_where_the_scale_says_so() -> None:
    full, small = SCALES["full"], SCALES["small"]
    assert (epochs_on(full, 19_999), epochs_on(full, 20_000)) == (5, 10)
    assert epochs_on(small, 20_000) == small.fine_tuning.epochs


def test_the_curvature_of_the_tasks_is_per_example_and_of_the_encoder_alone(tmp_path: Path) -> None:
    save_classifier(new_classifier(SCALES["tiny"].encoder, [3, 5]), tmp_path)
    classifier = load_classifier(tmp_path, "cpu").double().eval()
    random = np.random.default_rng(2)
    parts = [Part(t, random.integers(0, 256, (3, 32, 32, 3), np.uint8), random.integers(0, 3, 3)) for t in (0, 1)]
    images = Images(parts, 32)
    found = gm.estimate_curvature(classifier, images.batches(4))
    assert found.keys() == classifier.state().keys() and found.examples == 6
    slow = {name: torch.zeros_like(value) for name, value in classifier.state().items()}
    parameters = {n: p for n, p in classifier.named_parameters() if p.requires_grad}
    for row in range(6):
        loss = classifier(**images.batch([row]))["loss"].double()
        for (name, _), gradient in zip(parameters.items(), torch.autograd.grad(loss, parameters.values()), strict=True):
            slow[name] += gradient.square()
    for name, value in slow.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-12)
