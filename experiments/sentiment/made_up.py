"""Made-up reviews and models of a few thousand weights, for trying the experiment without data or a GPU."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from .data import Row

_GOOD = ["good", "great", "fine", "lovely", "superb", "warm", "bright", "clever", "honest", "joyful"]
_BAD = ["bad", "poor", "dull", "awful", "weak", "cold", "stale", "clumsy", "false", "dreary"]
_PLAIN = "the a it was this that with and very quite film place book story one more than all here there"
#: What a word says may depend on the data set: fine-tunes then differ where they meet.
_OWN = {
    "imdb": ("moving gripping", "slow long"),
    "yelp": ("tasty slow", "greasy rude"),
    "rotten_tomatoes": ("sly long", "moving thin"),
    "sst2": ("witty dark", "flat tasty"),
    "amazon": ("sturdy light", "broken dark"),
}


def made_up(name: str, train: int = 400, test: int = 120) -> dict[str, list[Row]]:
    """Rows of short texts whose label is the sign of their words."""
    draw, plain = random.Random(f"sentiment {name}"), _PLAIN.split()
    good, bad = ([*words, *own.split() * 3] for words, own in zip((_GOOD, _BAD), _OWN[name], strict=True))

    def row() -> Row:
        label = draw.randrange(2)
        words = draw.choices(plain, k=draw.randint(4, 9)) + draw.choices(good if label else bad, k=draw.randint(1, 3))
        draw.shuffle(words)
        return {"text": " ".join(words), "label": label}

    return {"train": [row() for _ in range(train)], "test": [row() for _ in range(test)]}


def make_encoder(folder: Path, texts: Iterable[str]) -> None:
    """A BERT of two layers with random weights, and a tokenizer of the texts' words."""
    tokenizer = _tokenizer(texts)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=0, **shape)
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    words = sorted({word for text in texts for word in text.lower().split()})
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", eos_token="[SEP]")
