"""Calibration: the equation against a slow float64 reference, its special cases, and the choice on held-out rows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import gradmerge as gm
from gradmerge import InputError
from gradmerge.curvature.losses import MASKED
from gradmerge.refinement import layers
from gradmerge.refinement.calibrate import MERGE, InputProducts, Settings, solve
from gradmerge.refinement.output_factors import output_factors, sampled_loss
from gradmerge.refinement.rows import hold_out
from gradmerge.refinement.structure import find_structure

from .calibration_families import EXPERTS, FAMILIES, calibrated, make, rows, split
from .slow_calibration import calibrate_slowly, inputs_of


def same(found, wanted, merged, tolerance=1e-4):
    """Equal to a relative norm per parameter; the parameters that change do so by far more."""
    moved = 0
    for (name, one), other, before in zip(
        found.named_parameters(), wanted.parameters(), merged.parameters(), strict=True
    ):
        error = float((one.double() - other.double()).norm() / other.double().norm().clamp(min=1e-12))
        assert error < tolerance, f"{name}: {error:.2g}"
        moved += float((other.double() - before.double()).norm()) > 20 * tolerance * float(other.double().norm())
    assert moved > 4


@pytest.mark.parametrize("name", FAMILIES)
def test_it_solves_the_equation_of_every_layer_in_forward_order(name):
    merged, teachers = make(name)
    data = rows(name)
    found, report = calibrated(merged, teachers, {task: split(batch, 5) for task, batch in data.items()})
    same(found, calibrate_slowly(merged, teachers, data), merged)
    assert len(report.layers) > 4 and not report.ridges


def layers_with_factors(structure):
    names = [name for groups in structure.groups.values() for group in groups for name in group]
    return [name for name in names if name != "lm_head" and "experts" not in name]


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "convnext", "mixtral"])
def test_with_output_factors_too(name):
    merged, teachers = make(name)
    data = rows(name)
    structure = find_structure(merged, data["task0"])
    layers = layers_with_factors(structure)
    factors = {task: output_factors(merged, split(batch, 5), layers) for task, batch in data.items()}
    scaled = {
        task: {n: g / g.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] for n, g in found.items()}
        for task, found in factors.items()
    }
    slow = calibrate_slowly(merged, teachers, data, factors=scaled, epsilon=0.1)
    settings = Settings(tolerance=1e-9)
    batches = {task: split(batch, 5) for task, batch in data.items()}
    found, report = calibrated(merged, teachers, batches, settings, factors=factors, epsilon=0.1)
    same(found, slow, merged)
    assert 0 < report.most_steps < 60 and not report.residuals


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "convnext"])
def test_output_factors_are_sums_over_rows_of_plain_gradients(name):
    """One row at a time, without padding, with the gradients of autograd."""
    model, _ = make(name)
    batch = rows(name, count=4)["task0"]
    structure = find_structure(model, batch)
    names = layers_with_factors(structure)
    found = output_factors(model, [batch], names)
    drawn = []
    for row in range(4):
        one = {key: value[row : row + 1] for key, value in batch.items()}
        if "attention_mask" in one:
            length = int(one["attention_mask"].sum())
            one |= {key: one[key][:, :length] for key in ("input_ids", "attention_mask")}
        if "decoder_attention_mask" in one:
            length = int(one["decoder_attention_mask"].sum())
            one |= {key: one[key][:, :length] for key in ("decoder_input_ids", "decoder_attention_mask")}
        drawn.append(output_factors(model, [one], names, first_row=row))
    for layer in names:
        slow = sum(one[layer].double() for one in drawn)
        error = (found[layer].double() - slow).norm() / slow.norm()
        assert error < 1e-5, layer


def test_padding_and_the_template_of_a_prompt_are_left_out_of_output_factors():
    model, _ = make("gpt2")
    batch = rows("gpt2")["task0"]
    real = batch["attention_mask"].bool()
    counted = real & (torch.arange(7) >= 2)  # the first two tokens are a template, which has no labels
    batch["labels"] = torch.where(counted, batch["input_ids"], MASKED)
    _, drawn = sampled_loss(model, batch, 0, 0)
    assert torch.equal(drawn != MASKED, counted)
    del batch["labels"]
    _, drawn = sampled_loss(model, batch, 0, 0)
    assert torch.equal(drawn != MASKED, real)


def test_alpha_0_is_regmean_on_the_inputs_of_the_model_calibrated_so_far():
    merged, teachers = make("llama")
    data = rows("llama", count=40)
    settings = Settings(alpha=0.0, ridge=0.0, scaled=False)
    found, report = calibrated(merged, teachers, {task: [batch] for task, batch in data.items()}, settings)
    assert not report.ridges
    layer = "model.layers.0.self_attn.q_proj"  # its inputs are those of the merge: nothing before it is calibrated
    grams = {task: inputs_of(copy.deepcopy(merged).double(), layer, batch)[0] for task, batch in data.items()}
    grams = {task: x.T @ x for task, x in grams.items()}
    weights = {task: one.get_submodule(layer).weight.double() for task, one in teachers.items()}
    wanted = sum(weights[task] @ gram for task, gram in grams.items()) @ torch.linalg.inv(sum(grams.values()))
    torch.testing.assert_close(found.get_submodule(layer).weight.double(), wanted, rtol=1e-3, atol=1e-4)


def test_a_singular_system_gets_a_larger_ridge_which_is_reported():
    row = torch.ones(1, 1, 4).double()
    given = [InputProducts(row.mT @ row, row.mT @ row)]
    terms = [(given[0], [torch.ones(1, 2, 4).double()])]
    solution = solve(terms, [torch.zeros(1, 2, 4).double()], Settings(ridge=0.0), [None])
    assert solution.ridge > 0 and bool(solution.matrices[0].isfinite().all())


def test_activations_that_are_not_finite_are_refused_with_block_and_layer():
    merged, teachers = make("bert")
    with torch.no_grad():
        merged.bert.encoder.layer[1].attention.output.LayerNorm.weight[3] = torch.inf
    with pytest.raises(InputError) as raised:
        calibrated(merged, teachers, {task: [batch] for task, batch in rows("bert").items()})
    assert "bert.encoder.layer.1" in str(raised.value)


def test_a_module_is_calibrated_with_all_rows_and_comes_back_as_a_copy():
    merged, teachers = make("gpt2", scale=0.5)
    before = copy.deepcopy(merged.state_dict())
    data = {task: split(batch, 8) for task, batch in rows("gpt2", count=40).items()}
    done = gm.calibrate(merged, data, teachers=teachers, curvature="none", progress=False)
    assert done.improved and done.distances[done.chosen].total < done.distances[MERGE].total
    direct, _ = calibrated(merged, teachers, data)
    for name, value in direct.state_dict().items():
        torch.testing.assert_close(done.model.state_dict()[name], value)
        torch.testing.assert_close(merged.state_dict()[name], before[name], rtol=0, atol=0)
    again = gm.calibrate(merged, data, teachers=teachers, curvature="none", progress=False)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), done.model.parameters(), strict=True))


def test_rows_run_once_through_each_layer_of_the_teachers_and_of_every_candidate(monkeypatch):
    calls, forward = [], nn.Linear.forward

    def counted(layer, values):
        calls.append(layer.out_features)
        return forward(layer, values)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    merged, teachers = make("llama", scale=0.5)
    data = {task: split(batch, 10) for task, batch in rows("llama", count=40).items()}
    gm.calibrate(merged, data, teachers=teachers, curvature="none", progress=False)
    parts = [hold_out(task, batches) for task, batches in data.items()]
    fit, held_out = sum(len(one.fit) for one in parts), sum(len(one.held_out) for one in parts)
    # Gate and up in two blocks: in the teacher, in the merge on held-out rows, and in what is solved with nine tenths
    # of the rows and with all. Two rows run through the whole model, and block by block.
    assert calls.count(24) == 2 * 2 * (3 * fit + 4 * held_out + 2)


def test_auto_compares_three_candidates_and_takes_the_closest():
    merged, teachers = make("gpt2", scale=0.5)
    data = {task: split(batch, 8) for task, batch in rows("gpt2", count=40).items()}
    done = gm.calibrate(merged, data, teachers=teachers, progress=False)
    assert len(done.distances) == 4
    assert done.chosen == min(done.distances, key=lambda name: done.distances[name].total)


def test_the_merge_comes_back_if_nothing_is_closer():
    merged, teachers = make("bert")
    data = {task: split(batch, 6) for task, batch in rows("bert", count=4).items()}
    # A ridge this small fits three rows exactly, and nothing else.
    done = gm.calibrate(merged, data, teachers=teachers, curvature="none", ridge=1e-9, progress=False)
    assert not done.improved and done.chosen == MERGE and done.notes
    assert all(torch.equal(a, b) for a, b in zip(done.model.parameters(), merged.parameters(), strict=True))


def test_tasks_with_different_heads_keep_them():
    merged, teachers = make("bert", scale=0.5)
    teachers["task1"].classifier = nn.Linear(16, 5)
    teachers["task1"].config.num_labels = 5
    data = {task: split(batch, 8) for task, batch in rows("bert", count=40).items()}
    done = gm.calibrate(merged, data, teachers=teachers, progress=False, check=False, curvature="merge")
    torch.testing.assert_close(done.model.classifier.weight, merged.classifier.weight, rtol=0, atol=0)
    assert done.layers == 12 + 1  # two blocks of six layers, and the pooler


def test_wrong_requests_are_refused():
    merged, teachers = make("bert")
    data = {task: [batch] for task, batch in rows("bert").items()}

    requests = [
        ({"teachers": {"task0": teachers["task0"]}}, "task1"),
        ({"data": {"task0": [], "task1": data["task1"]}}, "task0"),
        ({"curvature": "diagonal"}, "curvature"),
        ({"alpha": 1.5}, "alpha"),
        ({"ridge": -1.0}, "ridge"),
        ({"check": False}, "check"),
        ({"data": {task: split(batch, 1)[:1] for task, (batch,) in data.items()}}, "task0"),
        ({"teachers": teachers | {"task0": make("mpnet")[0]}}, "task0"),
    ]
    for changes, field in requests:
        given = {"data": data, "teachers": teachers, "progress": False} | changes
        with pytest.raises(InputError, match=field):
            gm.calibrate(merged, given.pop("data"), **given)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_without_tokens_keep_the_weights_of_the_merge(name):
    merged, teachers = make(name)
    for model in (merged, *teachers.values()):
        for path, module in model.named_modules():
            if path.endswith(("layers.0.mlp.gate", "layers.0.mlp.router")):
                module.forward = _never_expert_1(module.forward)
    data = {task: [batch] for task, batch in rows(name).items()}
    found, report = calibrated(merged, teachers, data, Settings(ridge=0.0))
    assert report.idle_experts == {"model.layers.0.mlp.experts": {1}}
    before, after = (model.get_submodule("model.layers.0.mlp.experts") for model in (merged, found))
    for one, other in zip(before.parameters(), after.parameters(), strict=True):
        assert torch.equal(one[1], other[1]) and not torch.equal(one[0], other[0])
    assert not found.state_dict()["model.layers.0.mlp.experts.down_proj"].isnan().any()


def _never_expert_1(forward):
    def run(*args, **kwargs):
        logits, scores, experts = forward(*args, **kwargs)
        return logits, scores, torch.where(experts == 1, 3, experts)

    return run


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_are_solved_in_parts_are_the_same(name, monkeypatch):
    merged, teachers = make(name)
    data = {task: [batch] for task, batch in rows(name).items()}
    at_once, _ = calibrated(merged, teachers, data)
    monkeypatch.setattr(layers, "EXPERT_BYTES", 3 * 16 * 16**2)
    in_parts, report = calibrated(merged, teachers, data)
    assert "model.layers.1.mlp.experts.gate_up_proj[3:4]" in report.layers
    for one, other in zip(at_once.parameters(), in_parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
