"""The models of the experiment: the base, the one that never saw what is removed, and the one tuned on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import gradmerge as gm

from ..common.data import IGNORED, Collate, evenly
from ..common.states import mean_entry, read_state
from ..common.training import Training, fine_tune
from .data import Data
from .settings import Settings, Shape

State = dict[str, Tensor]


def pretrain(
    folder: Path, data: Data, settings: Settings, seed: int, device: str, *, without: str | None = None
) -> Any:
    """Train the small model from nothing on every kind of text, but without the one named.

    Blocks of that kind stay where they are and none of their tokens counts: the two trainings see the same batches in
    the same order from the same initial weights, and differ in nothing but the removed text.
    """
    shape = settings.pretraining
    assert shape is not None
    model = blank(shape, settings.context, data.tokenizer.eos_token_id, seed)
    rows = []
    for kind in data.kinds:
        for ids in data.examples(kind):
            rows.append({"input_ids": ids, "labels": torch.full_like(ids, IGNORED) if kind == without else ids})
    found = fine_tune(
        model.to(device), rows, Collate(data.tokenizer.eos_token_id), folder, shape.training, seed=seed, device=device
    )
    model.save_pretrained(folder / "model")
    return found


def blank(shape: Shape, context: int, end: int, seed: int) -> GPT2LMHeadModel:
    """A GPT-2 with random weights and without dropout, which has no place in a single short training."""
    torch.manual_seed(seed)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=context,
        n_layer=shape.layers,
        n_embd=shape.width,
        n_head=shape.heads,
        **ends,
        **no_dropout,
    )
    return GPT2LMHeadModel(config)


def keep_base(folder: Path, name: str) -> dict[str, int]:
    """A model of the Hub or a folder, written in float32; every later model has the same names of tensors."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    return {"parameters": model.num_parameters()}


def tune(
    folder: Path, base: Path, data: Data, training: Training, seed: int, device: str, prior: gm.Curvature | None
) -> Any:
    """Fine-tune the base on the toxic comments.

    With a penalty, ``prior`` is its matrix H_0 for the sum of the comments' losses. The trainer's loss is a mean over
    tokens, so the penalty's strength is divided by their number.
    """
    model = load(base, device)
    model.train()
    rows = [{"input_ids": ids, "labels": ids} for ids in data.examples("toxic")]
    strength = training.strength / sum(len(row["labels"]) - 1 for row in rows)
    found = fine_tune(
        model,
        rows,
        Collate(data.tokenizer.eos_token_id),
        folder,
        replace(training, strength=strength),
        seed=seed,
        device=device,
        prior=prior.sum() if prior is not None else "identity",
    )
    model.save_pretrained(folder / "model")
    return found


def load(folder: Path, device: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).to(device).eval()


def state(folder: Path) -> State:
    return read_state(folder / "model")


def measure(
    folder: Path, model: Path, data: Data, kinds: Sequence[str], settings: Settings, device: str, limit: int | None
) -> dict[str, Any]:
    """Write Σ of squared gradients over examples of some kinds of text, at most ``limit`` of them."""
    examples = [ids for kind in kinds for ids in data.examples(kind)]
    rows = [{"input_ids": ids, "labels": ids} for ids in evenly(examples, limit)]
    collate = Collate(data.tokenizer.eos_token_id)
    size = settings.curvature_batch
    batches = (collate(rows[start : start + size]) for start in range(0, len(rows), size))
    curvature = gm.estimate_curvature(load(model, device), batches, "empirical", output="next-token")
    factor = len(examples) / len(rows) if settings.scale_curvature else 1.0
    scaled = curvature.scale(factor)
    scaled.save(folder / "curvature")
    return {
        "examples": len(rows),
        "of": len(examples),
        "scaled_by": factor,
        "mean_entry": mean_entry(scaled),
        "zeros": mean_entry({name: value == 0 for name, value in scaled.items()}),
    }
