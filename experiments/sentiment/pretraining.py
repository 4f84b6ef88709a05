"""A small T5 of our own: spans of plain text are taken out, and it writes them down, as T5 was pre-trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import normalizers, processors
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import gradmerge as gm

from ..common.pretraining import make_model, make_tokenizer, paragraphs
from ..common.training import fine_tune
from .data import BASE
from .models import Answerer, kind_of, prepared, score
from .settings import Pretraining, Settings

Ids = NDArray[np.int64]


def pretrain(folder: Path, texts: Sequence[Path], settings: Pretraining, *, seed: int, device: str) -> dict[str, Any]:
    """Write a tokenizer and a model to ``folder``; what it took. ``texts`` are folders of training texts."""
    # Some of the sets are in lower case, and what a small model learns of a word should hold for all of them.
    found = [text.lower() for one in texts for text in paragraphs(one) if text]
    Random(seed).shuffle(found)
    noise, spans = settings.holes
    sentinels = [f"<extra_id_{number}>" for number in range(spans)]
    # Only a part of the texts lends the tokenizer its words: training it on all takes longer, and changes little.
    tokenizer = make_tokenizer([*found[:20_000], " ".join(Answerer.WORDS)], settings.shape, sentinels)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    torch.manual_seed(seed)
    model = make_model(settings.shape, tokenizer, dropout=0.0)  # none while pre-training, as for T5 v1.1
    rows = chunks(tokenizer(found)["input_ids"], settings.tokens)
    first = tokenizer.convert_tokens_to_ids(sentinels[0])
    collate = Holes(noise, spans, first, tokenizer.eos_token_id, seed)
    took = fine_tune(model, rows, collate, folder, settings.training, seed=seed, device=device)
    model.config.dropout_rate = settings.dropout
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {**took, "texts": len(found), "parameters": model.num_parameters(), "vocabulary": len(tokenizer)}


def base_without(
    folder: Path, model: Path, data: Path, settings: Settings, *, seed: int, device: str
) -> dict[str, Any]:
    """What pre-training is worth: the base trained from random weights instead, scored on its test rows."""
    kind = kind_of(model, settings.tokens)
    train, test = (
        kind.examples(gm.read_rows(str(data / BASE / f"{split}.jsonl.gz")).rows) for split in ("train", "test")
    )
    torch.manual_seed(seed)
    fresh = AutoModelForSeq2SeqLM.from_config(AutoConfig.from_pretrained(model))
    fine_tune(fresh, train, kind.collate, folder, settings.training(BASE), seed=seed, device=device)
    return score(kind, fresh.eval(), prepared(kind, test, settings.batch_tokens, device))


def chunks(texts: Sequence[Sequence[int]], length: int) -> list[dict[str, Ids]]:
    """All texts in a row, cut into pieces of one length; what is left at the end is dropped."""
    stream = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    whole = len(stream) // length
    return [{"ids": piece} for piece in stream[: whole * length].reshape(whole, length)]


class Holes:
    """Pieces of text as a batch with holes, drawn anew every time: t1 <0> t4 t5 <1> t7 </s> → <0> t2 t3 <1> t6 </s>.

    Every piece has the same number of spans and of tokens in them, so that nothing is padded.
    """

    def __init__(self, noise: int, spans: int, first: int, end: int, seed: int) -> None:
        """``noise`` tokens are taken out, in ``spans``; ``first`` is the id of the first sentinel, others follow it."""
        self._noise, self._spans, self._first, self._end = noise, spans, first, end
        self._chance = np.random.default_rng(seed)

    def __call__(self, rows: Sequence[dict[str, Ids]]) -> dict[str, Tensor]:
        ids = np.stack([row["ids"] for row in rows])
        count, length = ids.shape
        lengths = np.empty((count, 2 * self._spans + 1), dtype=np.int64)
        lengths[:, 1::2] = self._parts(count, self._noise, self._spans)
        lengths[:, ::2] = self._parts(count, length - self._noise, self._spans + 1)
        number = np.repeat(np.tile(np.arange(lengths.shape[1]), count), lengths.ravel()).reshape(ids.shape)
        taken = number % 2 == 1
        begins = taken & np.diff(number, axis=1, prepend=0).astype(bool)
        sentinels = self._first + number // 2
        source = np.where(taken, sentinels, ids)[~taken | begins].reshape(count, -1)
        pairs, kept = np.stack([sentinels, ids], -1), np.stack([begins, taken], -1)
        target = pairs[kept].reshape(count, -1)
        end = np.full((count, 1), self._end)
        return {
            "input_ids": torch.from_numpy(np.hstack([source, end])),
            "labels": torch.from_numpy(np.hstack([target, end])),
        }

    def _parts(self, count: int, total: int, parts: int) -> Ids:
        """``count`` rows of whole numbers from 1 on that add up to ``total``, every such row as likely as another."""
        cuts = 1 + np.sort(np.argsort(self._chance.random((count, total - 1)), axis=1)[:, : parts - 1], axis=1)
        return np.diff(cuts, axis=1, prepend=0, append=total)
