"""How PriorAdamW finds the prior and anchor of each parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.checkpoint_names import for_files

from ..curvature.test_stored_names import CASES

#: Renamed in files; stored in parts there; tied.
MODELS = ["vit", "mixtral", "bert, tied", "plain"]


def make(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if kind == "plain":
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model_class, config = CASES[kind]
    return model_class(config)


def curvature_of(model: nn.Module, examples: int = 5) -> gm.Curvature:
    """Return curvature whose entries all differ, with names in memory; it is saved with the names of files."""
    generator = torch.Generator().manual_seed(3)
    sums = {n: torch.rand(p.shape, generator=generator) + 0.5 for n, p in model.named_parameters()}
    return gm.Curvature(sums, examples, stored=for_files(model))


def stored(optimizer: gm.PriorAdamW, key: str) -> dict[str, Tensor]:
    (group,), (values,) = optimizer.param_groups, optimizer.state_dict()["state"][key]
    return dict(zip(group["param_names"], values, strict=True))


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_curvature_matches_by_the_names_of_files_or_of_memory(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    curvature = curvature_of(model)
    curvature.save(tmp_path / "c")
    for prior in (tmp_path / "c", curvature, gm.Curvature.load(tmp_path / "c")):
        assert_same(stored(gm.PriorAdamW(model, prior=prior), "priors"), curvature.mean())
    assert_same(stored(gm.PriorAdamW(model, prior=tmp_path / "c", reduction="sum"), "priors"), curvature.sum())
    # A plain mapping is not divided; parameters need the model to be matched with files.
    sums = dict(gm.Curvature.load(tmp_path / "c"))
    by_name = gm.PriorAdamW(model.named_parameters(), model=model, prior=sums, damping=0.5)
    assert_same(stored(by_name, "priors"), {n: v + 0.5 for n, v in curvature.items()})


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "plain"])
def test_a_checkpoint_can_be_the_anchor(kind: str, tmp_path: Path) -> None:
    base, model = make(kind, 1), make(kind, 2)
    base.save_pretrained(tmp_path / "base")
    want = {name: p.detach() for name, p in base.named_parameters()}
    for anchor in (tmp_path / "base", base.state_dict(), load_file(tmp_path / "base" / "model.safetensors")):
        assert_same(stored(gm.PriorAdamW(model, anchor=anchor), "anchors"), want)


def test_only_trainable_parameters_need_a_prior() -> None:
    model = make("plain")
    model[0].requires_grad_(False)
    optimizer = gm.PriorAdamW(model, prior={"1.weight": torch.ones(2, 4), "1.bias": torch.ones(2)})
    assert optimizer.param_groups[0]["param_names"] == ["1.weight", "1.bias"]
    with pytest.raises(gm.InputError):
        gm.PriorAdamW(model.requires_grad_(False))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrapped_models() -> None:
    model = make("plain")
    curvature = curvature_of(model)
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        assert_same(stored(gm.PriorAdamW(wrapped, prior=curvature), "priors"), curvature.mean())


def test_a_new_head_is_an_error_or_has_no_penalty() -> None:
    model = make("plain")
    prior = {"0.weight": torch.ones(4, 3), "0.bias": torch.ones(4)}
    with pytest.raises(gm.InputError, match=r"1\.weight"):
        gm.PriorAdamW(model, prior=prior)
    with pytest.raises(gm.InputError, match=r"0\.weight"):  # none matches
        gm.PriorAdamW(model, prior={"other": torch.ones(2)}, missing="zero")
    assert stored(gm.PriorAdamW(model, prior=prior, missing="zero"), "priors")["1.bias"] is None
    named = list(model.named_parameters())
    optimizer = gm.PriorAdamW([{"params": named[:2]}, {"params": named[2:], "strength": 0.0}], prior=prior)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[1]["strength"] = 1.0
    with pytest.raises(gm.InputError):
        optimizer.step()


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = make("plain")
    whole = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    for value in (torch.ones(5), torch.full((4,), -1.0), torch.full((4,), float("nan")), 3):
        with pytest.raises(gm.InputError, match=r"0\.bias"):
            gm.PriorAdamW(model, prior=whole | {"0.bias": value})
    for value in (torch.ones(5), torch.full((4,), float("inf"))):
        with pytest.raises(gm.InputError, match=r"0\.bias"):
            gm.PriorAdamW(model, anchor=whole | {"0.bias": value})
    with pytest.raises(gm.InputError, match=r"0\.weight"):  # damping must not hide negative values
        gm.PriorAdamW(model, prior={n: -v for n, v in whole.items()}, damping=2.0)
    for options in ({"prior": whole}, {"anchor": model.state_dict()}):
        with pytest.raises(gm.InputError):
            gm.PriorAdamW(model.parameters(), **options)
    with torch.no_grad():
        model[1].bias.fill_(float("nan"))
    with pytest.raises(gm.InputError, match=r"1\.bias"):
        gm.PriorAdamW(model)
    gm.PriorAdamW(model, strength=0.0)


def test_invalid_options() -> None:
    options: list[dict[str, Any]] = [
        {"strength": float("inf")},
        {"damping": -1e-3},
        {"coupling": "loose"},
        {"reduction": "none"},
        {"missing": "zeros"},
        {"anchor": "no/such/folder"},
        {"prior": [1]},
        {"prior": "no/such/folder"},
    ]
    for each in options:
        with pytest.raises(gm.InputError):
            gm.PriorAdamW(nn.Linear(2, 2), **each)
    with pytest.raises(gm.InputError):
        gm.PriorAdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
