"""Calibration once more, slowly: whole models in float64, one forward pass per layer and row, dense solves."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn


def linear_layers(model, batch):
    """Groups of layers that read the same tensor, in forward order; layers that run twice or are tied are left out."""
    calls, handles = [], []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) or type(module).__name__ == "Conv1D":
            hook = lambda m, args, name=name: calls.append((name, args[0], m.bias is not None))  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
    with torch.no_grad():
        run(model, batch)
    for handle in handles:
        handle.remove()
    names = [name for name, _, _ in calls]
    owners = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    groups = []
    for name, values, bias in calls:
        layer = model.get_submodule(name)
        if names.count(name) > 1 or owners.count(id(layer.weight)) > 1:
            continue
        found = [g for g in groups if g[0][1] is values and g[0][2] == bias]
        if found and not isinstance(layer, nn.Conv2d):
            found[0].append((name, values, bias))
        else:
            groups.append([(name, values, bias)])
    return [[name for name, _, _ in group] for group in groups]


def run(model, batch):
    extra = {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}
    return model(**batch, **extra)


def inputs_of(model, name, batch):
    """The input of a layer, one row of the batch at a time, as (groups, positions, inputs) with a 1 for the bias."""
    layer, found = model.get_submodule(name), []
    handle = layer.register_forward_pre_hook(lambda m, args: found.append(args[0]))
    for row in range(len(next(iter(batch.values())))):
        one = {key: value[row : row + 1] for key, value in batch.items()}
        found_before = len(found)
        with torch.no_grad():
            run(model, one)
        values = found[found_before]
        if isinstance(layer, nn.Conv2d):
            groups, kernel, padding, stride = layer.groups, layer.kernel_size, layer.padding, layer.stride
            parts = values.chunk(groups, 1)
            rows = torch.stack([F.unfold(p, kernel, padding=padding, stride=stride)[0].T for p in parts])
        elif values.dim() == 3:
            rows = values[0]
            decoder = "decoder" in name and not any(part in name for part in ("EncDecAttention.k", "EncDecAttention.v"))
            mask = one.get(
                "decoder_attention_mask" if decoder and "decoder_attention_mask" in one else "attention_mask"
            )
            rows = (rows if mask is None or mask.shape[1] != len(rows) else rows[mask[0].bool()])[None]
        else:
            rows = values.reshape(1, -1, values.shape[-1])
        if layer.bias is not None:
            rows = torch.cat([rows, torch.ones(*rows.shape[:2], 1, dtype=rows.dtype)], -1)
        found[found_before] = rows
    handle.remove()
    return torch.cat(found, 1)


def matrix(layer):
    weight = layer.weight.detach().T if type(layer).__name__ == "Conv1D" else layer.weight.detach()
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    flat = weight.reshape(groups, weight.shape[0] // groups, -1)
    return flat if layer.bias is None else torch.cat([flat, layer.bias.detach().reshape(groups, -1, 1)], -1)


def put_matrix(layer, value):
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias.copy_(value[..., -1].reshape(-1))
            value = value[..., :-1]
        if type(layer).__name__ == "Conv1D":
            layer.weight.copy_(value[0].T)
        else:
            layer.weight.copy_(value.reshape(layer.weight.shape))


def solve(a, c, weights, anchor, ridge, factors, epsilon):
    """The equation for one layer without groups, as one dense system over vec(W)."""
    outputs, inputs = anchor.shape
    eye_o, eye_i = torch.eye(outputs).double(), torch.eye(inputs).double()
    mean = sum(a).diagonal().mean()
    system = ridge * mean * torch.kron(eye_o, eye_i)
    right = ridge * mean * anchor
    for a_t, c_t, w_t, g_t in zip(a, c, weights, factors, strict=True):
        g_t = g_t + epsilon * eye_o
        system = system + torch.kron(g_t, a_t.T.contiguous())
        right = right + g_t @ w_t @ c_t
    return torch.linalg.solve(system, right.reshape(-1)).reshape(outputs, inputs)


def calibrate_slowly(merged, teachers, rows, alpha=0.25, ridge=0.3, factors=None, epsilon=0.0, scaled=True, skip=()):
    """A calibrated copy of a model. ``factors``: task → layer → G."""
    result = copy.deepcopy(merged).double().eval()
    teachers = {task: copy.deepcopy(model).double().eval() for task, model in teachers.items()}
    rows = {t: {k: v.double() if v.is_floating_point() else v for k, v in b.items()} for t, b in rows.items()}
    for group in linear_layers(result, next(iter(rows.values()))):
        solved = {}
        for name in group:
            layer = result.get_submodule(name)
            if name in skip:
                continue
            a, c, weights, gs = [], [], [], []
            for task, teacher in teachers.items():
                x, x_t = inputs_of(result, name, rows[task]), inputs_of(teacher, name, rows[task])
                mixed = alpha * x_t + (1 - alpha) * x
                a_t, c_t = x.mT @ x, mixed.mT @ x
                scale = a_t.flatten(1).norm(dim=1)[:, None, None] if scaled else 1.0
                a.append(a_t / scale)
                c.append(c_t / scale)
                weights.append(matrix(teacher.get_submodule(name)))
                eye = torch.eye(weights[-1].shape[1]).double().expand(len(x), -1, -1)
                gs.append(eye if factors is None or name not in factors[task] else factors[task][name].double())
            used = epsilon if factors is not None and name in next(iter(factors.values())) else 0.0
            anchor = matrix(layer)
            solved[name] = torch.stack(
                [
                    solve(
                        [m[g] for m in a],
                        [m[g] for m in c],
                        [m[g] for m in weights],
                        anchor[g],
                        ridge,
                        [m[g] for m in gs],
                        used,
                    )
                    for g in range(len(anchor))
                ]
            )
        for name, value in solved.items():
            put_matrix(result.get_submodule(name), value)
    return result
