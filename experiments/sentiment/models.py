"""Encoders with a binary head, and encoder-decoders that answer with a word: what both must do for the experiment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput

from ..common.data import IGNORED, padded
from ..common.training import quick_products

Example = Mapping[str, Any]


class Kind(ABC):
    """A kind of model: how texts go in, and how a label comes out."""

    def __init__(self, path: str | Path, tokens: int) -> None:
        self.path = path
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._tokens = tokens

    def examples(self, rows: Sequence[Mapping[str, Any]]) -> list[Example]:
        """Texts as numbers, cut at so many tokens."""
        ids = self.tokenizer([row["text"] for row in rows], truncation=True, max_length=self._tokens)["input_ids"]
        return [
            {"ids": np.array(text, dtype=np.int32), "label": row["label"]} for text, row in zip(ids, rows, strict=True)
        ]

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """A batch with labels, padded to its longest text."""
        ids = [example["ids"] for example in examples]
        return {
            "input_ids": padded(ids, self.tokenizer.pad_token_id),
            "attention_mask": padded([[1] * len(text) for text in ids], 0),
            "labels": self.targets([example["label"] for example in examples]),
        }

    @abstractmethod
    def start(self, path: str | Path) -> PreTrainedModel:
        """The model of a folder or Hub id, in float32; what it lacks is drawn at random."""

    @abstractmethod
    def targets(self, labels: Sequence[int]) -> Tensor:
        """Labels as the model's loss takes them."""

    @abstractmethod
    def log_probabilities(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        """ln p of negative and of positive for each text; the two probabilities add up to 1."""


class Classifier(Kind):
    """An encoder with a head for two classes."""

    def start(self, path: str | Path) -> PreTrainedModel:
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=2, dtype=torch.float32)

    def targets(self, labels: Sequence[int]) -> Tensor:
        return torch.tensor(labels)

    def log_probabilities(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits.float().log_softmax(-1)


class Answerer(Kind):
    """An encoder-decoder that answers "negative" or "positive"; the likelier of the two words is its label."""

    WORDS = ("negative", "positive")

    def __init__(self, path: str | Path, tokens: int) -> None:
        super().__init__(path, tokens)
        self._words = padded([self.tokenizer(word)["input_ids"] for word in self.WORDS], IGNORED)

    def start(self, path: str | Path) -> PreTrainedModel:
        return AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32)

    def targets(self, labels: Sequence[int]) -> Tensor:
        return self._words[torch.tensor(labels)]

    def log_probabilities(self, model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"]
        hidden = model.get_encoder()(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
        found = []
        for word in self._words.to(hidden.device):
            labels = word.repeat(len(hidden), 1)
            logits = model(
                encoder_outputs=BaseModelOutput(last_hidden_state=hidden), attention_mask=mask, labels=labels
            ).logits
            losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
            found.append(-losses.view(labels.shape).sum(-1))
        return torch.stack(found, -1).log_softmax(-1)


def is_seq2seq(path: str | Path) -> bool:
    return bool(AutoConfig.from_pretrained(path).is_encoder_decoder)


def kind_of(path: str | Path, tokens: int) -> Kind:
    return Answerer(path, tokens) if is_seq2seq(path) else Classifier(path, tokens)


def groups(examples: Sequence[Example], tokens: int) -> Iterator[list[Example]]:
    """Every example once, texts of like length together, about ``tokens`` tokens to a group."""
    order = sorted(range(len(examples)), key=lambda place: -len(examples[place]["ids"]))
    begin = 0
    while begin < len(order):
        count = max(1, tokens // len(examples[order[begin]]["ids"]))
        yield [examples[place] for place in order[begin : begin + count]]
        begin += count


def batches(kind: Kind, examples: Sequence[Example], tokens: int) -> Iterator[dict[str, Tensor]]:
    return map(kind.collate, groups(examples, tokens))


def prepared(
    kind: Kind, examples: Sequence[Example], tokens: int, device: str
) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Batches on a device, each with the labels of its texts."""
    return [
        (
            {name: value.to(device) for name, value in kind.collate(group).items()},
            torch.tensor([example["label"] for example in group], device=device),
        )
        for group in groups(examples, tokens)
    ]


def score(kind: Kind, model: PreTrainedModel, rows: Sequence[tuple[dict[str, Tensor], Tensor]]) -> dict[str, Any]:
    """How many labels are right, of how many, and the mean of −ln p of the right label; ``rows`` as ``prepared``."""
    right, loss, count = 0, 0.0, 0
    with torch.inference_mode(), quick_products():
        for batch, truth in rows:
            found = kind.log_probabilities(model, batch)
            right += int((found.argmax(-1) == truth).sum())
            loss -= float(found.gather(1, truth[:, None]).double().sum())
            count += len(truth)
    return {"right": right, "rows": count, "loss": loss / count}


def mean_gradient(kind: Kind, model: PreTrainedModel, examples: Sequence[Example], tokens: int) -> dict[str, Tensor]:
    """∇ (1/N) Σ ℓ_i per parameter, without dropout; ℓ_i of an answer is the sum over its tokens."""
    model.eval()
    model.zero_grad(set_to_none=True)
    for batch in batches(kind, examples, tokens):
        placed = {name: value.to(model.device) for name, value in batch.items()}
        labels = placed["labels"] if isinstance(kind, Answerer) else placed.pop("labels")
        logits = model(**placed).logits
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        (loss / len(examples)).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found
