"""Calibration once more, slowly: whole models in float64, one forward pass per layer and row, dense solves."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn


def linear_layers(model, batch):
    """Groups of layers that read the same tensor, in forward order; layers that run twice or are tied are left out.

    The two projections of experts are groups of their own.
    """
    calls, handles = [], []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) or type(module).__name__ == "Conv1D":
            hook = lambda m, args, name=name: calls.append((name, args[0], m.bias is not None))  # noqa: E731
            handles.append(module.register_forward_pre_hook(hook))
        if type(module).__name__.endswith("Experts"):
            hook = lambda m, args, name=name: calls.extend(  # noqa: E731
                (f"{name}.{part}", None, part) for part in ("gate_up_proj", "down_proj")
            )
            handles.append(module.register_forward_pre_hook(hook))
    with torch.no_grad():
        run(model, batch)
    for handle in handles:
        handle.remove()
    names = [name for name, _, _ in calls]
    owners = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    groups = []
    for name, values, bias in calls:
        if values is None:
            groups.append([(name, values, bias)])
            continue
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


def expert_inputs(model, name, batch, routing=None):
    """For every expert the inputs of a projection, row by row without padding; and the routing that was used.

    ``routing``: for every row, the experts of its tokens, in place of the model's own.
    """
    path, _, part = name.rpartition(".")
    experts, used = model.get_submodule(path), []
    found = [[] for _ in range(experts.num_experts)]
    for row in range(len(batch["input_ids"])):
        length = int(batch["attention_mask"][row].sum())
        seen = []
        handle = experts.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args))
        with torch.no_grad():
            run(model, {key: value[row : row + 1, :length] for key, value in batch.items()})
        handle.remove()
        hidden, index = seen[0][:2]
        used.append(index if routing is None else routing[row])
        for token, chosen in zip(hidden, used[-1].tolist(), strict=True):
            for expert in chosen:
                x = token if part == "gate_up_proj" else between(experts, expert, token)
                found[expert].append(torch.cat([x, x.new_ones(1)]) if hasattr(experts, f"{part}_bias") else x)
    size = experts.gate_up_proj.shape[1:].numel()  # any width, for experts without tokens
    return [torch.stack(rows) if rows else torch.zeros(0, size).double() for rows in found], used


def between(experts, expert, token):
    """What the second projection of an expert reads for a token, as the papers of Mixtral and gpt-oss define it."""
    if hasattr(experts, "gate_up_proj_bias"):
        both = experts.gate_up_proj[expert].T @ token + experts.gate_up_proj_bias[expert]
        gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, up = (experts.gate_up_proj[expert] @ token).chunk(2)
    return F.silu(gate) * up


def expert_matrix(experts, part, expert):
    weight = getattr(experts, part)[expert].detach()
    if not hasattr(experts, f"{part}_bias"):
        return weight.clone()
    return torch.cat([weight.T, getattr(experts, f"{part}_bias")[expert].detach()[:, None]], 1)


def calibrate_experts(result, teachers, rows, name, alpha, ridge):
    """Solve for one projection of all experts; those without tokens stay as they are."""
    path, _, part = name.rpartition(".")
    experts, solved = result.get_submodule(path), {}
    inputs = {}
    for task, teacher in teachers.items():
        x, routing = expert_inputs(result, name, rows[task])
        inputs[task] = x, expert_inputs(teacher, name, rows[task], routing)[0]
    for expert in range(experts.num_experts):
        a, c, weights = [], [], []
        for task, teacher in teachers.items():
            x, x_t = (found[expert] for found in inputs[task])
            if len(x):
                a_t, c_t = x.T @ x, (alpha * x_t + (1 - alpha) * x).T @ x
                a.append(a_t / a_t.norm())
                c.append(c_t / a_t.norm())
                weights.append(expert_matrix(teacher.get_submodule(path), part, expert))
        if a:
            anchor = expert_matrix(experts, part, expert)
            eyes = [torch.eye(len(anchor)).double() for _ in a]
            solved[expert] = solve(a, c, weights, anchor, ridge, eyes, 0.0)
    with torch.no_grad():
        for expert, value in solved.items():
            if hasattr(experts, f"{part}_bias"):
                getattr(experts, f"{part}_bias")[expert] = value[:, -1]
                value = value[:, :-1].T
            getattr(experts, part)[expert] = value


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
    for model in (result, *teachers.values()):
        model.config._experts_implementation = "eager"  # the others are for float32 only
    rows = {t: {k: v.double() if v.is_floating_point() else v for k, v in b.items()} for t, b in rows.items()}
    for group in linear_layers(result, next(iter(rows.values()))):
        if "experts." in group[0]:
            calibrate_experts(result, teachers, rows, group[0], alpha, ridge)
            continue
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
