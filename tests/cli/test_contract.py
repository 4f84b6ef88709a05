"""What every command promises: exit status, JSON keys, `--force`, unchanged inputs, and no leftovers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file
from transformers import BertForSequenceClassification
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app

from ..making import near, random_curvature, write_recipe
from ..tasks.making import labelled, tiny_bert_checkpoint, write_adam_state, write_jsonl
from .test_help import COMMANDS, WITH_EXAMPLES

HEAVY = {"torch", "numpy", "transformers", "huggingface_hub", "pyarrow", "PIL", "datasets", "sklearn"}


class Command(NamedTuple):
    """A valid command line without OUT, and keys of what --json prints."""

    words: str
    keys: str
    writes: bool = True


DATA = "--data a=rows.jsonl --data b=rows.jsonl --device cpu"
VALID = {
    "merge": Command("recipe.yml", "merged_tensors seconds notes"),
    "calibrate": Command(f"merged {DATA} --curvature none", "improved rows distances chosen"),
    "distill": Command(f"merged {DATA} --steps 2", "improved match steps"),
    "remove": Command(
        "--base base --forget forget.jsonl --retain rows.jsonl --device cpu", "before after used steps s"
    ),
    "extract-lora": Command("--base base a --rank 2", "lost lost_share"),
    "inspect": Command("base a b", "mergeable models", writes=False),
    "evaluate": Command(
        "a --data rows.jsonl --device cpu", "task examples accuracy loss_per_example standard_errors", writes=False
    ),
    "verify": Command("merged --device cpu", "passed checks", writes=False),
    "push": Command("merged org/name --dry-run", "repo files left_out lacks", writes=False),
    "methods": Command("ties", "name options", writes=False),
    "diagnose": Command(f"recipe.yml {DATA} --merged merged --target b", "candidates predicted measured residuals"),
    "preview": Command(f"recipe.yml --weights 0.5,1 {DATA}", "settings winner measured report"),
    "curvature estimate": Command(
        "a --data rows.jsonl --device cpu --model-args tokenizer=base",
        "kind task examples tensors likelihood notes",
    ),
    "curvature import": Command("trained --dataset-size 10 --batch-size 2", "examples batch_size likelihood notes"),
    "curvature show": Command("base", "kind examples likelihood parameters groups", writes=False),
}
#: Commands that serve a page or train models. They have tests of their own.
ELSEWHERE = {"studio", "demo"}
WRITING = [name for name, command in VALID.items() if command.writes]


def invoke(name: str, *more: str) -> Result:
    return CliRunner().invoke(app, [*name.split(), *VALID[name].words.split(), *more])


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two fine-tuned models with curvature, their merge, rows, a recipe and a checkpoint of a trainer."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_bert_checkpoint(folder / "base")
    state = load_file(folder / "base" / "model.safetensors")
    for seed, name in enumerate(("base", "a", "b")):
        if seed:
            tiny_bert_checkpoint(folder / name)
            save_file(near(state, seed, 0.02), folder / name / "model.safetensors", {"format": "pt"})
        random_curvature(seed, state).save(folder / name / "curvature")
    model = BertForSequenceClassification.from_pretrained(folder / "a")
    model.save_pretrained(folder / "trained")
    write_adam_state(model, folder / "trained")
    write_jsonl(folder / "rows.jsonl", labelled(24))
    write_jsonl(folder / "forget.jsonl", labelled(6, seed=9))
    recipe = {"method": "gradient-matching", "base": "base", "models": ["a", "b"]}
    write_recipe(folder / "recipe.yml", recipe)
    gm.merge(folder / "recipe.yml", folder / "merged", progress=False)
    return folder


def test_the_table_has_every_command() -> None:
    assert {path.removeprefix("gradmerge ") for path in WITH_EXAMPLES} == VALID.keys() | ELSEWHERE


@pytest.mark.parametrize("name", VALID)
def test_a_command_prints_one_object_writes_only_its_output_and_replaces_it_only_with_force(
    name: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    before = contents(inputs)
    out = ["-o", str(tmp_path / "out")] if VALID[name].writes else []
    done = invoke(name, *out, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout, parse_constant=pytest.fail)
    assert set(VALID[name].keys.split()) <= facts.keys()
    assert contents(inputs) == before and len(list(tmp_path.iterdir())) == bool(out)
    if out:
        first = contents(tmp_path)
        refused = invoke(name, *out)
        assert refused.exit_code == 2 and contents(tmp_path) == first
        done = invoke(name, *out, "--force", "--quiet")
        assert done.exit_code == 0 and not done.stderr, done.output
        assert contents(tmp_path).keys() == first.keys() and contents(inputs) == before


@pytest.mark.parametrize("name", WRITING)
def test_force_never_replaces_an_input(name: str, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs)
    before = contents(inputs)
    words = [word.rpartition("=")[2] for word in VALID[name].words.split()]
    read = [word for word in words if (inputs / word).exists()]
    assert read
    for out in (*read, *(f"{word}/out" for word in read if (inputs / word).is_file()), "."):
        refused = invoke(name, "-o", out, "--force")
        assert refused.exit_code == 2 and refused.stderr.count("error:") == 1, (out, refused.output)
        assert contents(inputs) == before


@pytest.mark.parametrize("name", VALID)
def test_an_input_that_is_missing_is_status_2_and_leaves_nothing(
    name: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = ["-o", str(tmp_path / "out")] if VALID[name].writes else []
    words = [*name.split(), *(word.replace("ties", "tie") for word in VALID[name].words.split()), *out]
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 2 and not list(tmp_path.iterdir()), done.output
        assert done.stderr.count("error:") == 1 and "Traceback" not in done.output
        assert json.loads(done.stdout)["status"] == 2 if more else not done.stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from gradmerge.cli.app import app; from typer.testing import CliRunner\n"
        f"for words in {[path.split()[1:] for path in COMMANDS]}:\n"
        "    assert CliRunner().invoke(app, [*words, '--help']).exit_code == 0, words\n"
        f"assert not {HEAVY} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_every_command_has_an_example_and_refuses_unknown_options(path: str) -> None:
    words = path.split()[1:]
    text = CliRunner().invoke(app, [*words, "--help"]).stdout
    assert "Example" in text and all(option in text for option in ("--json", "--quiet", "--debug"))
    done = CliRunner().invoke(app, [*words, "--nonsense", "--json"])
    assert done.exit_code == json.loads(done.stdout)["status"] == 2 and "Traceback" not in done.output
