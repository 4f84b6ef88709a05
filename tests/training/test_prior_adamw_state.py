"""PriorAdamW stopped and resumed, scaled, copied, and given more parameters."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradmerge as gm

from .test_prior_adamw import (
    BASE,
    CURVATURE,
    GRADIENTS,
    START,
    assert_close,
    assert_equal,
    parameters,
    slowly,
    take_steps,
)

KEPT: list[dict[str, Any]] = [
    {},
    {"keep_on": "cpu"},
    {"keep_dtype": torch.bfloat16},
    {"keep_on": "cpu", "keep_dtype": torch.bfloat16, "coupling": "adam"},
    {"prior": "identity"},
    {"amsgrad": True, "coupling": "adam", "fused": True},
]


def made(params: dict[str, nn.Parameter], **options: Any) -> gm.PriorAdamW:
    return gm.PriorAdamW(list(params.items()), **{"prior": CURVATURE, "lr": 0.1, **options})


def through_a_file(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("dtype", "options", "done"),
    [
        *((torch.bfloat16, options, 2) for options in KEPT),
        (torch.bfloat16, {}, 0),
        (torch.float32, {"keep_dtype": torch.bfloat16}, 2),
    ],
)
def test_resuming_gives_the_same_bytes_as_not_stopping(dtype: torch.dtype, options: Any, done: int) -> None:
    params = parameters(dtype)
    optimizer = made(params, anchor=BASE, **options)
    middle = take_steps(optimizer, params, GRADIENTS[:done])
    saved = through_a_file(optimizer.state_dict())
    want = take_steps(optimizer, params, GRADIENTS[done:])

    # The Trainer loads weights before it makes the optimizer: the anchor made then is not the right one.
    others = {name: nn.Parameter(value.clone()) for name, value in middle.items()}
    other = made(others, **options)
    other.load_state_dict(saved)
    assert_equal(take_steps(other, others, GRADIENTS[done:]), want)


def test_resuming_needs_neither_prior_nor_anchor() -> None:
    params = parameters()
    optimizer = made(params, anchor=BASE, strength=3.0)
    middle = take_steps(optimizer, params, GRADIENTS[:2])
    others = {name: nn.Parameter(value.clone()) for name, value in middle.items()}
    other = gm.PriorAdamW(others.values())
    other.load_state_dict(optimizer.state_dict())
    take_steps(other, others, GRADIENTS[2:])
    assert_close({n: p.detach() for n, p in others.items()}, slowly(CURVATURE.__getitem__, lr=0.1, strength=3.0))


def test_a_state_of_torchs_adamw_can_be_loaded_and_the_anchor_stays() -> None:
    theirs, ours = parameters(), parameters()
    adamw = torch.optim.AdamW(theirs.values(), lr=0.1)
    middle = take_steps(adamw, theirs, GRADIENTS[:2])
    optimizer = made(ours, anchor=BASE, strength=3.0)
    optimizer.load_state_dict(through_a_file(adamw.state_dict()))
    with torch.no_grad():
        for name, p in ours.items():
            p.copy_(middle[name])
    stepped = take_steps(adamw, theirs, GRADIENTS[2:3])
    want = {n: (v + 0.3 * CURVATURE[n] * BASE[n]) / (1 + 0.3 * CURVATURE[n]) for n, v in stepped.items()}
    assert_close(take_steps(optimizer, ours, GRADIENTS[2:3]), want)
    assert optimizer.param_groups[0]["strength"] == 3.0


def test_torchs_adamw_loads_its_state() -> None:
    params = parameters()
    optimizer = made(params, anchor=BASE)
    middle = take_steps(optimizer, params, GRADIENTS[:2])
    others = {n: nn.Parameter(v.clone()) for n, v in middle.items()}
    adamw = torch.optim.AdamW(others.values(), lr=0.5)
    adamw.load_state_dict(through_a_file(optimizer.state_dict()))
    optimizer.param_groups[0]["strength"] = 0.0
    assert_close(take_steps(adamw, others, GRADIENTS[2:]), take_steps(optimizer, params, GRADIENTS[2:]))


def test_a_state_of_other_parameters_is_refused() -> None:
    optimizer = gm.PriorAdamW([nn.Parameter(torch.zeros(3))])
    other = gm.PriorAdamW([nn.Parameter(torch.zeros(4))])
    with pytest.raises(gm.InputError, match="anchor"):
        other.load_state_dict(optimizer.state_dict())
    two = gm.PriorAdamW([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError):
        two.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("done", [0, 2])
def test_pickled_it_goes_on(done: int) -> None:
    params = parameters()
    optimizer = made(params, anchor=BASE)
    take_steps(optimizer, params, GRADIENTS[:done])
    others, other = pickle.loads(pickle.dumps((params, optimizer)))
    assert_equal(take_steps(other, others, GRADIENTS[done:]), take_steps(optimizer, params, GRADIENTS[done:]))


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize(("prior", "coupling"), [("identity", "decoupled"), (CURVATURE, "adam")])
def test_a_step_that_the_gradient_scaler_skips_changes_nothing(fused: Any, prior: Any, coupling: str) -> None:
    params, others = parameters(torch.float32), parameters(torch.float32)
    options = {"prior": prior, "anchor": BASE, "fused": fused, "coupling": coupling}
    optimizer, other = made(params, **options), made(others, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def scaled_step(factor: float) -> None:
        optimizer.zero_grad()
        loss = sum((p * GRADIENTS[0][n].float()).sum() * factor for n, p in params.items())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    scaled_step(float("inf"))
    assert_equal({n: p.detach() for n, p in params.items()}, {n: v.float() for n, v in START.items()})
    scaled_step(1.0)
    scaled_step(float("nan"))
    assert scaler.get_scale() == 1.0
    got = {n: p.detach() for n, p in params.items()}
    assert_close(got, take_steps(other, others, GRADIENTS[:1]), 1e-6)


def test_groups_cannot_be_added_later_to_mappings_that_are_gone() -> None:
    params = parameters()
    optimizer = gm.PriorAdamW([("weight", params["weight"])], lr=0.1, prior=CURVATURE, anchor=BASE)
    rest = [(n, params[n]) for n in ("bias", "scale")]
    with pytest.raises(gm.InputError):
        optimizer.add_param_group({"params": rest})
    with pytest.raises(gm.InputError, match="anchor"):
        optimizer.add_param_group({"params": rest, "anchor": BASE})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": rest, "strength": 0.0})
    assert len(optimizer.param_groups) == 2


def test_a_group_added_to_a_simple_prior_is_anchored_where_it_is_then() -> None:
    first, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = gm.PriorAdamW([first], lr=0.1, prior=1e20)
    with torch.no_grad():
        late.fill_(3.0)
    optimizer.add_param_group({"params": [late]})
    with torch.no_grad():
        late.fill_(5.0)
    first.grad = late.grad = torch.ones(2)
    optimizer.step()
    assert late.tolist() == pytest.approx([3.0, 3.0])


def test_gradients_in_another_order_of_memory_are_not_mixed_up() -> None:
    """torch's fused step does that on a CPU; it must not be chosen then."""
    start, gradient = START["weight"], GRADIENTS[0]["weight"]
    got = []
    for lay in (torch.clone, lambda v: v.t().contiguous().t()):
        p = nn.Parameter(start.clone())
        optimizer = gm.PriorAdamW([p], lr=0.1)
        for factor in (torch.ones_like(gradient), gradient):
            p.grad = lay(gradient * factor)
            optimizer.step()
        got.append(p.detach())
    torch.testing.assert_close(got[0], got[1], rtol=1e-12, atol=1e-12)


def test_sparse_gradients_are_refused_as_by_torch() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = gm.PriorAdamW(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert torch.equal(table.weight, before)


def tiny_checkpoint(folder: Path, optimizer: torch.optim.Optimizer, model: Any) -> Path:
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", [{"prior": "identity"}, {"coupling": "adam"}, {"keep_dtype": torch.bfloat16}])
def test_curvature_is_imported_from_its_state_as_from_adamws(options: Any, tmp_path: Path) -> None:
    import transformers as t

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    model = t.ViTForImageClassification(t.ViTConfig(**sizes, image_size=8, patch_size=4))
    named = list(model.named_parameters())
    ones = {n: torch.ones_like(p) for n, p in named}
    ours = gm.PriorAdamW(model, lr=0.0, fused=False, **{"prior": ones, **options})
    theirs = torch.optim.AdamW(model.named_parameters(), lr=0.0, fused=False)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for _, p in named:
            p.grad = torch.randn(p.shape, generator=generator)
        ours.step()
        theirs.step()
    got, want = (
        gm.import_curvature(tiny_checkpoint(tmp_path / str(k), o, model), dataset_size=10, batch_size=4)
        for k, o in enumerate((ours, theirs))
    )
    assert got.likelihood == "adam"
    assert_equal(dict(got), dict(want))
    assert all(bool((v > 0).all()) for v in got.values())
