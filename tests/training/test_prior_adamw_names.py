"""Where PriorAdamW finds prior and anchor of a parameter, and what it says when it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gradmerge as gm

_TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
_IMAGE = {k: v for k, v in _TEXT.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4}
#: Renamed in files; stored in parts there; tied.
MODELS: dict[str, Any] = {
    "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**_IMAGE)),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**_TEXT, num_key_value_heads=1, num_local_experts=3)),
    "bert, tied": lambda: t.BertForMaskedLM(t.BertConfig(**_TEXT, max_position_embeddings=20)),
    "plain": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
}


def model_of(kind: str, seed: int = 0) -> Any:
    t.utils.logging.set_verbosity_error()
    t.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    return MODELS[kind]()


def curvature_of(model: nn.Module, examples: int = 5) -> gm.Curvature:
    """Every entry another number, as measured: by names in memory, saved by those of files."""
    from gradmerge.curvature.checkpoint_names import for_files

    generator = torch.Generator().manual_seed(3)
    sums = {n: torch.rand(p.shape, generator=generator) + 0.5 for n, p in model.named_parameters()}
    return gm.Curvature(sums, examples, stored=for_files(model))


def kept(optimizer: gm.PriorAdamW, key: str) -> dict[str, Tensor]:
    state = optimizer.state_dict()
    (group,) = state["param_groups"]
    return {name: state["state"][i][key] for name, i in zip(group["param_names"], group["params"], strict=True)}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("kind", MODELS)
def test_a_curvature_folder_is_read_by_the_names_of_files(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    curvature = curvature_of(model)
    curvature.save(tmp_path / "c")
    assert_equal(kept(gm.PriorAdamW(model, prior=tmp_path / "c"), "prior"), curvature.mean())
    assert_equal(kept(gm.PriorAdamW(model, prior=str(tmp_path / "c"), reduction="sum"), "prior"), curvature.sum())


@pytest.mark.parametrize("kind", MODELS)
def test_a_curvature_in_memory_goes_by_either_kind_of_name(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    curvature = curvature_of(model)
    curvature.save(tmp_path / "c")
    for given in (curvature, gm.Curvature.load(tmp_path / "c")):
        assert_equal(kept(gm.PriorAdamW(model, prior=given), "prior"), curvature.mean())
    sums = dict(gm.Curvature.load(tmp_path / "c"))
    assert_equal(
        kept(gm.PriorAdamW(model, prior=sums, damping=0.5), "prior"), {n: v + 0.5 for n, v in curvature.items()}
    )


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "plain"])
def test_a_checkpoint_can_be_the_anchor(kind: str, tmp_path: Path) -> None:
    base, model = model_of(kind, 1), model_of(kind, 2)
    base.save_pretrained(tmp_path / "base")
    want = {name: p.detach() for name, p in base.named_parameters()}
    for anchor in (tmp_path / "base", base.state_dict(), load_file(tmp_path / "base" / "model.safetensors")):
        assert_equal(kept(gm.PriorAdamW(model, anchor=anchor), "anchor"), want)


def test_training_a_vit_pulls_every_parameter_by_its_own_curvature(tmp_path: Path) -> None:
    base, model = model_of("vit", 1), model_of("vit", 2)
    curvature = curvature_of(base)
    curvature.save(tmp_path / "c")
    base.save_pretrained(tmp_path / "base")
    optimizer = gm.PriorAdamW(model, lr=0.1, strength=2.0, prior=tmp_path / "c", anchor=tmp_path / "base")
    other = model_of("vit", 2)
    adamw = torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)
    pixels = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for m, o in ((model, optimizer), (other, adamw)):
        m(pixel_values=pixels, labels=torch.tensor([0, 1, 0, 1])).loss.backward()
        o.step()
    theirs, bases = dict(other.named_parameters()), dict(base.named_parameters())
    for name, p in model.named_parameters():
        h = 0.2 * curvature.mean()[name].double()
        want = (theirs[name].double() + h * bases[name].double()) / (1 + h)
        torch.testing.assert_close(p.double(), want, rtol=1e-5, atol=1e-6)


def test_only_parameters_that_need_a_gradient_are_trained_and_need_a_prior() -> None:
    model = model_of("plain")
    model[0].requires_grad_(False)
    optimizer = gm.PriorAdamW(model, prior={"1.weight": torch.ones(2, 4), "1.bias": torch.ones(2)})
    assert optimizer.param_groups[0]["param_names"] == ["1.weight", "1.bias"]
    model.requires_grad_(False)
    with pytest.raises(gm.InputError, match="Sequential"):
        gm.PriorAdamW(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrappers_of_a_model_are_looked_through() -> None:
    model = model_of("plain")
    curvature = curvature_of(model)
    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        assert_equal(kept(gm.PriorAdamW(wrapped, prior=curvature), "prior"), curvature.mean())


def test_layers_that_are_unfrozen_later_find_their_curvature_in_the_folder(tmp_path: Path) -> None:
    model = model_of("vit")
    curvature = curvature_of(model)
    curvature.save(tmp_path / "c")
    model.vit.requires_grad_(False)
    optimizer = gm.PriorAdamW(model, prior=tmp_path / "c")
    model.vit.requires_grad_(True)
    late = [(n, p) for n, p in model.named_parameters() if n.startswith("vit.")]
    optimizer.add_param_group({"params": late})
    state = optimizer.state_dict()
    first = state["param_groups"][1]["params"][0]
    assert torch.equal(state["state"][first]["prior"], curvature.mean()[late[0][0]])


def test_a_new_head_goes_into_a_group_without_strength() -> None:
    model = model_of("plain")
    prior = {"0.weight": torch.ones(4, 3), "0.bias": torch.ones(4)}
    body, head = list(model.named_parameters())[:2], list(model.named_parameters())[2:]
    with pytest.raises(gm.InputError, match=r"1\.weight\n  1\.bias\n.*\"strength\": 0"):
        gm.PriorAdamW(model, prior=prior)
    optimizer = gm.PriorAdamW([{"params": body}, {"params": head, "strength": 0.0}], prior=prior)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[1]["strength"] = 1.0
    with pytest.raises(gm.InputError, match=r"1\.weight\n  1\.bias"):
        optimizer.step()
    assert float(optimizer.state[head[0][1]]["step"]) == 1


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model = model_of("plain")
    whole = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    for given, named in (
        (whole | {"0.bias": torch.ones(5)}, r"0\.bias: \(5,\)"),
        (whole | {"0.bias": torch.full((4,), -1.0)}, r"0\.bias"),
        (whole | {"0.bias": torch.full((4,), float("nan"))}, r"0\.bias"),
        (whole | {"0.bias": 3}, r"0\.bias"),
        (tmp_path / "none", "none"),
        ([1], "prior"),
        (-1.0, r"prior=-1\.0"),
    ):
        with pytest.raises(gm.InputError, match=named):
            gm.PriorAdamW(model, prior=given)
    for anchor, named in (
        ({n: v for n, v in model.state_dict().items() if n != "1.bias"}, r"anchor: .*\n  1\.bias"),
        (str(tmp_path / "none"), "none"),
    ):
        with pytest.raises(gm.InputError, match=named):
            gm.PriorAdamW(model, anchor=anchor)
    for options in ({"prior": whole}, {"anchor": model.state_dict()}):
        with pytest.raises(gm.InputError, match="4 parameters without names"):
            gm.PriorAdamW(model.parameters(), **options)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_an_anchor_that_is_not_finite_is_refused_by_name(wrong: float, tmp_path: Path) -> None:
    model = model_of("plain")
    odd = {n: p.detach().clone() for n, p in model.named_parameters()}
    odd["1.bias"][-1] = wrong
    with pytest.raises(gm.InputError, match=r"anchor: 1\.bias"):
        gm.PriorAdamW(model, anchor=odd)
    save_file(odd, tmp_path / "model.safetensors")
    with pytest.raises(gm.InputError, match=r"1\.bias"):
        gm.PriorAdamW(model, anchor=tmp_path / "model.safetensors")
    state = gm.PriorAdamW(model).state_dict()
    state["state"][3]["anchor"] = odd["1.bias"]
    with pytest.raises(gm.InputError, match="parameter 3"):
        gm.PriorAdamW(model).load_state_dict(state)
    model.load_state_dict(odd)
    with pytest.raises(gm.InputError, match=r"1\.bias"):
        gm.PriorAdamW(model)
    with pytest.raises(gm.InputError, match="parameter 3"):
        gm.PriorAdamW(model.parameters())
    gm.PriorAdamW(model, strength=0.0)


def test_a_prior_that_overflows_what_it_is_kept_in_is_refused_by_name() -> None:
    model = model_of("plain")
    large = {n: torch.full_like(p, 3.4e38) for n, p in model.named_parameters()}
    gm.PriorAdamW(model, prior=large)
    with pytest.raises(gm.InputError, match=r"prior: 0\.weight"):
        gm.PriorAdamW(model, prior=large, keep_dtype=torch.bfloat16)
    with pytest.raises(gm.InputError, match=r"prior: 0\.weight"):
        gm.PriorAdamW(model, prior={n: -torch.ones_like(p) for n, p in large.items()}, damping=2.0)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(gm.InputError, match="complex"):
        gm.PriorAdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strength": -1.0}, "strength=-1.0"),
        ({"strength": float("inf")}, "strength=inf"),
        ({"strength": "1"}, "strength=1"),
        ({"damping": -1e-3}, "damping=-0.001"),
        ({"coupling": "loose"}, "coupling='loose'"),
        ({"reduction": "none"}, "reduction='none'"),
        ({"keep_dtype": torch.float16}, "keep_dtype"),
        ({"keep_on": "nowhere"}, "keep_on='nowhere'"),
        ({"anchor": 3}, "anchor"),
        ({"prior": torch.ones(2)}, "prior"),
    ],
)
def test_options_out_of_range_are_refused(options: Any, named: str) -> None:
    with pytest.raises(gm.InputError, match=named):
        gm.PriorAdamW([nn.Parameter(torch.zeros(2))], **options)


@pytest.mark.parametrize("params", ["model", None])
def test_what_is_neither_a_model_nor_parameters_is_refused(params: Any) -> None:
    with pytest.raises(gm.InputError, match=r"^params"):
        gm.PriorAdamW(params)
