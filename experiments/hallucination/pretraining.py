"""A small model that can copy: text infilling over plain text, in the form of turns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from ..common.data import Collate
from ..common.pretraining import make_model, make_tokenizer, paragraphs
from ..common.training import fine_tune
from .data import KNOWLEDGE, TAGS, USER, Turn
from .settings import Pretraining

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'A-Z0-9])")
_WORDS = range(5, 41)


def pretrain(
    folder: Path, data: Path, turns: Sequence[Turn], settings: Pretraining, *, seed: int, device: str
) -> dict[str, Any]:
    """Write a tokenizer and a model to ``folder``/model; what it took.

    ``turns`` lend the tokenizer their words. The model never sees them.
    """
    chance = Random(seed)
    pairs: list[tuple[str, str]] = []
    for name in settings.texts:
        found = list(_pairs(paragraphs(data / name)))
        chance.shuffle(found)
        pairs += found[: settings.pairs // len(settings.texts)]
    spoken = [text for turn in turns for text in (turn.knowledge, turn.response)]
    some = [after for _, after in pairs[:: max(1, len(pairs) // 60_000)]]
    tokenizer = make_tokenizer(some + spoken, settings.shape, TAGS)
    torch.manual_seed(seed)
    model = make_model(settings.shape, tokenizer)
    copying: dict[str, Any] = {}
    if settings.copying is not None:
        rows = _copies(settings.copies, tokenizer, chance)
        copying = fine_tune(
            model, rows, Collate(tokenizer.pad_token_id), folder / "copying", settings.copying, seed=seed, device=device
        )
    rows = _rows(pairs, tokenizer, settings, chance)
    took = fine_tune(model, rows, Collate(tokenizer.pad_token_id), folder, settings.training, seed=seed, device=device)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {**took, "copying": copying, "parameters": model.num_parameters(), "tokens": len(tokenizer)}


def _pairs(paragraphs: Iterator[str]) -> Iterator[tuple[str, str]]:
    """A sentence, and the one after it."""
    for paragraph in paragraphs:
        sentences = [s for s in _SENTENCE_END.split(paragraph) if len(s.split()) in _WORDS]
        yield from pairwise(sentences)


def _copies(count: int, tokenizer: PreTrainedTokenizerFast, chance: Random) -> list[dict[str, list[int]]]:
    """In the form of turns: <knowledge> random tokens <user> others </s> → the first of them </s>."""
    tag, user = (tokenizer.convert_tokens_to_ids(name) for name in (KNOWLEDGE, USER))
    end, ordinary = tokenizer.eos_token_id, range(len(tokenizer.all_special_tokens) + len(TAGS), len(tokenizer))
    rows = []
    for _ in range(count):
        copied = chance.choices(ordinary, k=chance.randint(4, 12))
        others = chance.choices(ordinary, k=chance.randint(0, 8))
        rows.append({"input_ids": [tag, *copied, user, *others, end], "labels": [*copied, end]})
    return rows


def _rows(
    pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, settings: Pretraining, chance: Random
) -> list[dict[str, list[int]]]:
    """In the form of turns: <knowledge> sentence with holes <user> sentence before it </s> → sentence </s>."""
    tag, user = (tokenizer.convert_tokens_to_ids(name) for name in (KNOWLEDGE, USER))
    end, mask = tokenizer.eos_token_id, tokenizer.mask_token_id
    befores, afters = ([pair[i] for pair in pairs] for i in (0, 1))
    rows = []
    for before, after in zip(
        tokenizer(befores, add_special_tokens=False)["input_ids"],
        tokenizer(afters, add_special_tokens=False)["input_ids"],
        strict=True,
    ):
        before, after = before[: settings.tokens], after[: settings.tokens]
        left = infill(after, mask, settings.masked, settings.span, chance)
        rows.append({"input_ids": [tag, *left, user, *before, end], "labels": [*after, end]})
    return rows


def infill(tokens: Sequence[int], mask: int, share: float, span: float, chance: Random) -> list[int]:
    """Tokens with about a share of them taken out, in spans of 1 to 2·span − 1 of which each leaves one mask."""
    budget = round(share * len(tokens))
    lengths: list[int] = []
    while sum(lengths) < budget:
        lengths.append(min(chance.randint(1, round(2 * span) - 1), budget - sum(lengths)))
    gaps = [0, *sorted(chance.randint(0, len(tokens) - budget) for _ in lengths)]
    left: list[int] = []
    place = 0
    for length, (before, after) in zip(lengths, pairwise(gaps), strict=True):
        left += [*tokens[place : place + after - before], mask]
        place += after - before + length
    return left + list(tokens[place:])
