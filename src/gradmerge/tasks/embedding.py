"""Task `embedding`: sentence-transformers folders, on pairs with a score or on positives with negatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from ..io.small_files import read_json
from .data.columns import Fields
from .data.labels import to_float
from .data.read import Rows, shorten
from .resolve_model import check_small_files, check_weights
from .text import TokenizedData, pad

#: cos / temperature is the logit of a candidate. Ranking losses of sentence-transformers use the same value.
TEMPERATURE = 0.05
POOLINGS = ("mean", "cls", "max", "lasttoken")
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


@dataclass(frozen=True)
class SentenceConfig:
    """The modules of a sentence-transformers folder."""

    folder: Path
    transformer: Path
    """The folder of the first module."""
    pooling: tuple[str, ...]
    """The poolings, whose results are concatenated."""
    layers: tuple[tuple[Path, str | None], ...]
    """The layers after the pooling, each with its folder: the activation of a dense layer, None for Normalize."""
    max_length: int | None
    lower_case: bool
    prompt: str

    def prepare(self, text: str) -> str:
        """Return a text as the model reads it."""
        text = self.prompt + text.strip()
        return text.lower() if self.lower_case else text


def read_sentence_config(reference: str, folder: Path) -> SentenceConfig:
    """Read the modules of a sentence-transformers folder. Raise if one is not supported."""
    modules = [(folder / path, class_name.rpartition(".")[2]) for path, class_name in modules_of(folder)]
    kinds = [kind for _, kind in modules]
    if not modules:
        raise InputError(f"{reference}: task embedding needs a sentence-transformers folder, with modules.json")
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise InputError(
            f"{reference}: task embedding needs a Transformer and then Pooling, not {', '.join(kinds[:2])}"
        )
    transformer = modules[0][0]
    pooling_config = _read_config(modules[1][0])
    pooling = poolings(pooling_config) or ("mean",)
    _require_known(reference, "pooling", pooling, POOLINGS)
    _require_known(reference, "module", kinds[2:], ("Dense", "Normalize", "Dropout"))
    layers: list[tuple[Path, str | None]] = []
    for path, kind in modules[2:]:
        config = _read_config(path)
        if any(config[key] != "sentence_embedding" for key in config if key.endswith("put_name")):
            raise InputError(f"{reference}: task embedding does not support {kind} on single tokens ({path.name})")
        if kind == "Dense":
            activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
            _require_known(reference, "activation", [activation], ACTIVATIONS)
            check_weights(reference, path, "model")
            layers.append((path, activation))
        elif kind == "Normalize":
            layers.append((path, None))
    general = _read_optional(folder / "config_sentence_transformers.json")
    prompts, name = general.get("prompts"), general.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if prompt and pooling_config.get("include_prompt") is False:
        raise InputError(f"{reference}: task embedding does not support include_prompt false in {modules[1][0].name}")
    settings = _read_optional(next(iter(sorted(transformer.glob("sentence_*_config.json"))), transformer / "none"))
    length = settings.get("max_seq_length")
    return SentenceConfig(
        folder=folder,
        transformer=transformer,
        pooling=pooling,
        layers=tuple(layers),
        max_length=length if isinstance(length, int) and length > 1 else None,
        lower_case=bool(settings.get("do_lower_case")),
        prompt=prompt if isinstance(prompt, str) else "",
    )


def _require_known(reference: str, what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise InputError(
                f"{reference}: task embedding does not support the {what} {str(name)[:40]}. "
                f"Known are {', '.join(known)}"
            )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_config(folder: Path) -> dict[str, Any]:
    if folder.is_dir():
        check_small_files(folder)
    return _read_optional(folder / "config.json")


class Dense(nn.Module):
    """A dense layer with its activation."""

    def __init__(self, folder: Path, activation: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        from safetensors.torch import load_file

        path = folder / "model.safetensors"
        state = load_file(path) if path.is_file() else {}
        weight, bias = state.get("linear.weight"), state.get("linear.bias")
        if weight is None or weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise InputError(f"{folder}: has no dense layer (linear.weight, linear.bias)")
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=dtype or weight.dtype)
        if not self.linear.weight.is_meta:
            self.linear.load_state_dict({name.removeprefix("linear."): value for name, value in state.items()})
        self.activation: nn.Module = getattr(nn, activation)()

    def forward(self, vectors: Tensor) -> Tensor:
        result: Tensor = self.activation(self.linear(vectors))
        return result


class EmbeddingModel(nn.Module):
    """Embed the texts of an example, and compare the first with the others.

    The output for two texts is their cosine. For more it is cosine / temperature of the first with each other.
    """

    def __init__(self, transformer: Any, sentence_config: SentenceConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.sentence_config = sentence_config
        self.transformer = transformer
        self.dense = nn.ModuleList()
        self.stored_parts = {"transformer": _prefix(sentence_config, sentence_config.transformer)}
        """Child → the prefix of its names in the files of the model."""
        for path, activation in sentence_config.layers:
            if activation is not None:
                self.stored_parts[f"dense.{len(self.dense)}"] = _prefix(sentence_config, path)
                self.dense.append(Dense(path, activation, dtype))

    @property
    def config(self) -> Any:
        return self.transformer.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.transformer.get_input_embeddings()
        return embeddings

    def skeleton(self) -> EmbeddingModel:
        """Return the same model on the meta device."""
        with torch.device("meta"):
            return EmbeddingModel(skeleton(type(self.transformer), self.config), self.sentence_config)

    def with_state(
        self, load: Callable[[Any, Mapping[str, Tensor]], Any], state: Mapping[str, Tensor]
    ) -> EmbeddingModel:
        """Return a model like this one with weights by the names of files. ``load`` loads the transformer."""
        parts = {
            child: {
                name.removeprefix(prefix): value
                for name, value in state.items()
                if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
            }
            for child, prefix in self.stored_parts.items()
        }
        result = EmbeddingModel(load(self.transformer, parts.pop("transformer")), self.sentence_config, self.dtype)
        for child, part in parts.items():
            result.get_submodule(child).load_state_dict(part)
        return result.to(self.device).eval()

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

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
        vectors = pool(hidden, inputs["attention_mask"], self.sentence_config.pooling)
        dense = iter(self.dense)
        for _, activation in self.sentence_config.layers:
            vectors = F.normalize(vectors, dim=-1) if activation is None else next(dense)(vectors)
        return vectors


def pool(hidden: Tensor, mask: Tensor, modes: tuple[str, ...]) -> Tensor:
    """Pool the vectors of tokens to one per text, and concatenate the results of several poolings."""
    kept = mask.bool()
    rows = torch.arange(len(hidden), device=hidden.device)
    results = []
    for mode in modes:
        if mode == "mean":
            weights = kept.to(hidden.dtype).unsqueeze(-1)
            results.append((hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9))
        elif mode == "max":
            results.append(hidden.masked_fill(~kept.unsqueeze(-1), -torch.inf).amax(1))
        elif mode == "cls":
            results.append(hidden[rows, kept.int().argmax(1)])
        else:
            results.append(hidden[rows, hidden.shape[1] - 1 - kept.int().flip(1).argmax(1)])
    return torch.cat(results, -1)


def _prefix(sentence_config: SentenceConfig, folder: Path) -> str:
    name = folder.relative_to(sentence_config.folder).as_posix()
    return "" if name == "." else f"{name}/"


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
        self.check(index, encoding["input_ids"])
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
