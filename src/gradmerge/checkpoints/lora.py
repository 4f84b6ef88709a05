"""PEFT LoRA adapters as checkpoints: base + scale · BA, computed a few rows at a time while a merge reads.

DoRA, m ⊙ (base + scale · BA) / ‖base + scale · BA‖ with a magnitude m for each output, reads the matrix twice.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..io.reader import PositionalFile, TensorInfo
from ..text import listed
from .adapter_config import ADVICE, PatternMatcher
from .checkpoint import Buffers, Checkpoint
from .quantization import ADVICE as UNQUANTIZED, detect_quantization
from .tied_weights import TIED, equal, has_head, is_head, same_values, tied_to
from .transformers_model import BareParameter, Slice, empty_model, find_bare_parameters, find_slices, stored_names

#: Elements of BA that are formed at once. Fixed, so that rounding does not depend on how the merge cuts its blocks.
PANEL = 1 << 16
FACTOR_KEY = re.compile(r"(.+)\.lora_(?:embedding_)?([AB]|magnitude_vector)(?:\.weight)?")

#: Type of a model → its modules whose weight is stored as (in, out), in transformers' class Conv1D.
CONV1D = dict.fromkeys(
    ("gpt2", "openai-gpt", "imagegpt", "decision_transformer"), ("c_attn", "c_proj", "c_fc", "q_attn")
)


@dataclass(frozen=True)
class Factors:
    """How LoRA changes one stored tensor: the keys of its factors in the adapter's file, and how they combine."""

    module: str
    """As PEFT names it."""
    a: str
    b: str
    scale: float
    transposed: bool
    """The weight is (in, out), as in GPT-2's Conv1D and in embeddings."""
    magnitude: str | None = None
    """DoRA's norm of each output."""
    experts: int = 1
    slice: Slice | None = None
    """The part of a bare parameter that the tensor stores."""


class AdapterCheckpoint(Checkpoint):
    """A LoRA adapter on its base: all tensors of the base, with the adapter's changes."""

    kind = "LoRA adapter"

    def __init__(
        self,
        label: str,
        folder: Path,
        config: Mapping[str, Any],
        files: list[PositionalFile],
        base: Checkpoint,
        owns_base: bool,
        hub_id: str | None = None,
    ) -> None:
        super().__init__(label, folder=folder, config=base.config, hub_id=hub_id, modules=base.modules)
        if quantization := detect_quantization(base):
            raise InputError(
                f"{label}: its base {base.label} is {quantization}. Give the unquantized model as the base. {UNQUANTIZED}"
            )
        self.adapter = Checkpoint(label, files=files)
        self.base = base
        self.factors: dict[str, Factors] = {}
        """Tensor of the base → its factors."""
        self.replaced: dict[str, str] = {}
        """Tensor of the base, or a new one → the key of the tensor that replaces it."""
        self._owns_base = owns_base
        self._config = config
        self._patterns = PatternMatcher(folder / "adapter_config.json")
        self._read_keys()
        self._check_ties()
        # The matrices of bare parameters are large: they hold all experts.
        cache_size = 2 if any(factors.slice for factors in self.factors.values()) else 8
        self._matrices_of = functools.lru_cache(maxsize=cache_size)(self._read_matrices)
        self._norms: dict[str, Tensor] = {}
        self._norms_lock = threading.Lock()

    def _refused(self, why: str) -> InputError:
        return InputError(f"{self.folder}: {why}")

    # What the adapter changes

    def _read_keys(self) -> None:
        """Assign each key of the adapter's file to the tensor of the base that it changes."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        """Module → part (A, B or magnitude_vector) → key."""
        unknown: list[str] = []
        for key in self.adapter.tensors:
            path = key.removeprefix("base_model.model.")
            if factor := FACTOR_KEY.fullmatch(path):
                self._assign(modules[factor[1]], factor[2], key)
            elif "lora_" in path or "trainable_tokens" in path:
                unknown.append(key)
            elif ".original_module." not in path:  # PEFT's copy of a module that it saves whole, for `bias: all`
                name = re.sub(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)", "", path)
                self._assign(self.replaced, self._find(name) or name, key)
        if unknown:
            raise self._refused(f"the adapter holds tensors that are not LoRA's A and B:\n{listed(unknown)}\n{ADVICE}")
        self.tensors = self.base.tensors | {name: self.adapter.tensors[key] for name, key in self.replaced.items()}
        parameters = self._bare_parameters()
        unmatched: list[str] = []
        for module, keys in modules.items():
            bare = _same_ending(module, parameters)
            added = self._add_parameter(module, keys, parameters[bare]) if bare else self._add_module(module, keys)
            unmatched += [] if added else [module]
        if unmatched:
            raise self._refused(
                f"the adapter changes modules whose weights {self.base.label} does not store, or does not hold both A "
                f"and B of them (and the magnitudes of DoRA exactly where use_dora is set):\n{listed(unmatched)}\n"
                "Was it trained on another base? A head that is tied to the embeddings must be untied first."
            )

    def _assign(self, keys: dict[str, str], name: str, key: str) -> None:
        """Assign a key, once. PEFT writes some biases under two names, with the same values."""
        first = keys.setdefault(name, key)
        if not same_values(self.adapter, first, key):
            raise self._clash(first, key)

    def _add_factors(self, name: str, factors: Factors) -> None:
        whole = self.replaced.get(name, "base_layer.")
        if name in self.factors:
            raise self._clash(self.factors[name].a, factors.a, self.factors[name].b, factors.b)
        if "base_layer." not in whole:  # PEFT stores embeddings with their factors
            raise self._clash(factors.a, whole)
        self.factors[name] = factors

    def _clash(self, *keys: str) -> InputError:
        return self._refused(
            f"several tensors of the adapter are for one tensor of {self.base.label}:\n{listed(keys)}\n"
            "Save the adapter again from the model that was trained."
        )

    def _add_module(self, module: str, keys: dict[str, str]) -> bool:
        """Add the factors of a module's weight. Return False if the base has no such weight, or factors are missing."""
        name = self._find(f"{module}.weight")
        expected = {"A", "B", *(["magnitude_vector"] if self._config.get("use_dora") else [])}
        if name is None or keys.keys() != expected:
            return False
        a, b, shape = *self._factor_shapes(module, keys), self.tensors[name].shape
        inputs, outputs = math.prod(a[1:]), b[0]
        transposed = ".lora_embedding_" in keys["A"]
        if not transposed and len(shape) == 2:
            # The config is not reliable: PEFT corrects fan_in_fan_out module by module and saves the last value.
            is_conv1d = module.rpartition(".")[2] in CONV1D.get(str(self.base.config.get("model_type")), ())
            transposed = is_conv1d if inputs == outputs else shape == (inputs, outputs)
        matrix = (inputs, outputs) if transposed else (outputs, inputs)
        if len(shape) < 2 or (shape[0], math.prod(shape[1:])) != matrix or math.prod(b[1:]) != a[0]:
            raise self._misfit(a, b, name, shape)
        magnitude = keys.get("magnitude_vector")
        if magnitude is not None and self.adapter.tensors[magnitude].numel != outputs:
            raise self._refused(f"DoRA's magnitudes of {name} are not {outputs} numbers, one for each output")
        scale = self._scale(module, a[0])
        self._add_factors(name, Factors(module, keys["A"], keys["B"], scale, transposed, magnitude))
        return True

    def _add_parameter(self, module: str, keys: dict[str, str], parameter: BareParameter) -> bool:
        """Add the factors of a bare parameter to the tensors that store it. Return False if one of them is missing.

        As in PEFT, the rows of A are ordered by expert and then by rank, the columns of B by rank and then by expert.
        """
        if keys.keys() != {"A", "B"}:
            return False
        a, b = self._factor_shapes(module, keys)
        rows, columns = parameter.shape
        rank = int(self._setting_of("r", "rank_pattern", parameter.name))
        inputs, outputs = (rows, columns) if parameter.inputs_first else (columns, rows)
        if (a, b) != ((parameter.experts * rank, inputs), (outputs, parameter.experts * rank)):
            raise self._misfit(a, b, parameter.name, (parameter.experts, rows, columns))
        slices = find_slices(self._model, parameter)
        if slices is None:
            raise self._refused(
                f"{self.base.label} does not store the rows of {parameter.name} in their order. {ADVICE}"
            )
        scale = self._scale(parameter.name, rank)
        for stored, part in slices.items():
            name = self._find(stored)
            if name is None:
                return False
            *leading, height, width = self.tensors[name].shape
            size = (part.rows.stop - part.rows.start, columns)
            flipped = part.flipped if size[0] == columns else (width, height) == size  # transformers loads both
            whole = part.expert is None and parameter.experts > 1
            if (leading, (width, height) if flipped else (height, width)) != ([parameter.experts] * whole, size):
                raise self._misfit(a, b, name, self.tensors[name].shape)
            part = replace(part, flipped=flipped)
            factors = Factors(
                module, keys["A"], keys["B"], scale, parameter.inputs_first, experts=parameter.experts, slice=part
            )
            self._add_factors(name, factors)
        return True

    def _bare_parameters(self) -> dict[str, BareParameter]:
        targets = self._config.get("target_parameters")
        if not targets:
            return {}
        if self._model is None:
            raise self._refused(
                "the adapter changes bare parameters (target_parameters), and transformers cannot build the model from "
                f"the config of {self.base.label}, so that their layout is unknown. {ADVICE}"
            )
        return find_bare_parameters(self._model, targets)

    def _factor_shapes(self, module: str, keys: Mapping[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        a, b = (self.adapter.tensors[keys[part]] for part in "AB")
        if min(len(a.shape), len(b.shape)) < 2 or 0 in a.shape + b.shape or not (a.is_float and b.is_float):
            raise self._refused(f"LoRA's factors of {module} are not matrices: {a} and {b}. Save the adapter again.")
        return a.shape, b.shape

    def _misfit(self, a: tuple[int, ...], b: tuple[int, ...], name: str, shape: tuple[int, ...]) -> InputError:
        return self._refused(
            f"LoRA's A {list(a)} and B {list(b)} do not fit {name} {list(shape)} of {self.base.label}. "
            "Was it trained on another base?"
        )

    def _scale(self, path: str, rank: int) -> float:
        alpha = self._setting_of("lora_alpha", "alpha_pattern", path)
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _setting_of(self, key: str, pattern_key: str, path: str) -> float:
        """Return the value of the first pattern that matches the end of the path, or else that of the key."""
        for pattern, value in (self._config.get(pattern_key) or {}).items():
            if self._patterns.fullmatch(rf"(.*\.)?({pattern})", path):
                return float(value)
        value = self._config.get(key)
        return 8.0 if value is None else float(value)  # PEFT's default of both settings

    def _find(self, name: str) -> str | None:
        """Return the base's tensor of this name. One of the two names may lack the first part, such as `model.`."""
        stored = _same_ending(name, self.base.tensors) or self._stored_names.get(name)
        return stored if stored is not None and stored in self.base.tensors else None

    @functools.cached_property
    def _model(self) -> Any:
        return empty_model(self.base)

    @functools.cached_property
    def _stored_names(self) -> dict[str, str]:
        """Names in memory → names in files, where transformers renames tensors while it loads them."""
        return stored_names(self._model)

    def _check_ties(self) -> None:
        """Refuse to change one of two tensors that the base stores as one.

        PEFT changes a copy of the targeted module and leaves the other as it was. The merged model, with the config of
        the base, would have both changed, or neither.
        """
        changed = self.replaced.keys() | self.factors.keys()
        for name in TIED:
            source = tied_to(name, self.base)
            if source is None or not {name, source} & changed or (is_head(name) and not has_head(self.base)):
                continue
            if name in self.base.tensors and not same_values(self.base, name, source):
                continue  # the base has a separate head
            if {name, source} <= self.replaced.keys() - self.factors.keys() and same_values(self, name, source):
                continue
            changed_name, other_name = (source, name) if source in changed else (name, source)
            raise self._refused(
                f"the adapter changes {changed_name}, which {self.base.label} shares with {other_name}, and PEFT "
                "changes it alone: the result would no longer be one tensor. Give a base whose embeddings are untied "
                "(tie_word_embeddings false, both tensors stored), or train with ensure_weight_tying."
            )

    # For adapters that are written (engine/adapter)

    def changes(self, name: str) -> bool:
        """Return whether the adapter changes a tensor."""
        return name in self.factors or name in self.replaced

    def has_only_factors(self, name: str) -> bool:
        """Return whether a tensor is that of the base plus scale · BA of its module, and nothing more."""
        factors = self.factors.get(name)
        if factors is None or factors.magnitude is not None or factors.slice is not None:
            return False
        key = self.replaced.get(name)  # PEFT saves embeddings with their factors, though they are the base's
        if key is None:
            return True
        same = self.adapter.tensors[key] == self.base.tensors[name]
        return same and equal((self.adapter, key), (self.base, name), lambda block: block.view(torch.uint8))

    def read_factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return scale · B (out × rank) and A (rank × in) of a module, in float64."""
        factors = self.factors[name]
        a, b = (self.adapter.read_whole(key).double().flatten(1) for key in (factors.a, factors.b))
        return b * factors.scale, a

    # Reading

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        holder, stored = self._source(name)
        block = holder.read(stored, start, stop, buffers, slot)
        if stop <= start or name not in self.factors:
            return block
        result = _widened(block)
        self._add_product(name, start, stop, result)
        if self.factors[name].magnitude is not None:
            scales, columns = self._dora_scales(name), _columns(self.tensors[name])
            entries = torch.arange(start, stop)
            outputs = entries % columns if self.factors[name].transposed else entries // columns
            result *= scales[outputs].to(result.dtype)
        return result

    def _source(self, name: str) -> tuple[Checkpoint, str]:
        """Return the checkpoint and the name under which the unchanged tensor is stored."""
        return (self.adapter, self.replaced[name]) if name in self.replaced else (self.base, name)

    def _add_product(self, name: str, start: int, stop: int, result: Tensor) -> None:
        """Add scale · BA to elements ``start`` to ``stop``, a panel of rows at a time."""
        left, right = self._product_of(name, result.dtype)
        rows, columns = left.shape[1], right.shape[2]
        step = max(1, PANEL // columns)
        row = start // columns  # of all matrices below each other
        while row * columns < stop:
            matrix, first = row // rows, row % rows // step * step
            panel = (left[matrix, first : first + step] @ right[matrix]).reshape(-1)
            begin = (matrix * rows + first) * columns
            low, high = max(start, begin), min(stop, begin + panel.numel())
            result[low - start : high - start] += panel[low - begin : high - begin]
            row = matrix * rows + min(first + step, rows)

    def _product_of(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return matrices (left, right) with left @ right = scale · BA in the layout of the stored tensor.

        Both have three dimensions; the first is 1, or the number of experts in the tensor.
        """
        factors = self.factors[name]
        left, right = self._matrices_of(replace(factors, slice=None), dtype)
        if (part := factors.slice) is not None:
            expert = slice(None) if part.expert is None else slice(part.expert, part.expert + 1)
            left, right = left[expert, part.rows], right[expert]
            left, right = (right.mT, left.mT) if part.flipped else (left, right)
        return left, right

    def _read_matrices(self, factors: Factors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the matrices of :meth:`_product_of` in the layout of the module or parameter, for all its experts."""
        a, b = (self.adapter.read_whole(key).to(dtype).flatten(1) for key in (factors.a, factors.b))
        right = a.reshape(factors.experts, -1, a.shape[1])
        left = b.reshape(b.shape[0], -1, factors.experts).permute(2, 0, 1)
        if factors.transposed:
            left, right = right.mT, left.mT
        return (left * factors.scale).contiguous(), right.contiguous()

    def _dora_scales(self, name: str) -> Tensor:
        """Return DoRA's scale of each output: its magnitude over the norm of its row of base + scale · BA."""
        with self._norms_lock:  # other threads would compute the same
            if name not in self._norms:
                factors, info, (holder, stored) = self.factors[name], self.tensors[name], self._source(name)
                assert factors.magnitude is not None
                columns, buffers = _columns(info), Buffers()
                squares = torch.zeros(columns if factors.transposed else info.shape[0], dtype=torch.float64)
                step = max(1, PANEL // columns)
                for row in range(0, info.shape[0], step):
                    start, stop = row * columns, min((row + step) * columns, info.numel)
                    block = _widened(holder.read(stored, start, stop, buffers))
                    self._add_product(name, start, stop, block)
                    part = block.double().square_().reshape(-1, columns)
                    if factors.transposed:
                        squares += part.sum(0)
                    else:
                        squares[row : row + step] = part.sum(1)
                self._norms[name] = self.adapter.read_whole(factors.magnitude).double().flatten() / squares.sqrt()
            return self._norms[name]

    def will_need(self, name: str) -> None:
        holder, stored = self._source(name)
        holder.will_need(stored)

    def files(self) -> list[Path]:
        return [*self.adapter.files(), *(self.base.files() if self._owns_base else [])]

    def close(self) -> None:
        self.adapter.close()
        if self._owns_base:
            self.base.close()


def _same_ending(name: str, names: Collection[str]) -> str | None:
    """Return a name among ``names``, or the one that differs from it by a missing or additional first part."""
    if name in names:
        return name
    if (shorter := name.partition(".")[2]) in names:
        return shorter
    longer = [other for other in names if other.endswith(f".{name}")]
    return longer[0] if len(longer) == 1 else None


def _widened(block: Tensor) -> Tensor:
    """Return a copy in float32, or in float64 if that is its type."""
    return block.to(torch.float64 if block.dtype == torch.float64 else torch.float32, copy=True)


def _columns(info: TensorInfo) -> int:
    return math.prod(info.shape[1:])
