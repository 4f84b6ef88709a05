"""A small T5 that can copy: text infilling on plain text, in the form of turns of a dialogue."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

import gradmerge as gm

from ..common.data import Collate
from ..common.training import fine_tune
from .settings import Hallucination, Shape

USER, SYSTEM, KNOWLEDGE, MASK = "<user>", "<system>", "<knowledge>", "<mask>"
#: Share of a sentence's tokens that are masked, and the mean length of a masked span.
MASKED, SPAN = 0.2, 3
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'A-Z0-9])")
_LENGTHS = range(5, 41)

Row = dict[str, list[int]]


def pretrain(
    folder: Path, data: Path, spoken: Sequence[str], settings: Hallucination, *, seed: int, device: str
) -> dict[str, Any]:
    """Write tokenizer and model to ``folder``/model, and return what it took.

    Args:
        data: Folder of the plain text.
        spoken: Text of dialogues. Only the tokenizer is trained on it.
    """
    chance = Random(seed)
    pairs: list[tuple[str, str]] = []
    for name in settings.texts:
        found = list(_pairs(data / name))
        chance.shuffle(found)
        pairs += found[: settings.pairs // len(settings.texts)]
    tokenizer = make_tokenizer([*(after for _, after in pairs), *spoken], settings.shape)
    torch.manual_seed(seed)
    model, collate = make_model(settings.shape, tokenizer), Collate(tokenizer.pad_token_id)
    took = {}
    for name, rows, training in (
        ("copying", _copies(settings.copies, tokenizer, chance), settings.copying),
        ("infilling", _infilled(pairs, tokenizer, settings.tokens, chance), settings.infilling),
    ):
        took[name] = fine_tune(model, rows, collate, folder / name, training, seed=seed, device=device)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {**took, "parameters": model.num_parameters(), "tokens": len(tokenizer)}


def make_tokenizer(texts: Sequence[str], shape: Shape) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=["<pad>", "</s>", MASK, KNOWLEDGE, USER, SYSTEM],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", mask_token=MASK)


def make_model(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> T5ForConditionalGeneration:
    """Return a T5 v1.1 with new weights, but with tied embeddings: it learns to copy sooner."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=shape.width,
            d_kv=shape.width // shape.heads,
            d_ff=2 * shape.width,
            num_layers=shape.layers,
            num_decoder_layers=shape.layers,
            num_heads=shape.heads,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )


def _pairs(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield pairs of neighboring sentences of WikiText or of reviews."""
    path = next((p for p in (folder / "train.txt.gz", folder / "train.jsonl.gz") if p.is_file()), None)
    if path is None:
        raise gm.InputError(f"{folder}: there is neither train.txt.gz nor train.jsonl.gz to pre-train on")
    for row in gm.read_rows(str(path)).rows:
        text = row["text"].replace("<br />", " ")
        if not text.strip().startswith("="):
            sentences = [s for s in _SENTENCE_END.split(_plain(text)) if len(s.split()) in _LENGTHS]
            yield from pairwise(sentences)


def _plain(line: str) -> str:
    """Return a line of WikiText without spaces before punctuation, escaped hyphens and unknown words."""
    line = re.sub(r" @(.)@ ", r"\1", line.replace("<unk>", " "))
    line = re.sub(r"\s+", " ", line)
    line = re.sub(r" ([.,;:!?)'’])", r"\1", line)
    return re.sub(r"([(]) ", r"\1", line).strip()


def _copies(count: int, tokenizer: PreTrainedTokenizerFast, chance: Random) -> list[Row]:
    """Return <knowledge> random tokens <user> others </s> → the first of them </s>."""
    knowledge, user = (tokenizer.convert_tokens_to_ids(name) for name in (KNOWLEDGE, USER))
    end, ordinary = tokenizer.eos_token_id, range(6, len(tokenizer))
    rows = []
    for _ in range(count):
        copied = chance.choices(ordinary, k=chance.randint(4, 12))
        others = chance.choices(ordinary, k=chance.randint(0, 8))
        rows.append({"input_ids": [knowledge, *copied, user, *others, end], "labels": [*copied, end]})
    return rows


def _infilled(
    pairs: Sequence[tuple[str, str]], tokenizer: PreTrainedTokenizerFast, most: int, chance: Random
) -> list[Row]:
    """Return <knowledge> masked sentence <user> sentence before it </s> → sentence </s>."""
    knowledge, user = (tokenizer.convert_tokens_to_ids(name) for name in (KNOWLEDGE, USER))
    end, mask = tokenizer.eos_token_id, tokenizer.mask_token_id
    sides = [tokenizer([pair[i] for pair in pairs], add_special_tokens=False)["input_ids"] for i in (0, 1)]
    rows = []
    for before, after in zip(*sides, strict=True):
        before, after = before[:most], after[:most]
        masked = infill(after, mask, chance)
        rows.append({"input_ids": [knowledge, *masked, user, *before, end], "labels": [*after, end]})
    return rows


def infill(tokens: Sequence[int], mask: int, chance: Random) -> list[int]:
    """Return the tokens with spans of them replaced by one mask each."""
    budget = round(MASKED * len(tokens))
    lengths: list[int] = []
    while sum(lengths) < budget:
        lengths.append(min(chance.randint(1, 2 * SPAN - 1), budget - sum(lengths)))
    gaps = [0, *sorted(chance.randint(0, len(tokens) - budget) for _ in lengths)]
    left: list[int] = []
    index = 0
    for length, (before, after) in zip(lengths, pairwise(gaps), strict=True):
        left += [*tokens[index : index + after - before], mask]
        index += after - before + length
    return left + list(tokens[index:])
