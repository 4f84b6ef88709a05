"""Distillation: its loss against plain computations, and what is kept of a training."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

import gradmerge as gm
from gradmerge import InputError
from gradmerge.refinement.distill import batch_losses, distill_model, teacher_outputs
from gradmerge.refinement.rows import hold_out, join_batches

from .calibration_families import make, rows, split


def last_hidden(model, row):
    """The representation of one row without padding, in float64."""
    row = {k: v[:, : int(row["attention_mask"].sum())] if "attention_mask" in row else v for k, v in row.items()}
    encoder = model.base_model
    with torch.no_grad():
        return encoder(**row).last_hidden_state[0], model(**row).logits[0]


def distance(model, teacher, batch, match):
    rows = len(next(iter(batch.values())))
    return batch_losses(model, batch, [rows], [teacher_outputs(teacher, batch, match)], match)[0]


def single_rows(batch):
    return [{k: v[n : n + 1] for k, v in batch.items()} for n in range(len(next(iter(batch.values()))))]


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_the_loss_is_that_of_single_rows_without_padding(name):
    merged, teachers = make(name)
    merged, teacher = merged.double(), teachers["task0"].double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in rows(name)["task0"].items()}
    apart = size = divergence = count = 0.0
    for row in single_rows(batch):
        (h, z), (h_t, z_t) = last_hidden(merged, row), last_hidden(teacher, row)
        apart, size = apart + float((h - h_t).square().sum()), size + float(h_t.square().sum())
        p, q = z_t.float().log_softmax(-1), z.float().log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum())
        count += len(z) if z.dim() > 1 else 1
    with torch.no_grad():
        assert float(distance(merged, teacher, batch, "representations")) == pytest.approx(apart / size, rel=1e-4)
        assert float(distance(merged, teacher, batch, "answers")) == pytest.approx(divergence / count, rel=1e-3)
        both = float(distance(merged, teacher, batch, "both"))
    assert both == pytest.approx(apart / size + divergence / count, rel=1e-3)


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_a_joined_pass_gives_the_losses_of_separate_passes(name):
    merged, teachers = make(name)
    merged = merged.double()
    batches = {}
    for number, (task, batch) in enumerate(rows(name).items()):  # texts of other lengths, and other numbers of rows
        length = 7 - 2 * number
        batches[task] = {k: (v.double() if v.is_floating_point() else v[:, :length])[number:] for k, v in batch.items()}
    teachers = {task: teacher.double() for task, teacher in teachers.items()}
    targets = [teacher_outputs(teachers[task], batch, "both") for task, batch in batches.items()]
    sizes = [len(next(iter(batch.values()))) for batch in batches.values()]
    [(numbers, joined)] = join_batches(list(batches.values()), 10**6, pad_token=2)
    assert numbers == [0, 1]
    together = batch_losses(merged, joined, sizes, targets, "both")
    apart = [distance(merged, teachers[task], batch, "both") for task, batch in batches.items()]
    torch.testing.assert_close(torch.stack(together), torch.stack(apart), rtol=1e-5, atol=0)
    parts = teacher_outputs(teachers["task0"], joined, "both").split(sizes)
    torch.testing.assert_close(parts[0].representation, targets[0].representation)
    torch.testing.assert_close(parts[0].logits, targets[0].logits)


def test_answers_of_a_language_model_are_matched_where_labels_count():
    merged, teachers = make("gpt2")
    batch = rows("gpt2")["task0"]
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :3] = -100  # the prompt
    found = float(distance(merged, teachers["task0"], batch | {"labels": labels}, "answers").detach())
    values = []
    with torch.no_grad():
        for row, marks in zip(single_rows(batch), labels, strict=True):
            p, q = (m(**row).logits[0].double().log_softmax(-1) for m in (teachers["task0"], merged))
            apart = (p.exp() * (p - q)).sum(-1)
            counts = [k for k in range(6) if marks[k + 1] != -100]
            length = int(row["attention_mask"].sum())
            values += [apart[k] for k in (counts or range(length))]  # a row without a completion counts whole
    assert found == pytest.approx(float(torch.stack(values).mean()), rel=1e-3)


@pytest.mark.parametrize(("name", "match"), [("gpt2", "answers"), ("vit", "representations"), ("bert", "both")])
def test_a_module_comes_back_closer_to_the_fine_tuned_models_on_held_out_rows(name, match):
    merged, teachers = make(name, scale=0.5)
    before = copy.deepcopy(merged)
    merged.requires_grad_(True)
    data = {task: split(batch, 8) for task, batch in rows(name, count=40).items()}
    options = {"teachers": teachers, "match": match, "steps": 30, "lr": 3e-3, "progress": False}
    done = gm.distill(merged, data, **options)
    assert done.improved and done.distillation.match == match
    first, best = (done.distillation.losses_at(step) for step in (0, done.distillation.best_step))
    assert sum(best.values()) < 0.9 * sum(first.values())
    with torch.no_grad():  # what is kept is what was measured
        for task in data:
            held = hold_out(task, data[task]).held_out
            losses = [float(distance(done.model, teachers[task], one, match)) for one in held]
            sizes = [len(next(iter(one.values()))) for one in held]
            mean = sum(a * b for a, b in zip(losses, sizes, strict=True)) / sum(sizes)
            assert mean == pytest.approx(best[task], rel=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(merged.parameters(), before.parameters(), strict=True))
    again = gm.distill(merged, data, **options)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), done.model.parameters(), strict=True))


def test_training_starts_again_if_the_default_learning_rate_is_too_high(monkeypatch):
    monkeypatch.setattr("gradmerge.refinement.distill.default_rate", lambda model: 0.05)
    merged, teachers = make("vit", scale=0.5)
    merged.requires_grad_(True)
    data = {task: split(batch, 8) for task, batch in rows("vit", count=40).items()}
    options = {"teachers": teachers, "match": "representations", "steps": 30, "progress": False}
    done = gm.distill(merged, data, **options)
    assert done.improved and done.distillation.lr in (0.05 / 4, 0.05 / 16)
    again = gm.distill(merged, data, **options, lr=done.distillation.lr)  # the same as with that rate from the start
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), done.model.parameters(), strict=True))
    high = gm.distill(merged, data, **options, lr=0.05)
    assert min(high.distillation.mean_losses) > min(done.distillation.mean_losses)


def test_the_model_comes_back_if_no_step_is_better():
    merged, teachers = make("vit")
    merged.requires_grad_(True)
    data = {task: [batch] for task, batch in rows("vit").items()}
    done = gm.distill(merged, data, teachers=teachers, steps=3, lr=10.0, progress=False)
    assert not done.improved
    assert all(torch.equal(a, b) for a, b in zip(done.model.parameters(), merged.parameters(), strict=True))


def test_outputs_of_the_teachers_that_do_not_fit_into_memory_are_computed_anew_with_the_same_result():
    merged, teachers = make("gpt2", scale=0.5)
    data = {task: hold_out(task, split(batch, 8)) for task, batch in rows("gpt2", count=40).items()}
    models, loaded = [], []

    def load(task):
        loaded.append(task)
        return teachers[task]

    for memory in (0, 2**40):
        model = copy.deepcopy(merged).requires_grad_(True)
        loaders = {task: partial(load, task) for task in teachers}
        distill_model(model, loaders, data, match="both", steps=5, lr=1e-3, memory=memory)
        models.append(model)
    assert loaded == [*teachers, *teachers]
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    assert not torch.equal(models[0].transformer.wte.weight, merged.transformer.wte.weight)


def test_frozen_parameters_stay_as_they_are():
    merged, teachers = make("bert", scale=0.5)
    merged.bert.pooler.requires_grad_(True)
    merged.bert.encoder.layer[1].requires_grad_(True)
    data = {task: [batch] for task, batch in rows("bert", count=40).items()}
    done = gm.distill(merged, data, teachers=teachers, match="representations", steps=20, lr=3e-3, progress=False)
    assert done.improved
    changed = {
        name
        for (name, one), other in zip(done.model.named_parameters(), merged.parameters(), strict=True)
        if not torch.equal(one, other)
    }
    assert changed and all(name.startswith("bert.encoder.layer.1.") for name in changed)


def test_wrong_requests_are_refused():
    merged, teachers = make("bert")
    merged.requires_grad_(True)
    data = {task: [batch] for task, batch in rows("bert").items()}

    other = copy.deepcopy(teachers["task1"])
    other.classifier = nn.Linear(16, 5)
    requests = [
        ({"match": "labels"}, "match"),
        ({"steps": 0}, "steps"),
        ({"lr": -1.0}, "lr"),
        ({"teachers": {"task0": teachers["task0"]}}, "task1"),
        ({"teachers": teachers | {"task1": other}, "match": "answers"}, "match"),
    ]
    for changes, field in requests:
        with pytest.raises(InputError, match=field):
            gm.distill(merged, data, **{"teachers": teachers, "progress": False} | changes)
    with pytest.raises(InputError):
        gm.distill(copy.deepcopy(merged).requires_grad_(False), data, teachers=teachers, progress=False)
