"""PEFT LoRA adapters as checkpoints: base + scale · BA, computed a few rows at a time while a merge reads.

DoRA, m ⊙ (base + scale · BA) / ‖base + scale · BA‖ with a magnitude m for each output, reads the matrix twice.
"""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError
from torch import Tensor

from ..errors import InputError
from ..io.reader import PositionalFile, TensorInfo
from ..io.small_files import read_json, require_within
from ..text import listed
from .checkpoint import Buffers, Checkpoint
from .quantization import ADVICE as UNQUANTIZED, detect_quantization
from .tied_weights import TIED, equal, has_head, is_head, same_values, tied_to
from .transformers_model import Slice, empty_model, find_slices, revert_names

#: Elements of BA that are formed at once. Fixed, so that rounding does not depend on how the merge cuts its blocks.
PANEL = 1 << 16
FACTOR_KEY = re.compile(r"(.+)\.lora_(?:embedding_)?([AB]|magnitude_vector)(?:\.weight)?")
#: Type of a model → its modules whose weight is stored as (in, out), in transformers' class Conv1D.
CONV1D = dict.fromkeys(
    ("gpt2", "openai-gpt", "imagegpt", "decision_transformer"), ("c_attn", "c_proj", "c_fc", "q_attn")
)

# The config of an adapter

#: Settings of adapters whose weights are not base + scale · BA.
UNSUPPORTED = (
    "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
    "monteclora_config", "megatron_config", "trainable_token_indices", "lora_bias",
)  # fmt: skip
#: Initializations that also change the base's weights, which the adapter's file does not show.
CHANGES_BASE = {"pissa", "olora", "corda", "loftq", "lora_ga"}
ADVICE = "Merge it into its base with PEFT (merge_and_unload) first."
#: Limits on the regular expressions of a config: seconds for all matches, and characters of one.
PATTERN_SECONDS = 10.0
PATTERN_LENGTH = 10_000


class _FieldTypes(BaseModel):
    """The types of the fields that gradmerge or PEFT reads. Other fields may have any type."""

    model_config = ConfigDict(strict=True)

    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: int | None = None
    lora_alpha: FiniteFloat = 8
    lora_dropout: float | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, FiniteFloat] | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | str | None = None
    layers_pattern: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    bias: str | None = None
    init_lora_weights: bool | str | None = None
    fan_in_fan_out: bool | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    lora_bias: bool | None = None
    ensure_weight_tying: bool | None = None


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the fields of adapter_config.json; raise if one has a wrong type, or the adapter cannot be merged."""
    path = folder / "adapter_config.json"
    require_within(path, folder)
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{folder}: a PEFT adapter of type {kind}; only LORA adapters can be merged. {ADVICE}")
    try:
        _FieldTypes.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, value = first["loc"][0], repr(first["input"])[:80]
        raise InputError(f"{path}: {field} is invalid ({value}): {first['msg']}") from None
    for key in UNSUPPORTED:
        if config.get(key):
            raise InputError(f"{folder}: the adapter uses {key}, which is not base + scale · BA. {ADVICE}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.partition("_niter")[0].lower() in CHANGES_BASE:
        raise InputError(
            f"{folder}: the adapter was initialized with {init}, which changed the base's weights. Convert it to a "
            "plain LoRA adapter with PEFT first."
        )
    return config


class PatternMatcher:
    """Matches names against the regular expressions of one adapter config, within one time limit for all of them.

    Python's ``re`` has no time limit, and a pattern from a stranger can take forever.
    """

    def __init__(self, config: Path) -> None:
        self._config, self._seconds_left = config, PATTERN_SECONDS

    def fullmatch(self, pattern: str, name: str) -> bool:
        import regex  # type: ignore[import-untyped]

        begin = time.perf_counter()
        try:
            if len(pattern) > PATTERN_LENGTH or self._seconds_left <= 0:
                raise TimeoutError("too long")
            return regex.fullmatch(pattern, name, timeout=self._seconds_left) is not None
        except (TimeoutError, regex.error, RecursionError, OverflowError, ValueError) as error:
            raise InputError(
                f"{self._config}: the regular expression {pattern[:80]!r} is not valid, or the patterns take longer "
                f"than {PATTERN_SECONDS:g} seconds ({error}). Replace them by names."
            ) from error
        finally:
            self._seconds_left -= time.perf_counter() - begin


# The tensors of an adapter


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
            raise InputError(f"{label}: its base {base.label} is {quantization}. {UNQUANTIZED}")
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
        self._dora_scales: dict[str, Tensor] = {}
        self._dora_lock = threading.Lock()

    def _error(self, why: str) -> InputError:
        return InputError(f"{self.folder}: {why}")

    # What the adapter changes

    def _read_keys(self) -> None:
        """Assign each key of the adapter's file to the tensor of the base that it changes."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        """Module → part (A, B or magnitude_vector) → key."""
        for key in self.adapter.tensors:
            path = key.removeprefix("base_model.model.")
            if factor := FACTOR_KEY.fullmatch(path):
                self._assign(modules[factor[1]], factor[2], key)
            elif "lora_" in path or "trainable_tokens" in path:
                raise self._error(f"the adapter's tensor {key} is not one of LoRA's A and B. {ADVICE}")
            elif ".original_module." not in path:  # PEFT's copy of a module that it saves whole, for `bias: all`
                name = re.sub(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)", "", path)
                self._assign(self.replaced, self._find(name) or name, key)
        self.tensors = self.base.tensors | {name: self.adapter.tensors[key] for name, key in self.replaced.items()}
        parameters = self._bare_parameters()
        unmatched: list[str] = []
        for module, keys in modules.items():
            bare = _same_ending(module, parameters)
            added = self._add_parameter(module, keys, parameters[bare]) if bare else self._add_module(module, keys)
            unmatched += [] if added else [module]
        if unmatched:
            raise self._error(
                f"the adapter changes modules whose weights {self.base.label} does not store, or does not hold both A "
                f"and B of them (and the magnitudes of DoRA exactly where use_dora is set):\n{listed(unmatched)}\n"
                "Was it trained on another base? A head that is tied to the embeddings must be untied first."
            )

    def _assign(self, keys: dict[str, str], name: str, key: str) -> None:
        """Assign a key to a name. Raise if it has another key with other values: PEFT writes some biases twice."""
        first = keys.setdefault(name, key)
        if not same_values(self.adapter, first, key):
            raise self._clash(first, key)

    def _add_factors(self, name: str, factors: Factors) -> None:
        if name in self.factors:
            raise self._clash(self.factors[name].a, factors.a)
        if "base_layer." not in self.replaced.get(name, "base_layer."):  # PEFT stores embeddings with their factors
            raise self._clash(self.replaced[name], factors.a)
        self.factors[name] = factors

    def _clash(self, *keys: str) -> InputError:
        return self._error(
            f"several tensors of the adapter are for one tensor of {self.base.label}:\n{listed(keys)}\n"
            "Save the adapter again from the model that was trained."
        )

    def _add_module(self, module: str, keys: dict[str, str]) -> bool:
        """Add the factors of a module's weight. Return False if the base lacks the weight, or factors are missing."""
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
            raise self._error(f"DoRA's magnitudes of {name} are not {outputs} numbers, one for each output")
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
        name, (*leading, rows, columns), inputs_first = parameter
        experts = math.prod(leading)
        rank = int(self._setting_of("r", "rank_pattern", name))
        inputs, outputs = (rows, columns) if inputs_first else (columns, rows)
        if (a, b) != ((experts * rank, inputs), (outputs, experts * rank)):
            raise self._misfit(a, b, name, parameter.shape)
        slices = find_slices(self._model, name)
        if slices is None:
            raise self._error(f"{self.base.label} does not store the rows of {name} in their order. {ADVICE}")
        factors = Factors(module, keys["A"], keys["B"], self._scale(name, rank), inputs_first, experts=experts)
        for stored, part in slices.items():
            tensor = self._find(stored)
            if tensor is None:
                return False
            shape = (part.rows.stop - part.rows.start, columns)
            shape = shape[::-1] if part.flipped else shape
            if self.tensors[tensor].shape != (*(leading if part.expert is None else []), *shape):
                raise self._misfit(a, b, tensor, self.tensors[tensor].shape)
            self._add_factors(tensor, replace(factors, slice=part))
        return True

    def _bare_parameters(self) -> dict[str, BareParameter]:
        """Return the parameters that PEFT adapts by their names, by the modules that get their factors.

        PEFT wraps a module once for each of its parameters, in their order: the factors of the last are the module's,
        those of the one before are its `base_layer`'s, and so on.
        """
        targets = self._config.get("target_parameters") or ()
        if targets and self._model is None:
            raise self._error(
                "the adapter changes bare parameters (target_parameters), and transformers cannot build the model from "
                f"the config of {self.base.label}, so that their layout is unknown. {ADVICE}"
            )
        result: dict[str, BareParameter] = {}
        for path, module in self._model.named_modules() if targets else ():
            parameters = [
                (f"{path}.{name}", tuple(parameter.shape))
                for name, parameter in module.named_parameters(recurse=False)
                if any(f".{path}.{name}".endswith(f".{target}") for target in targets)
            ]
            for depth, (name, shape) in enumerate(reversed(parameters)):
                if len(shape) in (2, 3) and shape[:-2] != (1,):  # PEFT cannot merge others
                    inputs_first = len(shape) == 3 and bool(getattr(module, "is_transposed", False))
                    result[path + ".base_layer" * depth] = BareParameter(name, shape, inputs_first)
        return result

    def _factor_shapes(self, module: str, keys: Mapping[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        a, b = (self.adapter.tensors[keys[part]] for part in "AB")
        if min(len(a.shape), len(b.shape)) < 2 or 0 in a.shape + b.shape or not (a.is_float and b.is_float):
            raise self._error(f"LoRA's factors of {module} are not matrices: {a} and {b}. Save the adapter again.")
        return a.shape, b.shape

    def _misfit(self, a: tuple[int, ...], b: tuple[int, ...], name: str, shape: tuple[int, ...]) -> InputError:
        return self._error(
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
        stored = _same_ending(name, self.base.tensors)
        if stored is None and self._model is not None:  # transformers may rename tensors while it loads them
            stored = next(iter(revert_names(self._model, {name: torch.empty(0)})), None)
        return stored if stored in self.base.tensors else None

    @functools.cached_property
    def _model(self) -> Any:
        return empty_model(self.base)

    def _check_ties(self) -> None:
        """Raise if the adapter changes only one of two tied tensors.

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
            raise self._error(
                f"the adapter changes {changed_name}, which {self.base.label} shares with {other_name}, and PEFT "
                "changes it alone: the result would no longer be one tensor. Give a base whose embeddings are untied "
                "(tie_word_embeddings false, both tensors stored), or train with ensure_weight_tying."
            )

    # For adapters that are written (engine/adapter)

    def changes(self, name: str) -> bool:
        """Return whether the adapter changes a tensor."""
        return name in self.factors or name in self.replaced

    def has_only_factors(self, name: str) -> bool:
        """Return whether the adapter changes a tensor only by scale · BA."""
        factors = self.factors.get(name)
        if factors is None or factors.magnitude is not None or factors.slice is not None:
            return False
        key = self.replaced.get(name)  # PEFT saves embeddings with their factors, though they are the base's
        return key is None or equal((self.adapter, key), (self.base, name))

    def read_factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return scale · B (out × rank) and A (rank × in) of a module, in float64."""
        factors = self.factors[name]
        a, b = (self.adapter.read_whole(key).double().flatten(1) for key in (factors.a, factors.b))
        return b * factors.scale, a

    # Reading

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        if name not in self.factors or stop <= start:
            holder, stored = self._source(name)
            return holder.read(stored, start, stop, buffers, slot)
        result = self._read_sum(name, start, stop, buffers, slot)
        if self.factors[name].magnitude is not None:
            scales, columns = self._scales_of_dora(name), _columns(self.tensors[name])
            entries = torch.arange(start, stop)
            outputs = entries % columns if self.factors[name].transposed else entries // columns
            result *= scales[outputs].to(result.dtype)
        return result

    def _source(self, name: str) -> tuple[Checkpoint, str]:
        """Return where a tensor without its factors is stored: the adapter or the base, and the name there."""
        return (self.adapter, self.replaced[name]) if name in self.replaced else (self.base, name)

    def _read_sum(self, name: str, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        """Return elements of base + scale · BA, in float64 if the base is, else in float32, panel by panel."""
        holder, stored = self._source(name)
        block = holder.read(stored, start, stop, buffers, slot)
        result = block.to(torch.float64 if block.dtype == torch.float64 else torch.float32, copy=True)
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
        return result

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

    def _scales_of_dora(self, name: str) -> Tensor:
        """Return DoRA's scale of each output: its magnitude over the norm of its row of base + scale · BA."""
        with self._dora_lock:  # other threads would compute the same
            if name not in self._dora_scales:
                magnitude, axis = self.factors[name].magnitude, 0 if self.factors[name].transposed else 1
                assert magnitude is not None
                info, columns, buffers = self.tensors[name], _columns(self.tensors[name]), Buffers()
                step = max(1, PANEL // columns) * columns
                blocks = (
                    self._read_sum(name, start, min(start + step, info.numel), buffers, "dora")
                    for start in range(0, info.numel, step)
                )
                squares = [block.double().square_().view(-1, columns).sum(axis) for block in blocks]
                norms = (torch.cat(squares) if axis else torch.stack(squares).sum(0)).sqrt()
                self._dora_scales[name] = self.adapter.read_whole(magnitude).double().flatten() / norms
            return self._dora_scales[name]

    def will_need(self, name: str) -> None:
        holder, stored = self._source(name)
        holder.will_need(stored)

    def files(self) -> list[Path]:
        return [*self.adapter.files(), *(self.base.files() if self._owns_base else [])]

    def close(self) -> None:
        self.adapter.close()
        if self._owns_base:
            self.base.close()


class BareParameter(NamedTuple):
    """A parameter that PEFT adapts by its name (`target_parameters`), such as the fused experts of a layer."""

    name: str
    shape: tuple[int, ...]
    """Experts, rows and columns, or rows and columns."""
    inputs_first: bool
    """Rows are inputs and columns outputs, as in gpt-oss."""


def _same_ending(name: str, names: Collection[str]) -> str | None:
    """Return a name among ``names``, or the one that differs from it by a missing or additional first part."""
    if name in names:
        return name
    if (shorter := name.partition(".")[2]) in names:
        return shorter
    longer = [other for other in names if other.endswith(f".{name}")]
    return longer[0] if len(longer) == 1 else None


def _columns(info: TensorInfo) -> int:
    return math.prod(info.shape[1:])
