"""What a language model makes of text, and what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.training import half_precision
from .settings import PREFIX

#: Tokens in one batch, at most.
BATCH_TOKENS = 1 << 14


def windows(ids: Tensor, context: int) -> list[tuple[int, int, int]]:
    """(start, end, first that counts) of windows over a text: every token after the first counts once.

    Windows of ``context`` tokens start half of that apart, so that all tokens but the first half have at least half of
    it before them.
    """
    if len(ids) <= context:
        return [(0, len(ids), 1)]
    stride = max(1, context // 2)
    found, done = [], 1
    for start in range(0, len(ids), stride):
        end = min(start + context, len(ids))
        found.append((start, end, done - start))
        done = end
        if end == len(ids):
            break
    return found


def batches(ids: Tensor, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens of windows, and which of them count."""
    cuts = windows(ids, context)
    size = max(1, BATCH_TOKENS // context)
    longest = min(context, len(ids))
    for first in range(0, len(cuts), size):
        part = cuts[first : first + size]
        tokens = torch.stack([F.pad(ids[start:end], (0, longest - (end - start))) for start, end, _ in part])
        places = torch.arange(longest)
        counts = torch.stack([(places >= begin) & (places < end - start) for start, end, begin in part])
        yield tokens, counts


def log_probabilities(model: Any, tokens: Tensor) -> Tensor:
    """Of every next token; those of position t are for token t + 1. Padding is on the right, where no token sees it."""
    with half_precision(model.device):
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
    return F.log_softmax(logits[:, :-1].float(), -1)


@torch.inference_mode()
def loss_on(model: Any, ids: Tensor, context: int) -> float:
    """The mean negative log-likelihood of the tokens of a text, in nats per token."""
    total, number = torch.zeros((), dtype=torch.float64, device=model.device), 0
    for tokens, counts in batches(ids, context):
        tokens, counts = tokens.to(model.device), counts[:, 1:].to(model.device)
        nats = -log_probabilities(model, tokens).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        total += nats[counts].double().sum()
        number += int(counts.sum())
    return float(total) / number


@torch.inference_mode()
def divergence(target: Any, model: Any, ids: Tensor, context: int) -> float:
    """The mean of KL(target ‖ model) of the next token over a text, in nats per token."""
    total, number = torch.zeros((), dtype=torch.float64, device=model.device), 0
    for tokens, counts in batches(ids, context):
        tokens, counts = tokens.to(model.device), counts[:, 1:].to(model.device)
        wanted, found = log_probabilities(target, tokens), log_probabilities(model, tokens)
        each = (wanted.exp() * (wanted - found)).sum(-1)
        total += each[counts].double().sum()
        number += int(counts.sum())
    return float(total) / number


@torch.inference_mode()
def continuations(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, new_tokens: int, top_p: float, batch: int, seed: int
) -> list[str]:
    """What the model writes after the prefix and each prompt; drawn with the same random numbers for every model."""
    tokenizer.padding_side = "left"
    texts: list[str] = []
    torch.manual_seed(seed)
    for first in range(0, len(prompts), batch):
        part = [f"{PREFIX} {prompt}" for prompt in prompts[first : first + batch]]
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        inputs = tokenizer(part, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
        room = model.config.max_position_embeddings - new_tokens
        inputs = {name: value[:, -room:] for name, value in inputs.items()}
        with half_precision(model.device):
            written = model.generate(
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_p=top_p,
                top_k=0,
                max_new_tokens=new_tokens,
                pad_token_id=tokenizer.pad_token_id,
                remove_invalid_values=True,
            )
        texts += tokenizer.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def distinct(texts: Sequence[str]) -> float:
    """The share of pairs of neighbouring words that are not repeats of one seen before; degenerate text has few."""
    pairs = [pair for text in texts for words in [text.split()] for pair in pairwise(words)]
    return len(set(pairs)) / len(pairs) if pairs else 0.0
