"""LoRA adapters as checkpoints, against PEFT's own merge."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradmerge as gm
from gradmerge.errors import InputError
from gradmerge.tasks.models import load_model
from tests.making import assert_close, read_model, weight_bytes, write_model

from .families import EXPERTS, load, make, moved, randomise, save

LLAMA = ["q_proj", "v_proj", "o_proj", "down_proj"]


def make_base(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, shard: str = "6KB", **changes: Any
) -> Path:
    return save(make(family, **changes).to(dtype), folder, shard)


def write_adapter(base: Path, family: str, folder: Path, config: Any, seed: int = 1) -> None:
    """Train an adapter: random numbers in everything that training would change. Saved to ``folder``."""
    torch.manual_seed(seed)
    model = get_peft_model(load(family, base, dtype="auto"), config)
    randomise([p for p in model.parameters() if p.requires_grad], seed, 0.2)
    model.save_pretrained(folder)


def tune(base: Path, family: str, folder: Path, config: Any, seed: int = 1) -> PeftModel:
    """Train an adapter, saved to ``folder``.

    What PEFT makes of the saved files is returned, which is not always what was saved: patterns come back sorted.
    """
    write_adapter(base, family, folder, config, seed)
    return PeftModel.from_pretrained(load(family, base, dtype="auto"), folder)


def merged_by_peft(model: PeftModel, folder: Path) -> dict[str, Tensor]:
    """The tensors that transformers stores of the model that PEFT makes of base and adapter."""
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
    return read_model(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(edit(load_file(path)), path)


def merge_one(base: Path, adapter: Path, out: Path, **arguments: Any) -> dict[str, Tensor]:
    gm.merge({"method": "average", "base": str(base), "models": [str(adapter)]}, out, **arguments)
    return read_model(out)


def same_as_peft(base: Path, family: str, config: LoraConfig, folder: Path) -> tuple[dict[str, Tensor], ...]:
    """Train an adapter and compare our merge with that of PEFT. Return both."""
    model = tune(base, family, folder / "adapter", config)
    got, want = merge_one(base, folder / "adapter", folder / "out"), merged_by_peft(model, folder / "want")
    assert_close(got, want, 1e-6)
    return got, want


def changed(one: dict[str, Tensor], two: dict[str, Tensor]) -> set[str]:
    return {name for name in one if not one[name].equal(two[name])}


# family, settings of LoraConfig, changes of the model
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama-untied", {"r": 4, "lora_alpha": 7, "target_modules": LLAMA}, {}),
    "all-linear": ("bert", {"r": 2, "target_modules": "all-linear", "task_type": "SEQ_CLS"}, {}),
    "rank-and-alpha-patterns": (
        "llama-untied",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": LLAMA,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 5},
            "alpha_pattern": {r"layers\.0\.self_attn\.(q|v)_proj": 3, "o_proj": 20, r".*\.self_attn\..*": 99},
        },
        {},
    ),
    "gpt2-fan-in-fan-out": ("gpt2", {"r": 3, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}, {}),
    "embeddings": ("llama-untied", {"r": 4, "lora_alpha": 5, "target_modules": ["embed_tokens", "q_proj"]}, {}),
    "bias-all": ("bert", {"r": 2, "target_modules": ["query"], "bias": "all", "task_type": "SEQ_CLS"}, {}),
    "dora-on-conv1d": ("gpt2", {"r": 3, "target_modules": ["c_attn", "wpe"], "use_dora": True}, {}),
    "names-that-transformers-changes": ("vit", {"r": 2, "target_modules": ["q_proj", "fc1"]}, {}),
    "embeddings-of-a-classifier": (
        "bert",
        {"r": 2, "target_modules": ["query"], "modules_to_save": ["word_embeddings", "classifier"]},
        {},
    ),
    # Square weights. PEFT corrects fan_in_fan_out module by module, and saves only what the last module had.
    "square-conv1d-and-linear": (
        "gpt2",
        {"r": 3, "target_modules": ["attn.c_proj", "c_fc", "lm_head"]},
        {"tie_word_embeddings": False},
    ),
    "square-embedding": ("llama-untied", {"r": 3, "target_modules": ["embed_tokens", "lm_head"]}, {"vocab_size": 16}),
    "experts-and-a-router": (
        "mixtral",
        {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"],
            "rank_pattern": {"experts.down_proj": 3, r"layers\.1\.mlp\.gate\.weight": 1},
            "alpha_pattern": {r"layers\.0\.mlp\.experts\.gate_up_proj": 5, "q_proj": 1},
        },
        {},
    ),
    "rslora-of-experts": (
        "qwen3-moe",
        {"r": 3, "use_rslora": True, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        {},
    ),
    "square-experts-with-inputs-first": (
        "gpt-oss",
        {
            "r": 2,
            "bias": "all",
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "experts.down_proj_bias"],
        },
        {},
    ),
    "old-names-of-experts": ("mixtral", {"r": 2, "target_modules": ["w1", "w2", "w3"], "lora_alpha": 3}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_adapter_is_merged_as_by_peft(case: str, tmp_path: Path) -> None:
    family, settings, changes = CASES[case]
    base = make_base(tmp_path / "base", family, **changes)
    got, want = same_as_peft(base, family, LoraConfig(**settings), tmp_path)
    touched = changed(read_model(base), want)
    assert touched and changed(read_model(base), got) == touched
    merged = load(family, tmp_path / "out").state_dict()
    if family in EXPERTS:
        loaded, _ = load_model(str(tmp_path / "adapter"), "causal-lm", device="cpu")  # as `evaluate` does
        assert_close(loaded.state_dict(), merged, 1e-6)
        merge_one(base, tmp_path / "adapter", tmp_path / "blocks/out", block=37, threads=2)
        assert weight_bytes(tmp_path / "blocks/out") == weight_bytes(tmp_path / "out")


def test_an_adapter_made_on_the_model_with_a_head_fits_a_base_stored_without_the_prefix(tmp_path: Path) -> None:
    """GPT-2 on the Hub stores `h.0…`, where the model with its head has `transformer.h.0…`."""
    base = make_base(tmp_path / "base", "gpt2")
    config = LoraConfig(r=3, target_modules=["c_attn", "c_fc"], bias="all", modules_to_save=["ln_f"])
    model = tune(base, "gpt2", tmp_path / "adapter", config)
    bare = {name.removeprefix("transformer."): value for name, value in read_model(base).items()}
    short = write_model(tmp_path / "short", bare, 2, json.loads((base / "config.json").read_text()))
    want = {n.removeprefix("transformer."): v for n, v in merged_by_peft(model, tmp_path / "want").items()}
    got = merge_one(short, tmp_path / "adapter", tmp_path / "out")
    assert_close(got, want, 1e-6)


def test_without_a_base_in_the_recipe_an_adapter_finds_the_base_that_it_names(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama-untied")
    (base / "tokenizer.json").write_text("{}")
    model = tune(base, "llama-untied", tmp_path / "adapter", LoraConfig(r=4, target_modules=LLAMA))
    for named in (str(base), "../base"):
        edit_config(tmp_path / "adapter", base_model_name_or_path=named)
        gm.merge({"method": "average", "models": [str(tmp_path / "adapter")]}, tmp_path / "out", force=True)
        assert_close(read_model(tmp_path / "out"), merged_by_peft(model, tmp_path / "want"), 1e-6)
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out/adapter_config.json").exists()
    load("llama-untied", tmp_path / "out")


@pytest.mark.parametrize("named", [None, "someone/other-model", "itself"])
def test_an_adapter_whose_base_cannot_be_opened_needs_one_in_the_recipe(named: Any, tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path / "base", "llama-untied"), tmp_path / "adapter"
    write_adapter(base, "llama-untied", adapter, LoraConfig(r=4, target_modules=LLAMA))
    edit_config(adapter, base_model_name_or_path=str(adapter) if named == "itself" else named)
    with pytest.raises(InputError):
        gm.merge({"method": "average", "models": [str(adapter)]}, tmp_path / "out")
    merge_one(base, adapter, tmp_path / "out")


def logits(model: Any) -> Tensor:
    ids = torch.arange(12)[None]
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.double().eval()(input_ids=ids, **more).logits


ONE_OF_TWO = {
    "a head saved whole": ("llama-tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "t5's embeddings saved whole": ("t5", {"target_modules": ["q"], "modules_to_save": ["shared"]}),
    "factors of a head": ("llama-tied", {"target_modules": ["q_proj", "lm_head"]}),
}


@pytest.mark.parametrize("case", ONE_OF_TWO)
def test_an_adapter_that_changes_one_of_two_tied_tensors_is_refused(case: str, tmp_path: Path) -> None:
    """PEFT leaves the other one as it was, which a tied model cannot."""
    family, settings = ONE_OF_TWO[case]
    base = make_base(tmp_path / "base", family)
    write_adapter(base, family, tmp_path / "adapter", LoraConfig(r=2, **settings))
    with pytest.raises(InputError, match="adapter"):
        merge_one(base, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_keeps_tied_embeddings_tied_is_what_peft_computes(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama-tied", torch.float64)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    model = tune(base, "llama-tied", tmp_path / "adapter", config)
    merge_one(base, tmp_path / "adapter", tmp_path / "out")
    got, want = logits(load("llama-tied", tmp_path / "out", dtype="auto")), logits(model)
    assert (got - want).abs().max() < 1e-12


PREFIX, Q = "base_model.model.", "layers.0.self_attn.q_proj"
SECOND_KEYS = {
    # the key that is there → another one for the same tensor
    "with half a prefix": (f"{PREFIX}model.{Q}.lora_{{}}.weight", f"{Q}.lora_{{}}.weight"),
    "factors and a whole tensor": (f"{PREFIX}model.{Q}.lora_A.weight", f"{PREFIX}model.{Q}.weight"),
    "a whole tensor twice": (f"{PREFIX}model.norm.weight", f"{PREFIX}model.norm.modules_to_save.weight"),
}


@pytest.mark.parametrize("case", SECOND_KEYS)
def test_two_keys_for_one_tensor_are_refused(case: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama-untied")
    config = LoraConfig(r=16, target_modules=["q_proj"], modules_to_save=["norm"])
    write_adapter(base, "llama-untied", tmp_path / "adapter", config)
    there, second = SECOND_KEYS[case]
    pairs = [(there.format(letter), second.format(letter)) for letter in ("AB" if "{}" in there else "B")]
    edit_tensors(tmp_path / "adapter", lambda held: held | {new: held[old].clone() + 0.5 for old, new in pairs})
    with pytest.raises(InputError, match="adapter"):
        merge_one(base, tmp_path / "adapter", tmp_path / "out")


def test_dora_is_what_peft_computes_in_float64_and_whatever_the_blocks(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama-untied", torch.float64)
    config = LoraConfig(r=3, target_modules=[*LLAMA, "embed_tokens"], use_dora=True)
    write_adapter(base, "llama-untied", tmp_path / "adapter", config)
    wide = load("llama-untied", base, dtype=torch.float64)
    model = PeftModel.from_pretrained(wide, tmp_path / "adapter", autocast_adapter_dtype=False)
    got = merge_one(base, tmp_path / "adapter", tmp_path / "out")
    assert_close(got, merged_by_peft(model.double(), tmp_path / "want"), 1e-13)
    merge_one(base, tmp_path / "adapter", tmp_path / "x/out", block=37, threads=2)
    assert weight_bytes(tmp_path / "x/out") == weight_bytes(tmp_path / "out")


def without(piece: str) -> Callable[[Path], None]:
    """An edit of an adapter: leave out the tensors whose keys contain a piece."""
    return lambda folder: edit_tensors(folder, lambda tensors: {n: v for n, v in tensors.items() if piece not in n})


def setting(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


EXPERT_PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]
# family, settings of LoraConfig, edit of the adapter, changes of the model that it is merged into
REFUSED: dict[str, tuple[str, dict[str, Any], Callable[[Path], None], dict[str, Any]]] = {
    "an initialization that changes the base": ("llama-untied", {"init_lora_weights": "pissa_niter_4"}, setting(), {}),
    "another kind of adapter": ("llama-untied", {}, setting(peft_type="IA3"), {}),
    "half of the factors": ("llama-untied", {}, without("0.self_attn.q_proj.lora_B"), {}),
    "other sizes": ("llama-untied", {}, setting(), {"hidden_size": 32}),
    "biases of LoRA": ("llama-untied", {"lora_bias": True}, setting(), {}),
    "magnitudes without use_dora": ("llama-untied", {"use_dora": True}, setting(use_dora=False), {}),
    "no regular expression": ("llama-untied", {}, setting(alpha_pattern={"(": 1}), {}),
    "fewer experts": ("mixtral", {"target_parameters": EXPERT_PARAMETERS}, setting(), {"num_local_experts": 2}),
    "half of an expert's factors": (
        "mixtral",
        {"target_parameters": EXPERT_PARAMETERS},
        without("0.mlp.experts.lora_B"),
        {},
    ),
    "experts of an unknown class": (
        "mixtral",
        {"target_parameters": EXPERT_PARAMETERS},
        setting(),
        {"architectures": ["NoSuchModel"]},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    family, settings, edit, changes = REFUSED[case]
    base = make_base(tmp_path / "base", family)
    write_adapter(base, family, tmp_path / "adapter", LoraConfig(r=2, target_modules=["q_proj"], **settings))
    edit(tmp_path / "adapter")
    if "architectures" in changes:
        config = json.loads((base / "config.json").read_text()) | changes
        (base / "config.json").write_text(json.dumps(config))
    elif changes:
        base = make_base(tmp_path / "other", family, **changes)
    with pytest.raises(InputError, match="adapter"):
        merge_one(base, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_key_adapter_puts_an_adapter_on_a_model_whatever_base_it_names(tmp_path: Path) -> None:
    """As mergekit's model+lora, which tests/golden compares: here on a fine-tuned model."""
    base = make_base(tmp_path / "base", "llama-untied")
    write_adapter(base, "llama-untied", tmp_path / "adapter", LoraConfig(r=2, target_modules=LLAMA))
    tuned = save(moved(load("llama-untied", base), 5), tmp_path / "tuned")
    model = PeftModel.from_pretrained(load("llama-untied", tuned), tmp_path / "adapter")
    recipe = {"method": "average", "models": [{"model": str(tuned), "adapter": str(tmp_path / "adapter")}]}
    gm.merge(recipe, tmp_path / "out")
    assert_close(read_model(tmp_path / "out"), merged_by_peft(model, tmp_path / "want"), 1e-6)
    with pytest.raises(InputError, match="adapter"):
        gm.merge(recipe, tmp_path / "adapter", force=True)
    assert (tmp_path / "adapter/adapter_config.json").is_file()
