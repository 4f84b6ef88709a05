"""Tokenizers trained on the spot with the tokenizers library, small models that have them, and merges row by row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..making import write_model

ENGLISH = "the quick brown fox jumps over the lazy dog while the quick cat sleeps all day long in the sun"
MERGING = "merging models with different vocabularies is quick work and the dog likes merging the models all day"
WIDTH = 8


def byte_level(text: str, size: int = 290, **settings: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**settings))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text] * 3, trainer)
    return tokenizer


def word_pieces(text: str, size: int = 70) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text] * 3, trainer)
    return tokenizer


def unigram(text: str, size: int = 60) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=size, unk_token="<unk>", special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text] * 3, trainer)
    return tokenizer


KINDS = {
    "BPE": (byte_level, {"bos_token": "<s>", "eos_token": "</s>"}),
    "WordPiece": (word_pieces, {"unk_token": "[UNK]", "pad_token": "[PAD]"}),
    "Unigram": (unigram, {"unk_token": "<unk>", "eos_token": "</s>"}),
}


def save_tokenizer(folder: Path, kind: str, text: str, added: Sequence[str] = (), **settings: Any) -> dict[str, int]:
    """A trained tokenizer in a folder; returns token → id as transformers loads it."""
    make, special = KINDS[kind]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(text), **{**special, **settings})
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(folder)
    return vocabulary(folder)


def vocabulary(folder: Path) -> dict[str, int]:
    return dict(AutoTokenizer.from_pretrained(folder).get_vocab())


def encode(folder: Path, text: str) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return list(tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False)))


def state(rows: int, seed: int, *, tied: bool = False, bias: bool = False, **types: Any) -> dict[str, Tensor]:
    """A model of one layer with Llama's names, in float64 unless said otherwise."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (rows, WIDTH), "model.layers.0.mlp.up_proj.weight": (16, WIDTH)}
    shapes |= {"model.norm.weight": (WIDTH,)}
    shapes |= {} if tied else {"lm_head.weight": (rows, WIDTH)}
    shapes |= {"lm_head.bias": (rows,)} if bias else {}
    dtype = types.get("dtype", torch.float64)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def save_model(folder: Path, weights: Mapping[str, Tensor], shards: int = 1, **config: Any) -> Path:
    rows = weights["model.embed_tokens.weight"].shape[0]
    tied = "lm_head.weight" not in weights
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    return write_model(folder, weights, shards, {"vocab_size": rows, "tie_word_embeddings": tied, **config})


ROWED = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias")
Vectors = dict[str, Tensor]
"""Token → its row."""


def by_token(weights: Mapping[str, Tensor], ids: Mapping[str, int], name: str) -> Vectors:
    """The rows of a tensor that a model has, by token; a tied head is the embedding."""
    tensor = weights.get(name, weights["model.embed_tokens.weight"]).double()
    return {token: tensor[row] for token, row in ids.items() if row < len(tensor)}


def completed(every: Sequence[Vectors], tokens: Sequence[str], base: int | None) -> list[Vectors]:
    """Every model with a row for every token: its own, or that of the base, or the mean of those that have one."""
    result: list[Vectors] = [{} for _ in every]
    for token in tokens:
        having = [vectors[token] for vectors in every if token in vectors]
        default = torch.stack(having).mean(0) if having else torch.zeros(0)
        if base is not None and token in every[base]:
            default = every[base][token]
        for vectors, full in zip(every, result, strict=True):
            full[token] = vectors.get(token, default)
    return result


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return dict(json.loads((folder / name).read_text()))
