"""Small models in the shape of T5 that are pre-trained on the spot: plain text, a tokenizer of it, and new weights."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

import gradmerge as gm

MASK = "<mask>"


@dataclass(frozen=True)
class Shape:
    """A small model in the shape of T5 v1.1, but with tied embeddings: they learn to copy, and to write, sooner."""

    layers: int
    """Of the encoder, and as many of the decoder."""
    width: int
    feed_forward: int
    heads: int
    vocabulary: int


def make_tokenizer(texts: Sequence[str], shape: Shape, special: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts; ``special`` tokens beside <pad>, </s> and <mask>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=["<pad>", "</s>", MASK, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", mask_token=MASK)


def make_model(shape: Shape, tokenizer: PreTrainedTokenizerFast, dropout: float = 0.1) -> T5ForConditionalGeneration:
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
            dropout_rate=dropout,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )


def paragraphs(folder: Path) -> Iterator[str]:
    """The training texts of a folder: of WikiText its lines, of reviews each whole."""
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
