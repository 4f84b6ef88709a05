"""Calibration of a merge in its simplest form: linear layers, G_t = I, and all models in memory.

`gm.calibrate(…, curvature="none", check=False)` computes the same, block by block. A test compares the two.
"""

import copy
from functools import partial

import torch
from torch import nn


def record_inputs(model, names, batches):
    """Run a model, and return layer → its inputs as a matrix with one row per token, without padding."""
    found = {name: [] for name in names}
    mask = None

    def keep(name):
        def hook(layer, args):
            x = args[0].double()
            x = x[mask.bool()] if x.dim() == 3 else x
            one = x.new_ones(len(x), 1)
            found[name].append(torch.cat([x, one], 1) if layer.bias is not None else x)

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in names]
    with torch.no_grad():
        for batch in batches:
            mask = batch["attention_mask"]
            model(**batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(rows) for name, rows in found.items()}


def group_by_input(model, batch):
    """Return the linear layers in forward order. Layers that read the same tensor (q, k, v) form a group."""
    calls, handles = [], []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            handles.append(
                layer.register_forward_pre_hook(partial(lambda name, _, args: calls.append((name, args[0])), name))
            )
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    groups = []
    for name, x in calls:
        if groups and groups[-1][0][1] is x:
            groups[-1].append((name, x))
        else:
            groups.append([(name, x)])
    return [[name for name, _ in group] for group in groups]


def get_matrix(layer):
    """Return [W b], in float64."""
    weight = layer.weight.detach().double()
    return weight if layer.bias is None else torch.cat([weight, layer.bias.detach().double()[:, None]], 1)


def set_matrix(layer, matrix):
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias.copy_(matrix[:, -1])
            matrix = matrix[:, :-1]
        layer.weight.copy_(matrix)


def calibrate(merged, teachers, rows, alpha=0.25, ridge=0.3):
    """Return a calibrated copy of `merged`. `teachers` and `rows` map each task to a model and to batches."""
    model = copy.deepcopy(merged).eval()
    for names in group_by_input(model, next(iter(rows.values()))[0]):
        total, mixed = 0.0, dict.fromkeys(names, 0.0)
        for task, teacher in teachers.items():
            # The inputs of the layer: in the model calibrated so far, and in the fine-tuned model.
            x_hat = record_inputs(model, names[:1], rows[task])[names[0]]
            x = record_inputs(teacher.eval(), names[:1], rows[task])[names[0]]
            target = alpha * x + (1 - alpha) * x_hat
            scale = (x_hat.T @ x_hat).norm()
            total = total + x_hat.T @ x_hat / scale  # Σ A_t
            for name in names:
                w_t = get_matrix(teacher.get_submodule(name))
                mixed[name] = mixed[name] + w_t @ (target.T @ x_hat / scale)  # Σ W_t C_t
        damping = ridge * total.diagonal().mean()  # λ m
        system = total + damping * torch.eye(len(total), dtype=torch.float64)
        for name in names:
            layer = model.get_submodule(name)
            right = mixed[name] + damping * get_matrix(layer)
            set_matrix(layer, torch.linalg.solve(system, right.T).T)
    return model
