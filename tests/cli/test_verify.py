"""`gradmerge verify`: every failure that it looks for is provoked once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import gradmerge as gm

from ..making import run, tuned_from
from ..tasks.making import (
    VOCABULARY,
    labelled,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_llama_checkpoint,
    write_jsonl,
)

WEIGHTS = "model.safetensors"


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(folder / WEIGHTS)
    edit(state)
    save_file(state, folder / WEIGHTS, {"format": "pt"})


def tune_and_merge(folder: Path, same: Mapping[str, torch.Tensor], **recipe: Any) -> Path:
    """A merge of two models that are tuned from the base but for some tensors."""
    for seed, name in enumerate("ab", 1):
        change(tuned_from(folder / "base", folder / name, seed, 0.05), lambda state: state.update(same))
    models = [{"model": str(folder / name), "weight": 0.5} for name in "ab"]
    recipe |= {"method": "task-arithmetic", "base": str(folder / "base"), "models": models}
    return gm.merge(recipe, folder / "merged", progress=False).output


def verified(folder: Path, *more: str | Path, status: int = 0) -> list[tuple[str, bool | None]]:
    """Each check's name and result. The exit status says whether one failed."""
    found = json.loads(run("verify", folder, *more, "--device", "cpu", "--json", status=status).stdout)
    assert found["passed"] is (status == 0)
    return [(check["name"], check["passed"]) for check in found["checks"]]


@pytest.fixture
def classifiers(tmp_path: Path) -> Path:
    tiny_bert_checkpoint(tmp_path / "base")
    return tune_and_merge(tmp_path, {}, exclude=["classifier.*"])


@pytest.fixture
def generators(tmp_path: Path) -> Path:
    """A merge of language models, which end every text with their first token."""
    base = tiny_gpt2_checkpoint(tmp_path / "base")

    ones = torch.ones(16)
    norm = {"transformer.ln_f.weight": torch.zeros(16), "transformer.ln_f.bias": ones}

    def always_end(state: dict[str, torch.Tensor]) -> None:
        state.update(norm)
        state["transformer.wte.weight"][1] = ones

    change(base, always_end)
    return tune_and_merge(tmp_path, norm)


def test_a_merge_and_its_calibration_pass(classifiers: Path, tmp_path: Path) -> None:
    good = [("loads", True), ("unchanged", True), ("answers", True), ("answers", True)]
    assert verified(classifiers) == good
    rows = write_jsonl(tmp_path / "rows.jsonl", labelled(24))
    data = {"a": rows, "b": rows}
    gm.calibrate(classifiers, data, out=tmp_path / "calibrated", curvature="none", progress=False)
    assert verified(tmp_path / "calibrated", "--data", rows) == good


def test_an_excluded_tensor_that_changed_fails_and_is_named(classifiers: Path) -> None:
    change(classifiers, lambda state: state["classifier.bias"].add_(1e-3))
    assert verified(classifiers, status=1)[1] == ("unchanged", False)
    assert "classifier.bias" in run("verify", classifiers, status=1).stdout


def test_answers_that_are_nan_fail(classifiers: Path) -> None:
    change(classifiers, lambda state: state["bert.pooler.dense.bias"].fill_(torch.nan))
    assert verified(classifiers, status=1)[-1] == ("answers", False)


def test_answers_farther_from_every_model_than_the_base_fail(classifiers: Path) -> None:
    change(classifiers, lambda state: state["bert.pooler.dense.weight"].mul_(-30))
    assert verified(classifiers, status=1)[-2:] == [("answers", False)] * 2


def test_weights_that_are_missing_fail(classifiers: Path) -> None:
    change(classifiers, lambda state: state.pop("bert.pooler.dense.weight"))
    assert verified(classifiers, status=1) == [("loads", False)]


def test_generation_stops_where_every_model_stops(generators: Path) -> None:
    assert verified(generators)[-1] == ("generation", True)
    path = generators / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 2}))
    assert verified(generators, status=1)[-1] == ("generation", False)


def test_a_text_that_does_not_end_fails(generators: Path) -> None:
    change(generators, lambda state: state["transformer.wte.weight"][5].fill_(2.0))
    assert verified(generators, status=1)[-1] == ("generation", False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recorded", [True, False])
def test_an_adapter_in_its_base_answers_as_peft_runs_it(recorded: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    base = tiny_llama_checkpoint(tmp_path / "base", dtype=dtype)
    model: Any = LlamaForCausalLM.from_pretrained(base, dtype=dtype)
    assert model.config.vocab_size == VOCABULARY
    wrapped: Any = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    wrapped.save_pretrained(tmp_path / "lora")
    out = tmp_path / "merged"
    recipe = {"method": "task-arithmetic", "base": str(base), "models": [str(tmp_path / "lora")]}
    gm.merge(recipe, out, progress=False)
    more: list[str | Path] = []
    if not recorded:
        (out / "gradmerge.json").unlink()
        assert run("verify", out, status=2).exception is not None
        more = ["--model", tmp_path / "lora"]
    assert ("answers", True) in verified(out, *more)

    def scale_adapter(state: dict[str, torch.Tensor]) -> None:
        before = load_file(base / WEIGHTS)
        for name, value in state.items():
            state[name] = (before[name] + 1.2 * (value - before[name]).float()).to(value.dtype)

    change(out, scale_adapter)
    assert ("answers", False) in verified(out, *more, status=1)


def test_what_is_no_model_folder_is_refused(tmp_path: Path) -> None:
    run("verify", tmp_path, status=2)
    run("verify", tmp_path / "nothing", status=2)
