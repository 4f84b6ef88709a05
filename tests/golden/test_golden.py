"""mergekit recipes run unchanged and give the tensors of mergekit 0.1.5, which `make.py` stored."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

import gradmerge as gm
from gradmerge.api.recipe_yaml import recipe_documents

HERE = Path(__file__).parent
RECIPES = sorted((HERE / "recipes").glob("*.yml"))
GOLDEN = load_file(HERE / "outputs.safetensors")
with safe_open(HERE / "outputs.safetensors", "pt") as file:
    VOCABULARIES = json.loads(file.metadata()["vocabularies"])
#: Methods that divide by norms or sums over a tensor, where float32 errors are larger.
BY_NORMS = {"slerp", "nuslerp", "multislerp", "karcher", "model_stock", "sce", "ramplus_tl", "nearswap"}
RANDOM = {"dare-linear-random", "dare-ties-random-unscaled", "della-linear-random"}


def golden(recipe: str) -> dict[str, Tensor]:
    return {name.partition("/")[2]: value for name, value in GOLDEN.items() if name.partition("/")[0] == recipe}


def in_order_of(out: Path, want: dict[str, Tensor], vocabulary: dict[str, int]) -> dict[str, Tensor]:
    """Return mergekit's tensors with rows in the order of our tokenizer; the order of mergekit's unions is random."""
    ours = AutoTokenizer.from_pretrained(out).get_vocab()
    assert ours.keys() == vocabulary.keys()
    found = dict(want)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found[name] = want[name].clone()
        for token, row in ours.items():
            found[name][row] = want[name][vocabulary[token]]
    return found


def merged(recipe: Path, out: Path) -> dict[str, Tensor]:
    gm.merge(recipe, out, progress=False, threads=1)
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(out.name)] == [out.name]
    return load_file(out / "model.safetensors")


def models_of(text: str) -> list[dict[str, Tensor]]:
    """Return the tensors of every model that a recipe names."""
    folders = [folder for folder in sorted((HERE / "models").iterdir()) if f"models/{folder.name}" in text]
    found = {folder.name: load_file(folder / "model.safetensors") for folder in folders if folder.name != "lora"}
    if "models/lora" in text:
        found["base with the adapter"] = dict(found["base"])
        factors = load_file(HERE / "models" / "lora" / "adapter_model.safetensors")
        for name in (name for name in factors if name.endswith("lora_A.weight")):
            product = 3 * factors[name.replace("lora_A", "lora_B")] @ factors[name]
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            found["base with the adapter"][target] = found["base"][target] + product
    return list(found.values())


def operands(name: str, want: Tensor, models: list[dict[str, Tensor]], moved: bool) -> Tensor:
    """Return the largest operand of every entry: a value or a difference of the models.

    If entries have moved, it is the largest of all entries.
    """
    found = [model[name].double() for model in models if name in model and model[name].shape == want.shape]
    if moved or len(found) < len(models):
        largest = max(float(values.double().abs().max()) for model in models for values in model.values())
        return torch.full(want.shape, largest, dtype=torch.float64)
    spread = torch.stack(found).amax(0) - torch.stack(found).amin(0)
    return torch.stack([want.double(), spread, *found]).abs().amax(0)


@cache
def units(text: str, dtype: torch.dtype) -> float:
    """Return the allowed difference relative to the largest operand."""
    if dtype != torch.float32:
        return 2 * torch.finfo(dtype).eps
    methods = {document["merge_method"] for document in yaml.safe_load_all(text)}
    by_norms = methods & BY_NORMS or "rescale" in text
    return (32 if by_norms else 2) * 2.0**-23


def on_threshold(recipe: str, name: str) -> Tensor | bool:
    """Return the entries exactly on a threshold, which may be kept or dropped."""
    if recipe != "ties-bf16":
        return False
    base, *tuned = (
        load_file(HERE / "models" / f"{model}-bf16" / "model.safetensors")[name] for model in ("base", *"ab")
    )
    sizes = [(model.float() - base.float()).abs() for model in tuned]
    kept = [max(1, int(size.numel() * 0.5)) for size in sizes]
    last = [size.flatten().sort(descending=True).values[k - 1] for size, k in zip(sizes, kept, strict=True)]
    return torch.stack([size == threshold for size, threshold in zip(sizes, last, strict=True)]).any(0)


@pytest.mark.parametrize("recipe", [recipe.stem for recipe in RECIPES if recipe.stem not in RANDOM])
def test_a_mergekit_recipe_and_its_translation_give_the_tensors_of_mergekit(recipe: str, tmp_path: Path) -> None:
    source = HERE / "recipes" / f"{recipe}.yml"
    text = source.read_text()
    moved = "layer_range" in text or "tokenizer" in text
    got, want, models = merged(source, tmp_path / "out"), golden(recipe), models_of(text)
    if recipe in VOCABULARIES:
        want = in_order_of(tmp_path / "out", want, VOCABULARIES[recipe])
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert (got[name].dtype, got[name].shape) == (expected.dtype, expected.shape), name
        largest = operands(name, expected, models, moved)
        off = (got[name].double() - expected.double()).abs() / largest.clamp(min=1e-30)
        wrong = off > units(text, expected.dtype)
        assert not (wrong & ~on_threshold(recipe, name)).any(), f"{name}: {float(off.max() * 2**23):.3g} units"

    ours = tmp_path / "elsewhere" / "recipe.yml"
    ours.parent.mkdir()
    ours.write_text(recipe_documents(gm.load_recipe(source), ours.parent))
    assert "merge_method" not in ours.read_text()
    merged(ours, tmp_path / "again")
    for file in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / file).exists() == (tmp_path / "again" / file).exists()
        if (tmp_path / "out" / file).exists():
            assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file


def kept_of(tensors: dict[str, Tensor], factor: float | None) -> list[tuple[Tensor, Tensor]]:
    """Return for every tensor which entries of model a's difference to the base were kept, and the difference.

    Kept entries are multiplied by ``factor``. If it is None, the factor restores the L1 norm of the tensor.
    """
    base, tuned = (load_file(HERE / "models" / model / "model.safetensors") for model in ("base", "a"))
    found = []
    for name, value in tensors.items():
        delta, left = tuned[name].double() - base[name].double(), value.double() - base[name].double()
        kept = left.abs() > 1e-3 * delta.abs()
        scale = float(delta.abs().sum() / delta[kept].abs().sum()) if factor is None and kept.any() else factor or 1.0
        assert torch.allclose(left, torch.where(kept, delta * scale, 0), atol=1e-6)
        found.append((kept, delta))
    return found


@pytest.mark.parametrize(
    ("recipe", "factor", "density"),
    [("dare-linear-random", None, 0.4), ("dare-ties-random-unscaled", 0.5, 0.6), ("della-linear-random", None, 0.5)],
)
def test_a_random_method_keeps_and_scales_as_in_mergekit(
    recipe: str, factor: float | None, density: float, tmp_path: Path
) -> None:
    for tensors in (golden(recipe), merged(HERE / "recipes" / f"{recipe}.yml", tmp_path / "out")):
        found = kept_of(tensors, factor)
        kept = torch.cat([one.flatten() for one, _ in found]).double()
        assert abs(float(kept.mean()) - density) < 4 * math.sqrt(density * (1 - density) / len(kept))
        if recipe == "della-linear-random":  # it keeps the larger half of a row with probability 0.5 + ε/2 on average
            upper = torch.cat([one[rank_of(delta) >= 0.5] for one, delta in found if one.dim() == 2]).double()
            assert abs(float(upper.mean()) - 0.65) < 0.04


def rank_of(delta: Tensor) -> Tensor:
    """Return the rank of every entry in its row by magnitude, from 0 to 1."""
    return delta.abs().argsort(dim=1).argsort(dim=1) / (delta.shape[1] - 1)


def test_there_are_golden_files_for_all_recipes() -> None:
    assert len(RECIPES) >= 40
    assert {name.partition("/")[0] for name in GOLDEN} == {recipe.stem for recipe in RECIPES}
    assert sum(path.stat().st_size for path in HERE.rglob("*") if path.suffix != ".pyc") < 2_000_000
