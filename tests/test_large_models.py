"""Models larger than a device: the same results wherever weights and sums are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.estimate import estimate_curvature
from gradmerge.curvature.offload import StoredSum
from gradmerge.errors import InputError
from gradmerge.tasks import load_task

from .curvature import slow
from .curvature.families import FAMILIES, batch_of
from .making import read_model
from .tasks.making import (
    labelled,
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_llama_checkpoint,
    write_jsonl,
)

MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_llama_checkpoint,
    "tied": lambda folder: tiny_llama_checkpoint(folder, tie_word_embeddings=True),
    "gpt2": tiny_gpt2_checkpoint,
    "bert": lambda folder: tiny_bert_checkpoint(folder, labels=3),
}
OPTIONS: dict[str, Any] = {"batch_size": 2, "progress": False, "dtype": "float64"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    for name, make in MAKERS.items():
        make(folder / name)
    write_jsonl(folder / "rows.jsonl", labelled(5, 3))
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in sentences(5)))
    return folder


def data_for(place: Path, name: str) -> Path:
    return place / ("rows.jsonl" if name == "bert" else "texts.txt")


def estimated(place: Path, name: str, out: Path, **options: Any) -> dict[str, Tensor]:
    gm.estimate_curvature(place / name, data_for(place, name), out=out, **{**OPTIONS, **options})
    return read_model(out)


def reference(place: Path, name: str) -> dict[str, Tensor]:
    """Σ_i [∇ℓ_i]² one example at a time, in float64, without anything of the estimator."""
    loaded = load_task(place / name, data_for(place, name), batch_size=1, dtype="float64")
    examples = [{key: value[0] for key, value in batch.items()} for batch in loaded.batches()]
    return slow.empirical(loaded.model, examples, "classes" if name == "bert" else "next-token")


# Sums that are kept elsewhere.


@pytest.mark.parametrize("name", ["bert", "llama, tied"])
def test_sums_in_cpu_memory_have_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that is copied to the device and back is like one on another device."""
    family = FAMILIES[name]
    model, examples = family.model(), family.examples()
    batches = [batch_of(examples[:3]), batch_of(examples[3:])]

    def estimates(accumulate_on: str) -> list[Any]:
        kinds = ("diagonal", "kronecker", "gram")
        return [estimate_curvature(model, batches, kind=kind, accumulate_on=accumulate_on) for kind in kinds]

    plain = estimates("device")

    def add_to_copy(self: StoredSum, add_to: Callable[[Tensor], Any]) -> None:
        copy = self.value.clone()
        add_to(copy)
        self.value.copy_(copy)

    monkeypatch.setattr(StoredSum, "add", add_to_copy)
    for got, want in zip(estimates("cpu"), plain, strict=True):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)


# Layers over devices, CPU and disk.


@pytest.mark.parametrize(("name", "kind"), [("tied", "diagonal"), ("gpt2", "kronecker"), ("bert", "gram")])
def test_weights_on_disk_give_the_same_bytes(name: str, kind: str, place: Path, tmp_path: Path) -> None:
    want = estimated(place, name, tmp_path / "plain", kind=kind)
    got = estimated(place, name, tmp_path / "disk", kind=kind, model_args={"device_map": {"": "disk"}})
    assert got.keys() == want.keys() and all(torch.equal(got[key], want[key]) for key in want)
    if kind == "diagonal":
        model = load_task(place / name, data_for(place, name), dtype="float64").model
        stored = {n: p for n, p in reference(place, name).items() if n in dict(model.named_parameters())}
        slow.assert_same(got, {n: v.float() for n, v in stored.items()}, 5e-6)


def test_auto_fills_the_memory_there_is_and_leaves_the_rest_on_disk(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import accelerate.utils

    source = data_for(place, "llama")
    gm.estimate_curvature(place / "llama", source, out=tmp_path / "plain", model_args={"device_map": "auto"}, **OPTIONS)
    monkeypatch.setattr(accelerate.utils, "get_max_memory", lambda: {"cpu": 12_000})
    loaded = load_task(place / "llama", source, model_args={"device_map": "auto"}, gradients=True)
    devices = {p.device.type for p in loaded.model.parameters()}
    assert devices == {"cpu", "meta"}
    gm.estimate_curvature(place / "llama", source, out=tmp_path / "small", model_args={"device_map": "auto"}, **OPTIONS)
    want, got = read_model(tmp_path / "plain"), read_model(tmp_path / "small")
    assert all(torch.equal(got[key], want[key]) for key in want)
    on_disk = {"": "disk"}
    numbers = [
        gm.evaluate(place / "llama", source, progress=False, model_args={"device_map": x}) for x in (None, on_disk)
    ]
    assert numbers[0] == numbers[1]


def test_a_spread_model_is_left_as_it_was_found_and_needs_one_layer_at_a_time(place: Path) -> None:
    loaded = load_task(place / "llama", place / "texts.txt", model_args={"device_map": {"": "disk"}}, gradients=True)
    model = loaded.model
    hooks = [m._hf_hook for m in model.modules() if getattr(getattr(m, "_hf_hook", None), "offload", False)]
    before = {name: p.device.type for name, p in model.named_parameters()}
    held: list[int] = []
    mlp = model.get_submodule("model.layers.1.mlp.up_proj")
    watch = mlp.register_forward_hook(
        lambda *_: held.append(sum("weight" in m.__dict__ for m in model.modules()))  # those that are there
    )
    estimate_curvature(model, list(loaded.batches()), output=loaded.loss)
    watch.remove()
    assert held and max(held) <= 1
    assert {name: p.device.type for name, p in model.named_parameters()} == before
    assert hooks and all(hook.offload for hook in hooks)


# Quantised bases.


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.filterwarnings("ignore")
def test_under_a_quantised_base_the_adapters_parameters_are_measured(bits: str, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base = tiny_llama_checkpoint(tmp_path / "base", hidden_size=64, intermediate_size=64)
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in sentences(5)))
    settings: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    settings |= {"bnb_4bit_compute_dtype": torch.float32}
    settings = {"load_in_8bit": True} if bits == "8bit" else settings
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    quantised = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(**settings))
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(tmp_path / "adapter")
    options: dict[str, Any] = {"batch_size": 5, "progress": False}
    texts = tmp_path / "texts.txt"
    gm.estimate_curvature(
        tmp_path / "adapter", texts, out=tmp_path / "out", model_args={f"load_in_{bits}": True}, **options
    )
    found = [read_model(tmp_path / "out")]
    if bits == "4bit":  # a base that is stored as codes is taken as it is
        quantised.save_pretrained(tmp_path / "codes")
        for path in base.glob("*token*"):
            (tmp_path / "codes" / path.name).write_bytes(path.read_bytes())
        adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "codes")
        adapted.save_pretrained(tmp_path / "adapter")
        gm.estimate_curvature(tmp_path / "adapter", texts, out=tmp_path / "out", force=True, **options)
        found.append(read_model(tmp_path / "out"))

    model = PeftModel.from_pretrained(quantised, str(tmp_path / "adapter"), is_trainable=True).eval()
    loaded = load_task(base, texts, batch_size=1)
    want: dict[str, Tensor] = {}
    measured = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for batch in loaded.batches():
        logits = model(input_ids=batch["input_ids"]).logits[0, :-1].double()
        loss = nn.functional.cross_entropy(logits, batch["labels"][0, 1:], ignore_index=-100, reduction="sum")
        for name, value in zip(measured, torch.autograd.grad(loss, list(measured.values())), strict=True):
            stored = name.replace(".default", "")
            want[stored] = want.get(stored, torch.zeros(())) + value.double().square()
    # Codes of 8 bits are multiplied in float16, whose scale is taken from all rows that are multiplied together.
    tolerance = 0.05 if bits == "8bit" else 1e-4
    for got in found:
        assert got.keys() == want.keys() and len(want) == 8
        for name, value in want.items():
            assert float((got[name] - value).abs().max()) <= tolerance * float(value.abs().max()), name


# Bad input.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accumulate_on": "dsik"}, "accumulate_on"),
        ({"model_args": {"device_map": "auto"}, "device": "cpu"}, "device_map"),
        ({"model_args": {"device_map": "auto"}, "at_delta": "bert"}, "at_delta"),
        ({"model_args": {"load_in_4bit": True}, "at_delta": "bert"}, "at_delta"),
        ({"model_args": {"load_in_8bit": True}, "kind": "gram"}, "load_in_8bit"),
        ({"model_args": {"load_in_4bit": True}}, "load_in_4bit"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], says: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    with pytest.raises(InputError, match=says):
        estimated(place, "bert", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
