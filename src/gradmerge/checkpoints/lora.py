"""PEFT LoRA adapters as checkpoints: base + scale · BA, formed a few rows at a time while the merge reads.

DoRA, m ⊙ (base + scale · BA) / ‖base + scale · BA‖ with a magnitude m for each output, reads the matrix twice.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..io.reader import PositionalFile
from ..text import listed
from .adapter_config import ADVICE
from .bare_parameters import BareParameter, Slice, find_bare_parameters, find_slices
from .checkpoint import Buffers, Checkpoint
from .compat.tied_weights import TIED, equal, has_head, in_layer, is_head, same_values, tied_to, ties_of_class
from .conv1d import stores_inputs_first
from .hf_key_conversion import empty_model_of, stored_by_class
from .quantization import refuse_quantized
from .regex_timeout import Patterns

#: Elements of BA that are formed at once. Fixed, so that rounding does not depend on how the merge cuts its blocks.
PANEL = 1 << 16

#: Tasks whose models have no head that could be tied to an embedding.
HEADLESS = {"SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"}


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
        refuse_quantized(base, adapter=label)
        self.adapter = Checkpoint(label, files=files)
        self.base = base
        self._owns_base = owns_base
        self._settings = config
        self._patterns = Patterns(f"{folder / 'adapter_config.json'}: rank_pattern or alpha_pattern")
        self.factors: dict[str, Factors] = {}
        """Tensor of the base → its factors."""
        self.replaced: dict[str, str] = {}
        """Tensor of the base, or a new one → the key of the tensor that replaces it."""
        self._bias_changes: dict[str, tuple[str, float]] = {}
        """Bias of the base → the key of LoRA's bias, and its scale."""
        self._token_rows: dict[str, tuple[str, list[int]]] = {}
        """Embedding of the base → the key of the rows that replace some of its rows, and their numbers."""
        self._read_keys()
        self.tensors = dict(base.tensors)
        for name, key in self.replaced.items():
            self.tensors[name] = self.adapter.tensors[key]
        if config.get("task_type") not in HEADLESS:
            self._check_ties()
        for name, factors in self.factors.items():
            self._check_factors(name, factors)
        # The matrices of bare parameters are large: they hold all experts.
        kept = 2 if any(factors.slice for factors in self.factors.values()) else 8
        self._matrices_of = functools.lru_cache(maxsize=kept)(self._read_matrices)
        self._norms: dict[str, Tensor] = {}
        self._norms_lock = threading.Lock()

    def _refused(self, why: str) -> InputError:
        return InputError(f"{self.folder}: {why}")

    # What the adapter changes

    def _read_keys(self) -> None:
        """Assign each key of the adapter's file to the tensor of the base that it changes."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        """Module → part (A, B, B.bias or magnitude_vector) → key."""
        claims: dict[tuple[str, str], list[str]] = defaultdict(list)
        """A tensor or module and a part of it → the keys that give its values."""
        unknown: list[str] = []
        for key in self.adapter.tensors:
            path = key.removeprefix("base_model.model.")
            lora = re.fullmatch(r"(.+)\.lora_(?:embedding_)?([AB]|B\.bias|magnitude_vector)(?:\.weight)?", path)
            tokens = re.fullmatch(r"(.+)\.token_adapter\.trainable_tokens_delta", path)
            if lora:
                modules[lora[1]][lora[2]] = key
                claims[lora[1], lora[2]].append(key)
            elif tokens and self._settings.get("trainable_token_indices"):
                self._add_token_rows(tokens[1], key)
            elif "lora_" in path or "trainable_tokens" in path:
                unknown.append(key)
            elif ".original_module." not in path:  # PEFT's copy of a module that it saves whole, for `bias: all`
                name = re.sub(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)", "", path)
                name = self._find(name) or name
                self.replaced[name] = key
                claims[name, "whole"].append(key)
                if ".base_layer." not in key:  # PEFT stores embeddings with their factors
                    claims[name, "A"].append(key)
        if unknown:
            raise self._refused(f"the adapter holds tensors that are not LoRA's A and B:\n{listed(unknown)}\n{ADVICE}")
        bare = self._bare_parameters()
        unmatched: list[str] = []
        for module, keys in modules.items():
            parameter = _look_up(bare, module)
            names = self._add_parameter(module, keys, parameter) if parameter else self._add_module(module, keys)
            unmatched += [] if names else [module]
            for name in names:
                claims[name, "A"].append(keys["A"])
                claims[name, "B"].append(keys["B"])
        self._refuse_clashes(claims.values())
        if unmatched:
            self._refuse_unmatched(unmatched)

    def _add_module(self, module: str, keys: dict[str, str]) -> list[str]:
        """Add the factors of a module's weight; return the weight's name, or nothing if the base has no such weight."""
        expected = {"A", "B", *(["magnitude_vector"] if self._settings.get("use_dora") else [])}
        target = self._find(f"{module}.weight")
        if target is None or keys.keys() - {"B.bias"} != expected:
            return []
        a, b = self._factor_shapes(module, keys)
        scale = self._scale(module, a[0])
        is_embedding = "lora_embedding_" in keys["A"]
        transposed = stores_inputs_first(self.base.tensors, target, (b[0], a[1]), is_embedding, self._settings)
        self.factors[target] = Factors(
            module, keys["A"], keys["B"], scale, transposed, magnitude=keys.get("magnitude_vector")
        )
        if "B.bias" in keys:
            self._add_bias(f"{module}.bias", keys["B.bias"], scale)
        return [target]

    def _add_parameter(self, module: str, keys: dict[str, str], parameter: BareParameter) -> list[str]:
        """Add the factors of a bare parameter to the tensors that store it; return their names.

        As in PEFT, the rows of A are ordered by expert and then by rank, the columns of B by rank and then by expert.
        """
        if keys.keys() != {"A", "B"}:
            return []
        a, b = self._factor_shapes(module, keys)
        rows, columns = parameter.shape
        experts, rank = parameter.experts, int(self._setting_of("r", 8, "rank_pattern", parameter.name))
        sizes = (columns, rows) if not parameter.inputs_first else (rows, columns)
        if (a, b) != ((experts * rank, sizes[0]), (sizes[1], experts * rank)):
            raise self._misfit(a, b, parameter.name, (experts, rows, columns))
        slices = find_slices(self._model, parameter)
        if slices is None:
            raise self._refused(
                f"{self.base.label} does not store the rows of {parameter.name} in their order. {ADVICE}"
            )
        scale = self._scale(parameter.name, rank)
        names = []
        for stored, part in slices.items():
            if (name := self._find(stored)) is None:
                return []
            if part.expert is None and self._is_flipped(name, part, parameter):
                part = Slice(None, part.rows, not part.flipped)
            self.factors[name] = Factors(
                module, keys["A"], keys["B"], scale, parameter.inputs_first, experts=experts, slice=part
            )
            names.append(name)
        return names

    def _is_flipped(self, name: str, part: Slice, parameter: BareParameter) -> bool:
        """Whether a stored tensor is the transpose of the expected one, which transformers loads as well."""
        shape = (part.rows.stop - part.rows.start, parameter.shape[1])
        expected = shape[::-1] if part.flipped else shape
        return self.base.tensors[name].shape[-2:] == expected[::-1] != expected

    def _bare_parameters(self) -> dict[str, BareParameter]:
        targets = self._settings.get("target_parameters")
        if not targets:
            return {}
        if self._model is None:
            raise self._refused(
                "the adapter changes bare parameters (target_parameters), and transformers cannot build the model from "
                f"the config of {self.base.label}, so that their layout is unknown. {ADVICE}"
            )
        return find_bare_parameters(self._model, targets)

    @functools.cached_property
    def _model(self) -> Any:
        return empty_model_of(self.base)

    def _factor_shapes(self, module: str, keys: Mapping[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        a, b = (self.adapter.tensors[keys[part]].shape for part in "AB")
        if min(len(a), len(b)) < 2 or 0 in a + b:
            shapes = f"{list(a)} and {list(b)}"
            raise self._refused(f"LoRA's factors of {module} are not matrices: {shapes}. Save the adapter again.")
        return a, b

    def _scale(self, path: str, rank: int) -> float:
        alpha = self._setting_of("lora_alpha", 8, "alpha_pattern", path)
        return alpha / (math.sqrt(rank) if self._settings.get("use_rslora") else rank)

    def _setting_of(self, key: str, default: float, pattern_key: str, path: str) -> float:
        """The value of the first pattern that matches the end of the path, or else that of the key, as in PEFT."""
        patterns = self._settings.get(pattern_key) or {}
        matching = (value for pattern, value in patterns.items() if self._patterns.fits(rf"(.*\.)?({pattern})", path))
        value = self._settings.get(key)
        return float(next(matching, default if value is None else value))

    def _add_bias(self, name: str, key: str, scale: float) -> None:
        target, size = self._find(name), self.adapter.tensors[key].numel
        if target is None or self.base.tensors[target].numel != size or not self.base.tensors[target].is_float:
            raise self._refused(f"{self.base.label} has no {name} of {size} numbers that {key} could be added to")
        self._bias_changes[target] = (key, scale)
        if not self._settings.get("lora_bias") and not self.notes:
            self.notes.append(
                f"{self.label}: lora_bias is not set in its config, but it holds biases. They are added; PEFT ignores "
                "them"
            )

    def _add_token_rows(self, module: str, key: str) -> None:
        """Add the trained rows of an embedding (`trainable_token_indices`), and of a head that is tied to it."""
        rows: Any = self._settings["trainable_token_indices"]
        if isinstance(rows, Mapping):
            rows = next((value for end, value in rows.items() if f".{module}".endswith(f".{end}")), None)
        name = self._find(f"{module}.weight")
        shape = self.base.tensors[name].shape if name is not None else ()
        if name is None or rows is None or len(shape) != 2 or self.adapter.tensors[key].shape != (len(rows), shape[1]):
            raise self._refused(f"trainable_token_indices and {key} do not fit an embedding of {self.base.label}")
        if rows and not 0 <= min(rows) <= max(rows) < shape[0]:
            raise self._refused(f"trainable_token_indices names rows that {name} of {self.base.label} does not have")
        heads = (head for head in {**TIED, **ties_of_class(self.base)} if tied_to(head, self.base) == name)
        for tied in (name, *(head for head in heads if head in self.base.tensors)):
            if same_values(self.base, tied, name):
                self._token_rows[tied] = (key, rows)

    def _find(self, name: str) -> str | None:
        """The base's tensor of this name, also if one of the two lacks a leading part."""
        tensors = self.base.tensors
        for candidate in (name, name.partition(".")[2]):
            if candidate in tensors:
                return candidate
        longer = [stored for stored in tensors if stored.endswith(f".{name}")]
        if len(longer) == 1:
            return longer[0]
        renamed = self._by_class.get(name)
        return renamed if renamed in tensors else None

    @functools.cached_property
    def _by_class(self) -> dict[str, str]:
        """Names in memory → names in files, where transformers renames tensors while it loads them."""
        return stored_by_class(self.base)

    # Checks

    def _refuse_clashes(self, claims: Iterable[list[str]]) -> None:
        """Refuse two keys for one tensor, unless they hold the same: PEFT writes some biases under two names."""
        clashes = [
            f"{keys[0]} and {key}" for keys in claims for key in keys[1:] if not same_values(self.adapter, keys[0], key)
        ]
        if clashes:
            raise self._refused(
                f"two tensors of the adapter are for one tensor of {self.base.label}, of which one would be lost:\n"
                f"{listed(clashes)}\nSave the adapter again from the model that was trained."
            )

    def _refuse_unmatched(self, modules: list[str]) -> None:
        for name in (f"{module}.weight" for module in modules):
            if tied := tied_to(name, self.base):
                raise self._refused(
                    f"the adapter changes {name}, which {self.base.label} shares with {tied}: the result would no "
                    "longer be one tensor. Untie the embeddings of the base first."
                )
        raise self._refused(
            f"the adapter changes modules that {self.base.label} does not have, or does not hold both A and B of "
            f"them (and the magnitudes of DoRA exactly where use_dora is set):\n{listed(modules)}\n"
            "Was it trained on another base?"
        )

    def _check_ties(self) -> None:
        """Refuse to change one of two tensors that the base stores as one.

        PEFT changes a copy of the targeted module and leaves the other as it was. The merged model, with the config of
        the base, would have both changed, or neither.
        """
        changed = self.replaced.keys() | self.factors.keys()
        ties = {name: {name, *sources} for name, sources in TIED.items()}
        if any(not in_layer(name) and name not in set().union(*ties.values()) for name in changed):
            for name, tied in ties_of_class(self.base).items():
                ties.setdefault(name, {name}).add(tied)
        for name in (name for name, either in ties.items() if either & changed):
            source = tied_to(name, self.base)
            if source is None or not {name, source} & changed or (is_head(name) and not has_head(self.base)):
                continue
            if name in self.base.tensors and not same_values(self.base, name, source):
                continue
            if {name, source} <= self.replaced.keys() - self.factors.keys() and same_values(self, name, source):
                continue
            which, rest = (source, name) if source in changed else (name, source)
            raise self._refused(
                f"the adapter changes {which}, which {self.base.label} shares with {rest}, and PEFT changes it alone: "
                "the result would no longer be one tensor. Give a base whose embeddings are untied "
                "(tie_word_embeddings false, both tensors stored), or train with ensure_weight_tying."
            )

    def _check_factors(self, name: str, factors: Factors) -> None:
        """Refuse factors whose shapes or types do not fit the tensor."""
        infos = [self.adapter.tensors[factors.a], self.adapter.tensors[factors.b], self.tensors[name]]
        a, b, shape = (info.shape for info in infos)
        matrix = (b[0], math.prod(a[1:]))
        matrix = matrix[::-1] if factors.transposed else matrix
        if (part := factors.slice) is not None:
            matrix = (part.rows.stop - part.rows.start, matrix[1])
            matrix = matrix[::-1] if part.flipped else matrix
            fits = shape == ((factors.experts, *matrix) if part.expert is None and factors.experts > 1 else matrix)
        else:
            fits = math.prod(b[1:]) == a[0] and len(shape) >= 2 and (shape[0], math.prod(shape[1:])) == matrix
        if not fits:
            raise self._misfit(a, b, name, shape)
        if factors.magnitude is not None:
            infos.append(magnitude := self.adapter.tensors[factors.magnitude])
            if magnitude.numel != b[0]:
                raise self._refused(f"DoRA's magnitudes of {name} are {magnitude.numel}, for {b[0]} outputs")
        for info in infos:
            if not info.is_float:
                what = f"{name} or its LoRA factors have the type {info.dtype}"
                raise self._refused(f"{what}; quantized weights cannot be merged")

    def _misfit(self, a: tuple[int, ...], b: tuple[int, ...], name: str, shape: tuple[int, ...]) -> InputError:
        return self._refused(
            f"LoRA's A {list(a)} and B {list(b)} do not fit {name} {list(shape)} of {self.base.label}. "
            "Was it trained on another base?"
        )

    # For adapters that are written (engine/adapter)

    def changes(self, name: str) -> bool:
        """Whether the adapter changes a tensor."""
        return any(name in held for held in (self.factors, self.replaced, self._bias_changes, self._token_rows))

    def has_only_factors(self, name: str) -> bool:
        """Whether a tensor is that of the base plus scale · BA of its module, and nothing more."""
        factors = self.factors.get(name)
        if factors is None or factors.magnitude is not None or factors.slice is not None or name in self._token_rows:
            return False
        key = self.replaced.get(name)  # PEFT saves embeddings with their factors, though they are the base's
        if key is None:
            return True
        same = self.adapter.tensors[key] == self.base.tensors[name]
        return same and equal((self.adapter, key), (self.base, name), lambda block: block.view(torch.uint8))

    def read_factors(self, name: str) -> tuple[Tensor, Tensor]:
        """scale · B (out × rank) and A (rank × in) of a module, in float64."""
        factors = self.factors[name]
        a, b = (self._read_whole(key).double().flatten(1) for key in (factors.a, factors.b))
        return b * factors.scale, a

    # Reading

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        holder, stored = self._stored(name)
        block = holder.read(stored, start, stop, buffers, slot)
        if name not in self.factors.keys() | self._bias_changes.keys() | self._token_rows.keys() or stop <= start:
            return block
        dtype = torch.float64 if block.dtype == torch.float64 else torch.float32
        result = block.to(dtype, copy=True)
        if name in self._token_rows:
            self._put_token_rows(name, start, stop, result)
        if name in self._bias_changes:
            key, scale = self._bias_changes[name]
            result += self.adapter.read(key, start, stop, Buffers()).to(dtype) * scale
        if name in self.factors:
            self._add_product(name, start, stop, result)
            if self.factors[name].magnitude is not None:
                norms, columns = self._dora_scales(name), math.prod(self.tensors[name].shape[1:])
                entries = torch.arange(start, stop)
                result *= norms[entries % columns if self.factors[name].transposed else entries // columns].to(dtype)
        return result

    def _stored(self, name: str) -> tuple[Checkpoint, str]:
        """Where the tensor that the factors are added to is stored."""
        return (self.adapter, self.replaced[name]) if name in self.replaced else (self.base, name)

    def _put_token_rows(self, name: str, start: int, stop: int, result: Tensor) -> None:
        """Replace the trained rows among elements ``start`` to ``stop``."""
        key, rows = self._token_rows[name]
        columns = self.tensors[name].shape[1]
        for index, row in enumerate(rows):
            low, high = max(start, row * columns), min(stop, (row + 1) * columns)
            if low < high:
                shift = (index - row) * columns
                result[low - start : high - start] = self.adapter.read(key, low + shift, high + shift, Buffers())

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
        """Matrices (left, right) with left @ right = scale · BA in the layout of the stored tensor.

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
        """The same in the layout of the module or parameter."""
        a, b = (self._read_whole(key).to(dtype).flatten(1) for key in (factors.a, factors.b))
        right = a.reshape(factors.experts, -1, a.shape[1])
        left = b.reshape(b.shape[0], -1, factors.experts).permute(2, 0, 1)
        if factors.transposed:
            left, right = right.mT, left.mT
        return (left * factors.scale).contiguous(), right.contiguous()

    def _dora_scales(self, name: str) -> Tensor:
        """DoRA's scale of each output: its magnitude over the norm of its row of base + scale · BA, in float64."""
        with self._norms_lock:  # other threads would compute the same
            if name not in self._norms:
                factors, info, (holder, stored) = self.factors[name], self.tensors[name], self._stored(name)
                assert factors.magnitude is not None
                columns, buffers = math.prod(info.shape[1:]), Buffers()
                squares = torch.zeros(columns if factors.transposed else info.shape[0], dtype=torch.float64)
                step = max(1, PANEL // columns)
                for row in range(0, info.shape[0], step):
                    start, stop = row * columns, min((row + step) * columns, info.numel)
                    block = holder.read(stored, start, stop, buffers)
                    block = block.to(torch.float64 if block.dtype == torch.float64 else torch.float32, copy=True)
                    self._add_product(name, start, stop, block)
                    part = block.double().square_().reshape(-1, columns)
                    if factors.transposed:
                        squares += part.sum(0)
                    else:
                        squares[row : row + step] = part.sum(1)
                self._norms[name] = self._read_whole(factors.magnitude).double().flatten() / squares.sqrt()
            return self._norms[name]

    def _read_whole(self, key: str) -> Tensor:
        info = self.adapter.tensors[key]
        return self.adapter.read(key, 0, info.numel, Buffers()).reshape(info.shape)

    def will_need(self, name: str) -> None:
        holder, stored = self._stored(name)
        holder.will_need(stored)

    def files(self) -> list[Path]:
        return [*self.adapter.files(), *(self.base.files() if self._owns_base else [])]

    def close(self) -> None:
        self.adapter.close()
        if self._owns_base:
            self.base.close()


def _look_up(parameters: Mapping[str, BareParameter], module: str) -> BareParameter | None:
    """The bare parameter of a module, also if the adapter's model or the base's class has one more leading part."""
    shorter = module.partition(".")[2]
    longer = (parameter for path, parameter in parameters.items() if path.endswith(f".{module}"))
    return parameters.get(module) or parameters.get(shorter) or next(longer, None)
