from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import gradmerge as gm
from gradmerge.curvature.curvature import KroneckerFactors
from gradmerge.curvature.format import decode_log8, encode_log8, log8_table, open_curvature

from ..making import random_curvature, random_state

HEADER = {"format": "gradmerge-curvature/1", "examples": "7", "likelihood": "sampled", "model": "m"}


def test_a_saved_file_has_the_documented_layout(tmp_path: Path) -> None:
    curvature = random_curvature(0, random_state(0), examples=42)
    curvature.save(tmp_path / "c")
    path = tmp_path / "c" / "curvature.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata() == {
            "format": "gradmerge-curvature/1",
            "examples": "42",
            "likelihood": "empirical",
            "model": "test",
            "precision": "float32",
        }
    stored = load_file(path)
    assert stored.keys() == curvature.keys()
    assert all(torch.equal(stored[n], curvature[n]) for n in stored)


@pytest.mark.parametrize("shard_size", [10**9, 600])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "log8"])
def test_curvature_survives_a_round_trip(tmp_path: Path, precision: str, shard_size: int) -> None:
    curvature = random_curvature(0, random_state(0))
    curvature["embed.weight"][0] = 0
    curvature.save(tmp_path / "c", precision=precision, shard_size=shard_size)
    assert (tmp_path / "c" / "curvature.safetensors").exists() == (shard_size > 600)
    back = gm.Curvature.load(tmp_path / "c")
    assert (back.examples, back.likelihood) == (100, "empirical")
    for name, value in curvature.items():
        if precision == "float32":
            assert torch.equal(back[name], value)
            continue
        positive = value[value > 0]
        step = math.log(positive.max() / positive.min()) / 254 if precision == "log8" else 2**-7
        assert torch.equal(back[name] == 0, value == 0)
        assert ((back[name][value > 0].log() - positive.log()).abs() <= step / 2 + 1e-5).all()


def test_log8_codes_are_equally_spaced_in_the_logarithm() -> None:
    values = log8_table(torch.tensor([1e-12, 3.0])).double()
    assert values[0] == 0
    for code in (1, 77, 255):
        want = math.exp(math.log(1e-12) + (code - 1) / 254 * (math.log(3.0) - math.log(1e-12)))
        assert values[code] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("values", [torch.zeros(3), torch.tensor([0.0, 2.0, 2.0]), torch.zeros(0), torch.tensor(4.0)])
def test_log8_holds_constants_zeros_and_nothing(values: torch.Tensor) -> None:
    codes, ends = encode_log8(values)
    assert torch.allclose(decode_log8(codes, log8_table(ends)), values)


def test_parts_of_a_data_set_add_up() -> None:
    state = random_state(0)
    one, two = random_curvature(1, state, 10), random_curvature(2, state, 30)
    total = one + two
    assert total.examples == 40
    for name in state:
        assert torch.equal(total.sum()[name], one[name] + two[name])
        assert torch.allclose(total.mean()[name], (one[name] + two[name]) / 40)
        assert torch.equal(one.scale(3.0)[name], one[name] * 3)
    for other in (gm.Curvature({"other": torch.ones(2)}, 1), gm.Curvature(two.sum(), 30, "sampled")):
        with pytest.raises(ValueError):
            one + other
    with pytest.raises(ValueError):
        one.scale(-1.0)


BAD = {
    "a model": ({"format": "pt"}, {"w": torch.ones(2)}),
    "no examples": ({k: v for k, v in HEADER.items() if k != "examples"}, {"w": torch.ones(2)}),
    "zero examples": (HEADER | {"examples": "0"}, {"w": torch.ones(2)}),
    "words for examples": (HEADER | {"examples": "many"}, {"w": torch.ones(2)}),
    "another precision": (HEADER | {"precision": "float4"}, {"w": torch.ones(2)}),
    "another type": (HEADER, {"w": torch.ones(2, dtype=torch.float64)}),
    "log8 without a scale": (HEADER | {"precision": "log8"}, {"w": torch.ones(2, dtype=torch.uint8)}),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    header, tensors = BAD[case]
    save_file(tensors, tmp_path / "c.safetensors", metadata=header)
    with pytest.raises(gm.InputError, match=r"c\.safetensors"):
        open_curvature(str(tmp_path / "c.safetensors"))


@pytest.mark.parametrize("ends", [[float("nan"), 1.0], [2.0, 1.0], [0.0, 1.0], [1.0, float("inf")]])
def test_a_wrong_log8_scale_is_refused(tmp_path: Path, ends: list[float]) -> None:
    tensors = {"w": torch.ones(2, dtype=torch.uint8), "w.log8": torch.tensor(ends)}
    save_file(tensors, tmp_path / "c.safetensors", metadata=HEADER | {"precision": "log8"})
    with pytest.raises(gm.InputError, match=r"w\.log8"):
        gm.Curvature.load(tmp_path / "c.safetensors")


def kronecker(path: Path, tokens: str | None, **shapes: tuple[int, ...]) -> None:
    header = {"format": "gradmerge-curvature/1", "examples": "3", "kind": "kronecker"}
    header |= {"tokens": tokens} if tokens is not None else {}
    save_file({name.replace("_", "."): torch.ones(shape) for name, shape in shapes.items()}, path, header)


def test_a_file_of_factors_that_do_not_belong_together_is_refused(tmp_path: Path) -> None:
    path, fits = tmp_path / "k.safetensors", {"w_A": (2, 2), "w_G": (3, 3)}
    wrong: list[tuple[str | None, dict[str, tuple[int, ...]], str]] = [
        *((tokens, fits, "tokens") for tokens in (None, "[", '["w"]', '{"w": 0}', '{"w": true}', f'{{"w": {10**30}}}')),
        ('{"w": 4}', {"w_A": (2, 2)}, r"w\.G"),
        ('{"w": 4}', {"w_A": (2, 3), "w_G": (3, 3)}, r"w\.A"),
        ('{"w": 4}', {"w_A": (4,), "w_G": (3, 3)}, r"w\.A"),
    ]
    for tokens, shapes, name in wrong:
        kronecker(path, tokens, **shapes)
        with pytest.raises(gm.InputError, match=name):
            gm.Curvature.load(path)


def test_factors_come_back_in_shards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = {f"{i}.weight": KroneckerFactors(torch.randn(4, 4), torch.randn(3, 3), 5 + i, i == 1) for i in range(3)}
    gm.Curvature({**layers, "b": torch.ones(2)}, 9, "exact", "m").save(tmp_path / "k", shard_size=100)
    assert len(list((tmp_path / "k").glob("*.safetensors"))) > 1
    got = gm.Curvature.load(tmp_path / "k")
    assert (got.examples, got.likelihood, got.model, got.transposed) == (9, "exact", "m", frozenset({"1.weight"}))
    assert got.layers.keys() == layers.keys() and got.diagonal.keys() == {"b"}
    for name, (a, g, tokens, _) in layers.items():
        assert torch.equal(got.layers[name].inputs, a) and torch.equal(got.layers[name].outputs, g)
        assert got.layers[name].tokens == tokens


def test_a_folder_has_a_card_that_says_what_its_sums_are_of(tmp_path: Path) -> None:
    sums = {"w": torch.rand(3, 4), "b": torch.rand(3)}
    gm.Curvature(sums, 1234, "sampled", "org/<b>model|").save(tmp_path / "diagonal", precision="bfloat16")
    gm.Curvature({"w": torch.eye(4)}, 7, kind="gram").save(tmp_path / "gram")
    card = ModelCard((tmp_path / "diagonal" / "README.md").read_text())
    assert card.data.to_dict() == {"tags": ["gradmerge", "curvature"]}
    assert r"org/\<b\>model\|" in card.text and "`org/<b>model\\|`" in card.text
    assert "1,234" in card.text and "bfloat16" in card.text
    gram = (tmp_path / "gram" / "README.md").read_text()
    assert "method: regmean" in gram and "likelihood" not in gram
