"""Wrong input: one clear message, the right exit status, and nothing left behind or lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gradmerge.cli.app import app
from gradmerge.storage.staging import Staging
from tests.making import (
    cli,
    near,
    random_curvature,
    random_state,
    read_model,
    three_models,
    weight_bytes,
    write_model,
    write_recipe,
)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(out: Path | None, *arguments: str | Path, status: int = 2, says: tuple[str, ...] = ()) -> str:
    """The message of a command that must fail and leave nothing."""
    before = sorted(out.parent.iterdir()) if out is not None and out.parent.is_dir() else []
    result = invoke(*arguments, *(["-o", out] if out is not None else []))
    assert result.exit_code == status, result.output
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("error:") == 1 and "Traceback" not in result.output and "internal" not in result.stderr
    assert result.stdout == ""
    for words in says:
        assert words in result.stderr, result.stderr
    if out is not None:
        assert not out.exists()
        after = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
        assert after == before, "something was left behind"
    return result.stderr


class Place:
    """A base and two tuned models, and where their merge goes."""

    def __init__(self, tmp_path: Path) -> None:
        (self.base, self.a, self.b), (self.base_state, self.a_state, self.b_state) = three_models(tmp_path)
        self.path = tmp_path
        self.out = tmp_path / "out"

    def command(self, method: str = "task-arithmetic", *models: str | Path) -> list[str | Path]:
        words: list[str | Path] = ["merge", "--method", method, "--base", self.base]
        for model in models or (self.a,):
            words += ["--model", model]
        return words

    def recipe(self, **keys: Any) -> dict[str, Any]:
        return {"method": "task-arithmetic", "base": str(self.base), "models": [str(self.a), str(self.b)]} | keys

    def write(self, **keys: Any) -> Path:
        return write_recipe(self.path / "recipe.yml", self.recipe(**keys))

    def text(self, text: str | bytes) -> Path:
        path = self.path / "recipe.yml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_right_input_is_merged(place: Place) -> None:
    """Else every test below would pass for another reason than it says."""
    for number, command in enumerate((place.command(), ["merge", place.write()])):
        result = invoke(*command, "-o", place.path / f"out{number}")
        assert result.exit_code == 0, result.output
        assert (place.path / f"out{number}" / "model.safetensors").is_file()


# Checkpoints that do not fit together.


def test_missing_and_extra_tensors_and_wrong_shapes_are_listed_together(place: Place) -> None:
    state = dict(place.a_state)
    del state["layers.0.linear.bias"], state["layers.1.norm.weight"]
    state["layers.1.linear.weight"] = torch.zeros(16, 8)
    state["pooler.weight"] = torch.zeros(3)
    odd = write_model(place.path / "odd", state)
    message = refused(place.out, *place.command("task-arithmetic", odd))
    names = ("layers.0.linear.bias", "layers.1.norm.weight", "pooler.weight", "layers.1.linear.weight: [8, 16]")
    for words in (*names, "2 tensors", "other shapes", "[16, 8]", str(odd), str(place.base)):
        assert words in message


def test_another_vocabulary_is_called_that(place: Place) -> None:
    base = {"model.embed_tokens.weight": torch.zeros(50, 8), "lm_head.weight": torch.zeros(50, 8)}
    other = {"model.embed_tokens.weight": torch.zeros(52, 8), "lm_head.weight": torch.zeros(52, 8)}
    one, two = write_model(place.path / "v50", base), write_model(place.path / "v52", other)
    words = ("another vocabulary", "[50, 8]", "[52, 8]", "exclude")
    refused(place.out, "merge", "-m", "task-arithmetic", "--base", one, "--model", two, says=words)


def test_integer_weights_are_refused(place: Place) -> None:
    state = place.a_state | {"classifier.weight": torch.zeros(3, 8, dtype=torch.int32)}
    odd = write_model(place.path / "odd", state)
    refused(place.out, *place.command("task-arithmetic", odd), says=("classifier.weight", "no floating-point numbers"))


def test_nothing_to_merge_is_an_error(place: Place) -> None:
    refused(place.out, "merge", place.write(exclude=["*"]), says=("nothing is left to merge",))
    refused(place.out, "merge", place.write(include=["layer.*"]), says=("include", "'layer.*' matches no tensor"))


# Damaged files.


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1])
def test_a_truncated_file_is_called_broken(place: Place, size: int) -> None:
    path = place.base / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(place.out, *place.command(), says=(str(path), "not a valid safetensors file", "again"))


def test_a_corrupted_header_is_called_broken(place: Place) -> None:
    path = place.base / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[20] ^= 0x80
    path.write_bytes(data)
    refused(place.out, *place.command(), says=(str(path), "not a valid safetensors file"))


@pytest.mark.parametrize("target", ["../x", "/etc/passwd", "..", "sub/x", "..\\x"])
def test_an_index_that_points_outside_its_folder_is_refused(place: Place, target: str) -> None:
    shutil.copy(place.base / "model.safetensors", place.path / "x")
    index = place.a / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["classifier.weight"] = target
    index.write_text(json.dumps(value))
    refused(place.out, *place.command(), says=(str(index), "not a file name inside the folder"))


def test_a_shard_that_is_not_there_is_named(place: Place) -> None:
    (place.a / "model-00002-of-00002.safetensors").unlink()
    refused(place.out, *place.command(), says=("model-00002-of-00002.safetensors", "not there"))


def test_a_folder_without_weights_says_what_it_lacks(place: Place) -> None:
    (place.path / "empty").mkdir()
    refused(place.out, *place.command("average", place.path / "empty"), says=("no model.safetensors",))


def test_a_pickle_is_not_opened_unless_asked(place: Place) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {place.path}/pwned",)

    folder = place.path / "pickled"
    folder.mkdir()
    torch.save({"w": Evil()}, folder / "pytorch_model.bin")
    refused(place.out, *place.command("average", folder), says=("--allow-pickle", "pickle"))
    refused(place.out, *place.command("average", folder), "--allow-pickle", says=("weights_only",))
    assert not (place.path / "pwned").exists()


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "~nobody-of-that-name/x", "x" * 5000, ""])
def test_a_model_that_is_not_there_is_an_error(place: Place, name: str) -> None:
    model = name and (name if name[0] in "~x" else str(place.path / name))
    result = refused(None, *place.command("average", model), "-o", place.out)
    assert len(result) < 1000 or len(name) > 1000


# Numbers.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("method", "damaged"),
    [(method, damaged) for method in ("task-arithmetic", "ties", "slerp") for damaged in ("base", "a")]
    + [("average", "a")],
)
def test_weights_that_are_not_finite_are_named_and_can_be_allowed(
    place: Place, value: float, method: str, damaged: str
) -> None:
    state = dict(place.base_state if damaged == "base" else place.a_state)
    state["layers.1.linear.weight"] = state["layers.1.linear.weight"].clone()
    state["layers.1.linear.weight"][3, 5] = value
    folder = write_model(place.path / f"damaged-{damaged}", state)
    base, a = (folder, place.a) if damaged == "base" else (place.base, folder)
    command = ["merge", "--method", method, "--base", base, "--model", a]
    if method == "ties":
        command += ["--set", "density=0.5"]
    words = (f"damaged-{damaged}: layers.1.linear.weight", "NaN or infinite", "--allow-nonfinite")
    refused(place.out, *command, says=words)
    result = invoke(*command, "--allow-nonfinite", "-o", place.out)
    assert result.exit_code == 0, result.output
    merged = read_model(place.out)
    assert not torch.isfinite(merged["layers.1.linear.weight"]).all()
    assert torch.isfinite(merged["layers.0.linear.weight"]).all()


def test_a_result_too_large_for_float16_is_an_error(place: Place) -> None:
    base = {"w": torch.full((4,), 60000.0).half()}
    one, two = write_model(place.path / "h1", base), write_model(place.path / "h2", {"w": torch.zeros(4).half()})
    command = ["merge", "--method", "task-arithmetic", "--base", one, "--model", f"{two}=-1"]
    refused(place.out, *command, says=("w", "too large for float16", "65504", "output.dtype"))
    assert invoke(*command, "--set", "output.dtype=float32", "-o", place.out).exit_code == 0


def test_a_merge_that_overflows_is_an_error(place: Place) -> None:
    base = {"w": torch.full((4,), 1e20)}
    one, two = write_model(place.path / "h1", base), write_model(place.path / "h2", {"w": torch.zeros(4)})
    command = ["merge", "--method", "task-arithmetic", "--base", one, "--model", f"{two}=1e30"]
    refused(place.out, *command, says=("too extreme", "--allow-nonfinite"))


# Curvature.


def curvature_command(place: Place, curvature: Path, *more: str) -> list[str | Path]:
    given = ["--curvature", "base=identity:1.0", "--curvature", f"{place.a}={curvature}"]
    return [*place.command("gradient-matching"), *given, *more]


def damaged_curvature(place: Place, change: Mapping[str, torch.Tensor], without: str = "") -> Path:
    folder = place.path / "curvature"
    random_curvature(5, place.a_state).save(folder)
    path = folder / "curvature.safetensors"
    metadata = {"format": "gradmerge-curvature/1", "examples": "100", "likelihood": "empirical"}
    state = {n: t for n, t in load_file(path).items() if n != without}
    save_file(state | dict(change), path, metadata=metadata)
    return folder


@pytest.mark.parametrize(
    ("value", "word"), [(-1.0, "negative"), (float("nan"), "not finite"), (float("inf"), "not finite")]
)
def test_curvature_that_is_negative_or_not_finite_is_refused(place: Place, value: float, word: str) -> None:
    bad = torch.ones(3, 8)
    bad[1, 1] = value
    folder = damaged_curvature(place, {"classifier.weight": bad})
    refused(place.out, *curvature_command(place, folder), says=(str(folder), "classifier.weight", word))
    shown = invoke("curvature", "show", folder)
    assert shown.exit_code == 2 and "classifier.weight" in shown.stderr


def test_curvature_of_another_model_is_refused(place: Place) -> None:
    folder = damaged_curvature(place, {"classifier.weight": torch.ones(2, 8)})
    words = ("another model", "classifier.weight: [2, 8]", "[3, 8]")
    refused(place.out, *curvature_command(place, folder), says=words)
    random_curvature(1, {"other.weight": torch.ones(3)}).save(place.path / "other")
    refused(place.out, *curvature_command(place, place.path / "other"), says=("curvature of another model",))


def test_curvature_that_lacks_a_tensor_is_refused_unless_missing_is_zero(place: Place) -> None:
    folder = damaged_curvature(place, {}, without="classifier.weight")
    command = curvature_command(place, folder)
    refused(place.out, *command, says=("no curvature for 1 of 6", "classifier.weight", "missing: zero"))
    assert invoke(*command, "--set", "missing=zero", "-o", place.out).exit_code == 0


def test_a_model_given_as_curvature_is_recognised(place: Place) -> None:
    path = place.base / "model.safetensors"
    refused(place.out, *curvature_command(place, path), says=("not a curvature file", "Is it a model?"))


def test_curvature_that_is_needed_and_not_given_is_asked_for(place: Place) -> None:
    refused(place.out, *place.command("gradient-matching"), says=("base.curvature", "needs the curvature", "identity"))
    refused(place.out, *curvature_command(place, place.path / "nowhere"), says=("no such curvature",))


@pytest.mark.parametrize("given", [["x"] * 3, ["x"] * 5, ["nobody=x"]])
def test_the_number_of_curvatures_must_fit(place: Place, given: list[str]) -> None:
    words = [word for value in given for word in ("--curvature", value)]
    command = [*place.command("gradient-matching", place.a, place.b), *words]
    if len(given) == 3:
        refused(place.out, *command, says=("no such curvature",))
    else:
        refused(place.out, *command, says=(f"{len(given)} given for 2 models", "base=PATH"))


@pytest.mark.parametrize("value", ["identity:x", "identity:-1", "identity:.nan", "identity:[1]", "identity:"])
def test_an_identity_must_be_a_number_that_is_not_negative(place: Place, value: str) -> None:
    refused(
        place.out, *place.command("gradient-matching"), "--curvature", f"base={value}", "--curvature", f"{place.a}=x"
    )


# Recipes.


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"metod": "x"}, ("metod", "did you mean 'method'")),
        ({"base": {"modle": "x"}}, ("base.modle", "did you mean 'model'", "base.model: is missing")),
        ({"models": [{"model": "x", "wieght": 1}]}, ("models[0].wieght", "did you mean 'weight'")),
        ({"models": ["x", {"model": "x", "curvture": 1}]}, ("models[1].curvture", "did you mean 'curvature'")),
        ({"output": {"dtyp": "float16"}}, ("output.dtyp", "did you mean 'dtype'")),
        ({"method": "ties", "options": {"densty": 0.5}}, ("densty", "unknown key of ties", "did you mean 'density'")),
        ({"base": {"model": "x", "curvature": {"identiy": 1}}}, ("base.curvature", "identity")),
        ({"output": {"dtype": "float8"}}, ("output.dtype", "float8")),
        ({"method": "tie"}, ("there is no method 'tie'", "did you mean 'ties'", "task-arithmetic")),
        ({"method": ["ties"]}, ("there is no method",)),
        ({"method": None}, ("method",)),
        ({"models": []}, ("models",)),
        ({"models": "x"}, ("models",)),
        ({"models": [5]}, ("models[0]",)),
        ({"base": None}, ("task-arithmetic needs a base",)),
        ({"damping": -1}, ("damping",)),
        ({"damping": float("nan")}, ("damping", "finite")),
        ({"models": [{"model": "x", "weight": float("nan")}]}, ("models[0].weight", "finite")),
        ({"models": [{"model": "x", "weight": "heavy"}]}, ("models[0].weight", "heavy")),
        ({"method": "ties", "options": {"density": 2}}, ("density",)),
        ({"method": "ties", "options": {"density": float("nan")}}, ("density",)),
        ({"method": "slerp"}, ("slerp takes the base and one model, not 2",)),
        (
            {"method": "average", "models": [{"model": "x", "weight": 2}]},
            ("average has no weights", "weighted-average has"),
        ),
        ({"base": {"model": "x", "weight": 1}}, ("base.weight", "only weighted-average")),
        ({"base": {"model": "x", "penalty": "y"}}, ("base.penalty", "only removal")),
        ({"output": {"curvature": True}}, ("output.curvature", "no curvature of its own")),
        ({"output": {"shard_size": "big"}}, ("output.shard_size", "5GB")),
        ({"output": {"shard_size": 0}}, ("output.shard_size",)),
        ({"output": 5}, ("output",)),
        ({"options": [1]}, ("options",)),
        ({"include": []}, ("include",)),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_place(
    place: Place, keys: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(place.out, "merge", place.write(**keys), says=("recipe.yml", *words))


def test_every_mistake_in_a_recipe_is_listed_at_once(place: Place) -> None:
    path = place.write(metod="x", damping=-1, output={"dtyp": "float16"})
    refused(place.out, "merge", path, says=("metod", "damping", "output.dtyp"))


def test_weights_that_sum_to_zero_are_refused_before_any_work(place: Place) -> None:
    models = (f"{place.a}=1", f"{place.b}=-1")
    refused(place.out, *place.command("weighted-average", *models), says=("sum to 0", "normalize"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("is empty",)),
        ("# nothing\n", ("is empty",)),
        ("just words", ("a recipe is a mapping",)),
        ("- a\n- b\n", ("a recipe is a mapping",)),
        ("a: [1\n", ("not valid YAML", "line")),
        ("a: b: c\n", ("not valid YAML", "line 1")),
        ("\tmethod: x\n", ("not valid YAML",)),
        ("method: ties\nmethod: average\n", ("line 2", "'method' occurs twice")),
        ("method: ties\nbase: {model: x, model: y}\n", ("'model' occurs twice",)),
        ("--- a\n--- b\n", ("a recipe is a mapping",)),
        ("method: *nobody\n", ("not valid YAML", "nobody")),
        ("method: &x [*x]\n", ("refers to itself",)),
        ("method: &x {a: *x}\n", ("refers to itself",)),
        (b"\x80\x81\x82", ("not valid YAML",)),
        (b"\x00\x01\x02\x03", ("not valid YAML",)),
        (b"\xff\xfe", ("recipe.yml",)),
        (bytes(range(256)) * 10, ("not valid YAML",)),
        ("[" * 50_000, ("nested too deeply",)),
        ("{a: " * 50_000, ("nested too deeply",)),
        ("method: !!bool x\n", ("not valid YAML",)),
        ("method: !!int ''\n", ("not valid YAML",)),
        ("method: !!timestamp x\n", ("not valid YAML",)),
        ("method: !unknown x\n", ("not valid YAML", "unknown")),
        ("method: ties\ndamping: 0x" + "f" * 5000, ("damping",)),
        ("method: ties\ndamping: " + "9" * 5000, ("not valid YAML",)),
        ("? [a, b]\n: c\n", ("not valid YAML",)),
        ("method: average\nmodels: [x]\n1: 2\n", ("Keys should be strings",)),
        ("x" * 10_000_000, ("larger than 1000000 bytes",)),
    ],
)
def test_a_recipe_that_cannot_be_read_says_where_and_why(
    place: Place, text: str | bytes, words: tuple[str, ...]
) -> None:
    assert len(refused(place.out, "merge", place.text(text), says=("recipe.yml", *words))) < 2000


def test_a_setting_that_is_no_key_names_the_nearest_of_the_recipe_and_of_the_method(place: Place) -> None:
    refused(place.out, *place.command("ties"), "--set", "dense=0.2", says=("dense", "did you mean 'density'", "scope"))
    refused(place.out, *place.command("ties"), "--set", "outptu.rank=2", says=("did you mean 'output'",))


def test_a_yaml_bomb_does_not_go_off(place: Place) -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    refused(place.out, "merge", place.text("\n".join(lines)), says=("aliases stand for more than",))


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {0}']",
        "!!python/object/new:os.system ['touch {0}']",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!python/object/apply:subprocess.check_output [[touch, {0}]]",
    ],
)
def test_a_python_tag_in_yaml_is_not_run(place: Place, tag: str) -> None:
    pwned = place.path / "pwned"
    refused(place.out, "merge", place.text(f"method: {tag.format(pwned)}\n"), says=("not valid YAML",))
    text = tag.format(pwned)
    refused(place.out, *place.command(), "--set", f"damping={text}", says=("--set damping",))
    assert not pwned.exists()


def test_a_recipe_that_is_no_file_is_an_error(place: Place) -> None:
    refused(place.out, "merge", place.path, says=("is a folder",))
    refused(place.out, "merge", place.path / "nowhere.yml", says=("nowhere.yml", "cannot be read"))
    refused(place.out, "merge", "/dev/zero", says=("larger than",))


# Options of the command line.


@pytest.mark.parametrize(
    "setting",
    [
        *["nonsense", "densty=1", "a.b.c=1", "0=1", "=1", ".=1", "[]=1", "²=1"],
        *["damping=", "damping=x", "damping=[", "damping.x=1", "damping=0x" + "f" * 5000],
        *["models=5", "models[9].weight=1", "models.x.weight=1", "models.99999999999999999999.weight=1"],
        *["base.model.x=1", "options=5", "method=[a]", "method=nonsense", "output=float16", "output.dtype=int8"],
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(place: Place, setting: str) -> None:
    message = refused(place.out, *place.command(), "--set", setting)
    assert setting.partition("=")[0].partition(".")[0].partition("[")[0] in message


@pytest.mark.parametrize("device", ["nonsense", "", "cuda:x", "mps:0:0", "meta", "cpu:99999999999999999999"])
def test_a_device_that_makes_no_sense_is_refused(place: Place, device: str) -> None:
    refused(place.out, *place.command(), "--device", device, says=("device",))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_refused(place: Place) -> None:
    refused(place.out, *place.command(), "--device", "cuda", says=("no such CUDA device", "take cpu"))


@pytest.mark.parametrize(
    "option",
    [*(["--threads", count] for count in ("0", "-1", "x", "1000000")), ["--nonsense"], ["--model"], ["a", "b"]],
)
def test_an_option_that_makes_no_sense_is_refused(place: Place, option: list[str]) -> None:
    result = invoke(*place.command(), "-o", place.out, *option)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert result.stderr.count("Error: ") == 1
    assert option[0] == "a" or option[0] in result.stderr
    assert not place.out.exists()


def test_too_little_or_too_much_on_the_command_line_is_refused(place: Place) -> None:
    refused(place.out, "merge", says=("recipe file", "--method"))
    refused(place.out, "merge", "--method", "task-arithmetic", "--base", place.base, says=("--model",))
    refused(place.out, "merge", "--method", "task-arithmetic", "--model", place.a, says=("needs a base",))
    refused(place.out, "merge", place.write(), "--base", place.base, says=("--set",))
    refused(place.out, *place.command("task-arithmetic", f"{place.a}=nan"), says=("weight", "finite"))
    refused(None, *place.command(), says=("-o OUT",))
    refused(place.out, "remove", "--base", place.base, "--model", place.a, "--method", "ties", says=("remove knows",))
    refused(place.out, *place.command("average", f"{place.a}=2"), says=("no weights",))
    refused(place.out, *place.command("slerp", place.a, place.b), says=("one model",))


# Where the result goes.


def test_a_place_that_exists_needs_force_and_force_replaces_it(place: Place) -> None:
    place.out.mkdir()
    (place.out / "mine.txt").write_text("precious")
    result = invoke(*place.command(), "-o", place.out)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and "--force" in result.stderr
    assert weight_bytes(place.out) == {"mine.txt": b"precious"}
    assert not (place.path / "out.gradmerge-partial").exists()
    # An error leaves what is there, also with --force.
    result = invoke(*place.command("ties"), "--set", "densty=1", "-o", place.out, "--force")
    assert result.exit_code == 2 and weight_bytes(place.out) == {"mine.txt": b"precious"}
    result = invoke(*place.command("task-arithmetic", f"{place.a}=1e39"), "-o", place.out, "--force")
    assert result.exit_code == 2 and weight_bytes(place.out) == {"mine.txt": b"precious"}
    # Nor does --force replace what gradmerge did not write, until it does.
    result = invoke(*place.command(), "-o", place.out, "--force")
    assert result.exit_code == 2 and "was not written by gradmerge" in result.stderr
    assert weight_bytes(place.out) == {"mine.txt": b"precious"}
    (place.out / "gradmerge.json").write_text("{}")
    assert invoke(*place.command(), "-o", place.out, "--force").exit_code == 0
    assert (place.out / "model.safetensors").is_file() and not (place.out / "mine.txt").exists()


def test_force_does_not_replace_what_the_merge_reads(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = weight_bytes(place.path)
    monkeypatch.chdir(place.a)
    for out in (place.base, place.path, place.a, Path(), place.base.parent / "link" / ".." / "base"):
        result = invoke(*place.command(), "-o", out, "--force")
        assert result.exit_code == 2 and "would be lost" in result.stderr, (out, result.output)
    assert weight_bytes(place.path) == before


def test_a_place_that_is_or_lies_under_a_file_is_refused(place: Place) -> None:
    file = place.path / "file"
    file.write_text("mine")
    refused(None, *place.command(), "-o", file / "out", says=(str(file), "cannot be written"))
    refused(None, *place.command(), "-o", file, says=("exists already",))
    refused(None, *place.command(), "-o", file, "--force", says=("is no folder",))
    refused(None, *place.command(), "-o", "/", says=("name a new folder",))
    refused(None, *place.command(), "-o", place.path / ("x" * 300), says=("too long",))
    refused(None, *place.command(), "-o", place.path / "out.safetensors", says=("is a folder",))
    assert file.read_text() == "mine"


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A small file system of its own, where the machine lets us have one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True, check=True)


def test_no_space_is_noticed_before_the_work_and_is_the_machines_failure(place: Place) -> None:
    with mounted(place.path / "disk", "512k") as disk:
        command = [*place.command(), "-o", disk / "out"]
        result = invoke(*command)
        assert result.exit_code == 1 and result.stderr.startswith("error: ") and "are free" in result.stderr
        assert list(disk.iterdir()) == []


def test_space_that_runs_out_on_the_way_stops_the_merge_and_resume_goes_on(place: Place) -> None:
    state = random_state(0, {f"layers.{i}.weight": (400, 250) for i in range(20)})
    base, tuned = write_model(place.path / "large", state), write_model(place.path / "tuned", near(state, 1))
    command: list[str | Path] = ["merge", "-m", "task-arithmetic", "--base", base, "--model", tuned]
    with mounted(place.path / "disk", "12m") as disk:
        out = disk / "out"
        filler = disk / "filler"
        # Enough when it begins; then another process takes it. That cannot be timed from outside, hence the patch.
        original = Staging.require_space

        def look_then_fill(self: Any, nbytes: int) -> None:
            original(self, nbytes)
            filler.write_bytes(bytes(7_000_000))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Staging, "require_space", look_then_fill)
            result = invoke(*command, "-o", out)
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith("error: ") and "No space left" in result.stderr
        assert not out.exists() and (disk / "out.gradmerge-partial").is_dir()
        # Still no space: what was done stays.
        again = invoke(*command, "-o", out, "--resume")
        assert again.exit_code == 1 and (disk / "out.gradmerge-partial" / "gradmerge.journal").is_file()
        filler.unlink()
        result = invoke(*command, "-o", out, "--resume")
        assert result.exit_code == 0, result.output
        assert invoke(*command, "-o", place.path / "whole" / "out").exit_code == 0
        assert weight_bytes(out) == weight_bytes(place.path / "whole" / "out")


def test_a_read_only_folder_is_refused(place: Place) -> None:
    with mounted(place.path / "disk", "10m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True, check=True)
        refused(None, *place.command(), "-o", disk / "out", says=("cannot be written", "Read-only"))
        assert list(disk.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission_is_refused(place: Place) -> None:
    locked = place.path / "locked"
    locked.mkdir(mode=0o500)
    refused(None, *place.command(), "-o", locked / "out", says=("cannot be written", "Permission"))
    (place.base / "model.safetensors").chmod(0)
    refused(place.out, *place.command(), says=("cannot be opened", "Permission"))


# For machines, and in a process of its own.


def test_an_error_is_also_a_json_object_if_asked(place: Place) -> None:
    result = invoke(*place.command("tie"), "-o", place.out, "--json")
    value = json.loads(result.stdout)
    assert result.exit_code == value["status"] == 2 and "did you mean 'ties'" in value["error"]
    assert result.stderr.startswith("error: ")
    shown = invoke("inspect", place.path / "nowhere", "--json")
    assert shown.exit_code == json.loads(shown.stdout)["status"] == 2


def test_inspect_answers_2_for_models_that_cannot_be_merged(place: Place) -> None:
    odd = write_model(place.path / "odd", {"w": torch.zeros(3)})
    result = invoke("inspect", place.base, odd)
    assert result.exit_code == 2 and "cannot be merged" in result.stdout
    result = invoke("inspect", place.base, odd, "--json")
    assert result.exit_code == 2 and json.loads(result.stdout)["mergeable"] is False
    result = invoke("inspect", place.base, odd, "--quiet")
    assert result.exit_code == 2 and result.stderr.startswith("error: ")


def test_a_strange_config_does_not_stop_inspect(place: Place) -> None:
    for value in ({"architectures": {"a": 1}}, {"architectures": 5}, {"architectures": []}, {"model_type": [1]}):
        (place.base / "config.json").write_text(json.dumps(value))
        assert invoke("inspect", place.base).exit_code == 0


def test_the_script_ends_an_error_like_the_tests_do(place: Place) -> None:
    bad = place.path / "bad.yml"
    bad.write_text(yaml.safe_dump(place.recipe(metod="x")))
    result = cli("merge", bad, "-o", place.out)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and "did you mean" in result.stderr
    debug = invoke("merge", bad, "-o", place.out, "--debug")
    assert debug.exit_code == 2 and "Traceback" in debug.stderr
    assert not place.out.exists()


def test_a_terminal_without_greek_letters_is_no_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert cli("methods").returncode == 0
    assert cli(*place.command(), "-o", place.out).returncode == 0
