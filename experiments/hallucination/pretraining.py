"""A small model that can copy: a tokenizer, a model in the shape of T5, and text infilling over plain text."""

from __future__ import annotations

import gzip
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
from .data import KNOWLEDGE, TAGS, USER, Turn
from .settings import Pretraining, Shape

MASK = "<mask>"
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
        found = list(_pairs(_paragraphs(data / name)))
        chance.shuffle(found)
        pairs += found[: settings.pairs // len(settings.texts)]
    spoken = [text for turn in turns for text in (turn.knowledge, turn.response)]
    tokenizer = make_tokenizer([after for _, after in pairs[:: max(1, len(pairs) // 60_000)]] + spoken, settings.shape)
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


def make_tokenizer(texts: Sequence[str], shape: Shape) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=["<pad>", "</s>", MASK, *TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", mask_token=MASK)


def make_model(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> T5ForConditionalGeneration:
    """A model with new weights."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=shape.width,
            d_kv=shape.width // shape.heads,
            d_ff=shape.feed_forward,
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


def _paragraphs(folder: Path) -> Iterator[str]:
    path = next((p for p in (folder / "train.txt.gz", folder / "train.jsonl.gz") if p.is_file()), None)
    if path is None:
        raise gm.InputError(f"{folder}: there is neither train.txt.gz nor train.jsonl.gz to pre-train on")
    if path.name.endswith(".txt.gz"):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                if not line.strip().startswith("="):
                    yield plain(line)
    else:
        for row in gm.read_rows(str(path)).rows:
            yield row["text"].replace("<br />", " ")


def plain(line: str) -> str:
    """A line of WikiText as people write: without spaces before punctuation, escaped hyphens and unknown words."""
    line = re.sub(r" @(.)@ ", r"\1", line.replace("<unk>", " "))
    line = re.sub(r"\s+", " ", line)
    line = re.sub(r" ([.,;:!?)'’])", r"\1", line)
    return re.sub(r"([(]) ", r"\1", line).strip()


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
