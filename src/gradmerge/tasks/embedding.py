"""Task `embedding`: sentence-transformers folders, on pairs with a score or on positives with negatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.config_diff import poolings
from ..checkpoints.open import modules_of
from ..curvature.checkpoint_names import skeleton
from ..curvature.losses import ClassLoss, ExampleLoss, SquaredLoss
from ..errors import InputError
from ..io.small_files import read_json, require_within
from .columns import Fields, to_float
from .data import Rows, shorten
from .text import TokenizedData, pad

#: cos / temperature is the logit of a candidate. Ranking losses of sentence-transformers use the same value.
TEMPERATURE = 0.05
POOLINGS = ("mean", "cls", "max", "lasttoken")


@dataclass(frozen=True)
class SentenceConfig:
    """The modules of a sentence-transformers folder."""

    transformer: Path
    """The folder of the first module."""
    prefix: str
    """The beginning of the transformer's names in the files of the model."""
    pooling: tuple[str, ...]
    """The poolings, whose results are concatenated."""
    layers: tuple[str, ...]
    """The kinds of the modules after the pooling."""
    max_length: int | None
    lower_case: bool
    prompt: str

    def prepare(self, text: str) -> str:
        """Return a text as the model reads it."""
        text = self.prompt + text.strip()
        return text.lower() if self.lower_case else text


def read_sentence_config(reference: str, folder: Path) -> SentenceConfig:
    """Read the modules of a sentence-transformers folder."""
    modules = modules_of(folder)
    kinds = [class_name.rpartition(".")[2] for _, class_name in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise InputError(
            f"{reference}: task embedding needs a sentence-transformers folder: modules.json with a Transformer and "
            f"then Pooling, not {', '.join(kinds[:2]) or 'nothing'}"
        )
    (path, _), (pooling, _) = modules[:2]
    transformer = folder / path
    pooling_config = _read_optional(folder, folder / pooling / "config.json")
    general = _read_optional(folder, folder / "config_sentence_transformers.json")
    prompts, name = general.get("prompts"), general.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if prompt and pooling_config.get("include_prompt") is False:
        raise InputError(f"{reference}: task embedding does not support include_prompt false in {pooling}")
    settings = _read_optional(folder, next(transformer.glob("sentence_*_config.json"), transformer / "none"))
    length = settings.get("max_seq_length")
    return SentenceConfig(
        transformer=transformer,
        prefix=f"{path}/" if path else "",
        pooling=poolings(pooling_config) or ("mean",),
        layers=tuple(kinds[2:]),
        max_length=length if isinstance(length, int) and length > 1 else None,
        lower_case=bool(settings.get("do_lower_case")),
        prompt=prompt if isinstance(prompt, str) else "",
    )


def _read_optional(folder: Path, path: Path) -> dict[str, Any]:
    """Return the content of a file of the folder; an empty dictionary if there is none."""
    if not path.exists():
        return {}
    require_within(path, folder)
    return read_json(path)


class EmbeddingModel(nn.Module):
    """Embed the texts of an example, and compare the first with the others.

    The output for two texts is their cosine. For more it is cosine / temperature of the first with each other.
    Cosines do not depend on a module Normalize.
    """

    def __init__(self, transformer: Any, sentence_config: SentenceConfig) -> None:
        super().__init__()
        known = (*POOLINGS, "Normalize", "Dropout")
        for name in (*sentence_config.pooling, *sentence_config.layers):
            if name not in known:
                raise InputError(
                    f"{sentence_config.transformer}: task embedding supports {', '.join(known)}, not {name[:40]}"
                )
        self.sentence_config = sentence_config
        self.transformer = transformer
        self.stored_parts = {"transformer": sentence_config.prefix}
        """Child → the prefix of its names in the files of the model."""

    @property
    def config(self) -> Any:
        return self.transformer.config

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.transformer.get_input_embeddings()
        return embeddings

    def skeleton(self) -> EmbeddingModel:
        """Return the same model on the meta device."""
        return EmbeddingModel(skeleton(type(self.transformer), self.config), self.sentence_config)

    def forward(self, use_cache: bool | None = None, **inputs: Tensor) -> Tensor:
        options = {} if use_cache is None else {"use_cache": use_cache}
        texts = sum(name.startswith("input_ids_") for name in inputs)
        vectors = [
            self.embed({n.removesuffix(f"_{k}"): v for n, v in inputs.items() if n.endswith(f"_{k}")}, options)
            for k in range(texts)
        ]
        cosines = torch.stack([F.cosine_similarity(vectors[0], other, dim=-1) for other in vectors[1:]], 1)
        return cosines if texts == 2 else cosines / TEMPERATURE

    def embed(self, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
        """Return one embedding per row of tokens."""
        hidden = self.transformer(**inputs, **options).last_hidden_state
        mask = inputs["attention_mask"].bool()
        return torch.cat([pool(hidden, mask, mode) for mode in self.sentence_config.pooling], -1)


def pool(hidden: Tensor, mask: Tensor, mode: str) -> Tensor:
    """Pool the vectors of tokens to one per text. Padding is on the right."""
    if mode == "mean":
        weights = mask.to(hidden.dtype).unsqueeze(-1)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    if mode == "max":
        return hidden.masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(1)
    if mode == "cls":
        return hidden[:, 0]
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]


class CosineLoss(SquaredLoss):
    """(cos − score)²: the squared error of the cosine between two texts."""

    name = "cosine"


class RankingLoss(ClassLoss):
    """−log softmax(cos / temperature) of the positive among an example's own candidates.

    Other examples of the batch are not negatives. Otherwise an example's loss would depend on its batch.
    """

    name = "ranking"


class EmbeddingData(TokenizedData):
    """An anchor with a positive and its score, or with a positive and negatives."""

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, tokenizer: object, max_length: int | None) -> None:
        assert isinstance(model, EmbeddingModel)
        super().__init__(rows, fields, model, tokenizer, max_length)
        self.sentence_config = model.sentence_config
        if max_length is None and self.sentence_config.max_length is not None:
            self.max_length = min(self.max_length, self.sentence_config.max_length)
        self.texts = [fields["anchor"], fields["positive"], *((name,) for name in fields.get("negative", ()))]
        self.loss: ExampleLoss = RankingLoss() if "negative" in fields else CosineLoss()
        if "score" in fields:
            self.labels = _read_scores(rows, fields["score"][0])
        elif "negative" in fields:
            self.labels = torch.zeros(len(rows), dtype=torch.long)
        else:
            self.labels = torch.ones(len(rows))
            rows.notes.append("the pairs have neither scores nor negatives: each cosine is compared with 1")

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for k, columns in enumerate(self.texts):
            encodings = [self._encode(index, columns) for index in indices]
            for name in encodings[0]:
                fill = self.pad_token if name == "input_ids" else 0
                result[f"{name}_{k}"] = pad([encoding[name] for encoding in encodings], fill)
        return result | {"labels": self.labels[list(indices)]}

    def _encode(self, index: int, columns: Sequence[str]) -> dict[str, list[int]]:
        text = self.sentence_config.prepare(self.rows.text(index, columns))
        encoding = self.encode(index, text, return_attention_mask=True)
        if not encoding["input_ids"]:
            raise self.rows.error(index, f"{columns[0]!r} has no tokens")
        return encoding


def _read_scores(rows: Rows, column: str) -> Tensor:
    scores = [to_float(cell) for cell in rows.column(column)]
    for index, score in enumerate(scores):
        if not -1 <= score <= 1:
            raise rows.error(
                index,
                f"{column!r} is {shorten(rows.cell(index, column))}, but scores are compared with cosines and must be "
                "numbers from -1 to 1. Divide them by the largest possible score.",
            )
    return torch.tensor(scores)
