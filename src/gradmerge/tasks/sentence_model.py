"""A sentence-transformers folder as one module: a transformer, pooling, dense layers, normalisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.config_diff import poolings
from ..checkpoints.open import modules_of
from ..curvature.checkpoint_names import skeleton
from ..errors import InputError
from ..io.reader import open_files
from ..io.small_files import read_json
from .resolve_model import check_small_files, check_weights

#: cos / temperature is the logit of a candidate, with the temperature of sentence-transformers' ranking losses.
TEMPERATURE = 0.05
POOLINGS = ("mean", "cls", "max", "lasttoken")
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


@dataclass(frozen=True)
class SentenceSetup:
    """What a folder says of its modules."""

    transformer: Path
    """The folder of the first module."""
    pooling: tuple[str, ...]
    steps: tuple[tuple[str, str], ...]
    """What follows the pooling: (kind, folder)."""
    folder: Path
    max_length: int | None = None
    lower_case: bool = False
    prompt: str = ""
    dense: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Folder of a dense layer → its config."""


def read_setup(reference: str, folder: Path) -> SentenceSetup:
    """The modules of a sentence-transformers folder; refused if one is not known here."""
    modules = modules_of(folder)
    kinds = [(kind.rpartition(".")[2], place) for place, kind in modules]

    def refused(why: str) -> InputError:
        return InputError(f"{reference}: task embedding {why}")

    if not kinds:
        raise refused("needs a sentence-transformers folder, with modules.json; save the model with that library")
    if kinds[0][0] != "Transformer" or len(kinds) < 2 or kinds[1][0] != "Pooling":
        raise refused(f"needs a Transformer and then Pooling, not {', '.join(kind for kind, _ in kinds[:2])}")
    first, pooling = folder / kinds[0][1], _config(folder / kinds[1][1])
    modes = poolings(pooling) or ("mean",)
    if unknown := [str(mode)[:40] for mode in modes if mode not in POOLINGS]:
        raise refused(f"knows the poolings {', '.join(POOLINGS)}, not {unknown[0]}")
    dense: dict[str, Mapping[str, Any]] = {}
    steps = []
    for kind, place in kinds[2:]:
        own = _config(folder / place)
        if any(own.get(key, "sentence_embedding") != "sentence_embedding" for key in own if key.endswith("put_name")):
            raise refused(f"knows no {kind} that works on single tokens ({place})")
        if kind == "Dense":
            dense[place] = own
            activation = str(own.get("activation_function", "Tanh")).rpartition(".")[2]
            if activation not in ACTIVATIONS:
                raise refused(f"knows no activation {activation[:40]} ({place}); known are {', '.join(ACTIVATIONS)}")
            check_weights(reference, folder / place, "model")
        elif kind not in ("Normalize", "Dropout"):
            raise refused(f"knows no module of kind {kind[:40]} ({place}); known are Dense, Normalize and Dropout")
        steps.append((kind, place))
    settings = _settings(first)
    longest = settings.get("max_seq_length")
    prompt = _prompt(folder)
    if prompt and pooling.get("include_prompt") is False:
        raise refused("knows no pooling that leaves a prompt out (include_prompt false)")
    return SentenceSetup(
        first,
        modes,
        tuple(steps),
        folder,
        longest if isinstance(longest, int) and longest > 1 else None,
        bool(settings.get("do_lower_case")),
        prompt,
        dense,
    )


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if folder.is_dir():
        check_small_files(folder)
    return read_json(path) if path.is_file() else {}


def _settings(folder: Path) -> dict[str, Any]:
    found = sorted(folder.glob("sentence_*_config.json"))
    return read_json(found[0]) if found else {}


def _prompt(folder: Path) -> str:
    """What is put before every text where nothing else is said."""
    path = folder / "config_sentence_transformers.json"
    config = read_json(path) if path.is_file() else {}
    prompts, name = config.get("prompts"), config.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    return prompt if isinstance(prompt, str) else ""


class EmbeddingModel(nn.Module):
    """Embeds the texts of an example, and says how near to the first the others are.

    Of two texts it gives their cosine; of more, cosine / temperature between the first and each of the others.
    """

    def __init__(self, transformer: Any, setup: SentenceSetup, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.setup = setup
        self.transformer = transformer
        self.dense = nn.ModuleDict()
        self.stored_parts = {"transformer": _prefix(setup, setup.transformer)}
        """Child → what precedes its names in the files of the model."""
        for number, (place, config) in enumerate(setup.dense.items()):
            layer = nn.ModuleDict({"linear": _linear(setup, place, config, dtype)})
            self.dense[str(number)] = layer
            self.stored_parts[f"dense.{number}"] = _prefix(setup, setup.folder / place)

    @property
    def config(self) -> Any:
        return self.transformer.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.transformer.get_input_embeddings()
        return found

    def skeleton(self) -> EmbeddingModel:
        """The same without memory for its weights."""
        with torch.device("meta"):
            return EmbeddingModel(skeleton(type(self.transformer), self.config), self.setup)

    def with_state(
        self, load: Callable[[Any, Mapping[str, Tensor]], Any], state: Mapping[str, Tensor]
    ) -> EmbeddingModel:
        """A model like this one with weights by the names of files; ``load`` does it for the transformer."""
        inside = {
            child: {n.removeprefix(prefix): v for n, v in state.items() if _belongs(n, prefix)}
            for child, prefix in self.stored_parts.items()
        }
        made = self.skeleton()
        made.transformer = load(self.transformer, inside.pop("transformer"))
        for child, part in inside.items():
            own = self.get_submodule(child)
            values = {name: part[name].to(value.dtype) for name, value in own.state_dict().items() if name in part}
            made.get_submodule(child).load_state_dict(values, assign=True)
        return made.to(self.device).eval()

    def forward(self, use_cache: bool | None = None, **inputs: Tensor) -> Tensor:
        more = {} if use_cache is None else {"use_cache": use_cache}
        texts = sum(name.startswith("input_ids_") for name in inputs)
        embedded = [
            self.embed({n.removesuffix(f"_{k}"): v for n, v in inputs.items() if n.endswith(f"_{k}")}, more)
            for k in range(texts)
        ]
        cosines = torch.stack([F.cosine_similarity(embedded[0], other, dim=-1) for other in embedded[1:]], 1)
        return cosines if texts == 2 else cosines / TEMPERATURE

    def embed(self, inputs: Mapping[str, Tensor], more: Mapping[str, Any]) -> Tensor:
        """One embedding per row of tokens."""
        hidden = self.transformer(**inputs, **more).last_hidden_state
        vector = pooled(hidden, inputs["attention_mask"], self.setup.pooling)
        layers = iter(self.dense.values())
        for kind, place in self.setup.steps:
            if kind == "Dense":
                name = str(self.setup.dense[place].get("activation_function", "Tanh")).rpartition(".")[2]
                vector = getattr(nn, name)()(next(layers)["linear"](vector))  # type: ignore[index]
            elif kind == "Normalize":
                vector = F.normalize(vector, dim=-1)
        return vector


def pooled(hidden: Tensor, mask: Tensor, modes: tuple[str, ...]) -> Tensor:
    """Vectors of tokens as one per text; several ways of it side by side."""
    kept = mask.bool()
    rows = torch.arange(len(hidden), device=hidden.device)
    found = []
    for mode in modes:
        if mode == "mean":
            weights = kept.to(hidden.dtype).unsqueeze(-1)
            found.append((hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9))
        elif mode == "max":
            found.append(hidden.masked_fill(~kept.unsqueeze(-1), -torch.inf).amax(1))
        elif mode == "cls":
            found.append(hidden[rows, kept.int().argmax(1)])
        else:
            found.append(hidden[rows, hidden.shape[1] - 1 - kept.int().flip(1).argmax(1)])
    return torch.cat(found, -1)


def _prefix(setup: SentenceSetup, folder: Path) -> str:
    name = folder.relative_to(setup.folder).as_posix()
    return "" if name == "." else f"{name}/"


def _belongs(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and "/" not in name.removeprefix(prefix)


def _linear(setup: SentenceSetup, place: str, config: Mapping[str, Any], dtype: torch.dtype | None) -> nn.Linear:
    """A dense layer with the weights of its folder, or without any on the device "meta"."""
    from safetensors.torch import load_file

    files = open_files(setup.folder / place, "model") or []
    state: dict[str, Tensor] = {}
    for file in files:
        file.close()
        state |= load_file(file.path)
    weight, bias = state.get("linear.weight"), state.get("linear.bias")
    if weight is None or weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise InputError(f"{setup.folder / place}: holds no dense layer (linear.weight, linear.bias)")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=dtype or weight.dtype)
    if layer.weight.device.type != "meta":
        with torch.no_grad():
            layer.weight.copy_(weight)
            if bias is not None:
                layer.bias.copy_(bias)
    return layer
