"""Texts that stay, texts that go, and prompts: from a local folder or the Hub, as tokens on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import gradmerge as gm

from ..common.data import folder_in
from .settings import TOXIC_FROM, Settings

END = "<|endoftext|>"
REVIEWS = ("imdb", "yelp", "amazon")
#: Characters from which a tokenizer is learned, at most, and those of one piece of a long text.
SAMPLE = 8_000_000
PIECE = 200_000
#: Characters of a token, on average at most: no more of a text is taken than so many times the tokens that are needed.
LONGEST_TOKEN = 8

#: On the Hub: text that stays, comments, and prompts.
WIKI = "Salesforce/wikitext/wikitext-103-raw-v1"
TOXIC = "google/civil_comments"
PROMPTS = "allenai/real-toxicity-prompts"

#: kind of text → split → texts.
Texts = dict[str, dict[str, list[str]]]


def text_folder(data_dir: Path) -> Path:
    """The folder text/ in ``data_dir``, or, where there is none, ``data_dir`` itself."""
    return folder_in(data_dir, "text")


def local_texts(folder: Path, settings: Settings) -> Texts:
    """WikiText-2, reviews, and the comments of the Jigsaw challenge, those that are toxic apart."""

    def rows(name: str) -> Sequence[Mapping[str, Any]]:
        return gm.read_rows(str(folder / name)).rows

    def split(train: list[str], test: list[str]) -> dict[str, list[str]]:
        kept = len(train) - min(settings.held_out, len(train) // 10)
        return {
            "train": list(sampled(train[:kept], settings.characters)),
            "dev": train[kept:],
            "test": list(sampled(test, LONGEST_TOKEN * settings.test_tokens)),
        }

    files = {"train": "train", "dev": "valid", "test": "test"}
    found: Texts = {"wiki": {}}
    for name, file in files.items():
        lines = [r["text"] for r in rows(f"wikitext2/{file}.txt.gz")]
        if name != "train":
            limit = settings.dev_tokens if name == "dev" else settings.test_tokens
            found["wiki"][name] = [joined(list(sampled(lines, LONGEST_TOKEN * limit)))]
        else:
            first = list(sampled(lines, settings.characters))
            found["wiki"][name] = [joined(first)] if settings.packed else first[: settings.curvature_examples]
    if settings.more_kinds:
        both = ([[r["text"] for r in rows(f"{name}/{s}.jsonl.gz")] for name in REVIEWS] for s in ("train", "test"))
        found["reviews"] = split(*(list(chain.from_iterable(zip(*sets, strict=False))) for sets in both))
    for kind, label in [*([("comments", 0)] if settings.more_kinds else []), ("toxic", 1)]:
        found[kind] = split(
            *([r["text"] for r in rows(f"jigsaw_toxic/{s}.jsonl.gz") if r["label"] == label] for s in ("train", "test"))
        )
    return found


def hub_texts(settings: Settings) -> Texts:
    """WikiText-103, of its training texts the first that are not empty, and the toxic part of Civil Comments."""
    # About two of three rows are not empty.
    first = (r["text"] for r in gm.read_rows(f"{WIKI}:train", limit=2 * settings.curvature_examples).rows)
    found: Texts = {"wiki": {"train": [t for t in first if t.strip()][: settings.curvature_examples]}, "toxic": {}}
    for split, name in (("dev", "validation"), ("test", "test")):
        found["wiki"][split] = [joined([r["text"] for r in gm.read_rows(f"{WIKI}:{name}").rows])]
    for split, name in (("train", "train"), ("dev", "validation"), ("test", "test")):
        comments = gm.read_rows(f"{TOXIC}:{name}")
        toxic = [i for i, score in enumerate(comments.column("toxicity")) if score >= TOXIC_FROM]
        found["toxic"][split] = [comments.cell(i, "text") for i in toxic]
    return found


def joined(lines: Sequence[str]) -> str:
    """A text from its lines, as the perplexity of WikiText is commonly measured."""
    return "\n\n".join(lines)


def prompts(folder: Path | None, count: int, share: float | None) -> list[dict[str, Any]]:
    """Beginnings from RealToxicityPrompts: the first ones, or, where a share of them should be toxic, of each kind."""
    if folder is None:
        source = gm.read_rows(f"{PROMPTS}:train").rows
        rows = [{"text": r["prompt"]["text"], "toxicity": r["prompt"]["toxicity"]} for r in source]
    else:
        source = gm.read_rows(str(folder / "real_toxicity_prompts" / "prompts.jsonl.gz")).rows
        rows = [{"text": r["text"], "toxicity": r["toxicity"]} for r in source]
    judged = [{"text": r["text"], "toxic": r["toxicity"] >= 0.5} for r in rows if r["toxicity"] is not None]
    if share is None:
        return judged[:count]
    toxic = [r for r in judged if r["toxic"]][: round(count * share)]
    return [*toxic, *[r for r in judged if not r["toxic"]][: count - len(toxic)]]


def learn_tokenizer(texts: Texts, vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level pairs from the training texts, a share of every kind."""
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(
        chain.from_iterable(sampled(texts[kind]["train"], SAMPLE // len(texts)) for kind in texts),
        vocab_size=vocabulary,
        special_tokens=[END],
        show_progress=False,
    )
    return PreTrainedTokenizerFast(tokenizer_object=learned._tokenizer, eos_token=END, bos_token=END, pad_token=END)


def sampled(texts: Sequence[str], characters: int) -> Iterator[str]:
    """The first texts, up to so many characters."""
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, with the end of a text after it; long texts in pieces that end with a line."""
    pieces = [list(cut(text)) for text in texts]
    flat: list[list[int]] = tokenizer(list(chain.from_iterable(pieces)), add_special_tokens=False)["input_ids"]
    ids, place = [], 0
    for parts in pieces:
        ids.append([*chain.from_iterable(flat[place : place + len(parts)]), tokenizer.eos_token_id])
        place += len(parts)
    return ids


def cut(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE:
        end = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def write_tokens(folder: Path, data_dir: Path | None, model: str | None, settings: Settings) -> dict[str, Any]:
    """Write tokenizer and tokens to ``folder``; how many texts and tokens there are of each kind and split."""
    local = text_folder(data_dir) if data_dir is not None else None
    texts = hub_texts(settings) if local is None else local_texts(local, settings)
    if settings.pretraining is None:
        tokenizer = AutoTokenizer.from_pretrained(model)
    else:
        tokenizer = learn_tokenizer(texts, settings.pretraining.vocabulary)
    tokenizer.model_max_length = 1 << 40  # texts are cut here, and no warning of it is needed
    tokenizer.save_pretrained(folder / "tokenizer")
    tensors, counts = {}, {}
    for kind, splits in texts.items():
        for split, found in splits.items():
            ids = encode(tokenizer, found)
            tensors[f"{kind}.{split}.ids"] = torch.tensor(list(chain.from_iterable(ids)), dtype=torch.int32)
            tensors[f"{kind}.{split}.lengths"] = torch.tensor([len(i) for i in ids], dtype=torch.int32)
            counts[f"{kind}.{split}"] = {"texts": len(ids), "tokens": sum(map(len, ids))}
    save_file(tensors, folder / "tokens.safetensors")
    return counts


def write_prompts(folder: Path, data_dir: Path | None, settings: Settings) -> dict[str, int]:
    """Write the prompts to ``folder``, those for validation apart; how many there are of each."""
    local = text_folder(data_dir) if data_dir is not None else None
    found = prompts(local, settings.prompts + settings.dev_prompts, settings.toxic_prompts)
    # Every so many-th, so that both have as large a share of toxic ones.
    apart = max(2, len(found) // settings.dev_prompts)
    parts = {"dev": found[::apart], "test": [p for place, p in enumerate(found) if place % apart]}
    (folder / "prompts.json").write_text(json.dumps(parts))
    return {split: len(part) for split, part in parts.items()}


@dataclass
class Data:
    """What was prepared."""

    kinds: list[str]
    tokenizer: Any
    tokens: dict[str, Tensor]
    settings: Settings

    @classmethod
    def load(cls, folder: Path, settings: Settings) -> Data:
        tokens = load_file(folder / "tokens.safetensors")
        kinds = list(dict.fromkeys(name.split(".")[0] for name in tokens))
        kinds.sort(key=["wiki", "reviews", "comments", "toxic"].index)
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        return cls(kinds, tokenizer, tokens, settings)

    @property
    def staying(self) -> list[str]:
        return [kind for kind in self.kinds if kind != "toxic"]

    def examples(self, kind: str) -> list[Tensor]:
        """Training examples: blocks of tokens, or texts that are cut off at the length."""
        ids, lengths = self.tokens[f"{kind}.train.ids"].long(), self.tokens[f"{kind}.train.lengths"].tolist()
        length = self.settings.length
        if self.settings.packed:
            return list(ids[: len(ids) // length * length].view(-1, length))
        return [text[:length] for text in ids.split(lengths) if len(text) > 1]

    def held_out(self, kind: str, split: str) -> Tensor:
        """The first tokens of a split, one text after the other."""
        limit = self.settings.dev_tokens if split == "dev" else self.settings.test_tokens
        return self.tokens[f"{kind}.{split}.ids"][:limit].long()
