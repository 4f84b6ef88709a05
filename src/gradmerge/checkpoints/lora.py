"""PEFT LoRA adapters as checkpoints: base + scale · BA, formed a few rows at a time while the merge reads.

DoRA's m ⊙ (base + scale · BA) / ‖base + scale · BA‖, a norm and a magnitude m for each output, takes one more pass.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..io.reader import PositionalFile
from ..text import listed
from .adapter_config import ADVICE
from .checkpoint import Buffers, Checkpoint
from .compat.tied_weights import TIED, equal, has_head, in_layer, is_head, same_values, tied_to, ties_of_class
from .conv1d import stores_inputs_first
from .hf_key_conversion import stored_by_class
from .quantization import refuse_quantised
from .regex_timeout import Patterns

#: Elements of BA that are formed at once. Fixed, so that rounding does not depend on how the merge cuts its blocks.
PANEL = 1 << 16

#: Tasks whose models have no head that could be tied to an embedding.
HEADLESS = {"SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION"}


@dataclass(frozen=True)
class Factors:
    """Names of the two factors of one target, and what its difference is made of."""

    module: str
    """The target's module, as PEFT names it."""
    a: str
    b: str
    scale: float
    transposed: bool
    """The target stores (in, out), as GPT-2's Conv1D and embeddings do."""
    magnitude: str | None = None
    """DoRA's length of the weights of each output."""


class AdapterCheckpoint(Checkpoint):
    """A LoRA adapter over its base: every tensor of the base, some of them with a difference added or replaced."""

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
        refuse_quantised(base, adapter=label)
        self.adapter = Checkpoint(label, files=files)
        self.base = base
        self._owns_base = owns_base
        # A cache of its own: one around the method would keep every adapter alive.
        self._product_of = functools.lru_cache(maxsize=8)(self._form_product)
        self._patterns = Patterns(f"{folder / 'adapter_config.json'}: alpha_pattern")
        self._added: dict[str, tuple[str, float]] = {}
        """Biases that a bias of LoRA's own is added to, and its scale."""
        self._rows: dict[str, tuple[str, list[int]]] = {}
        """Embeddings of which the adapter replaces some rows."""
        self._norms: dict[str, Tensor] = {}
        self._norming = threading.Lock()
        self.factors, self.replaced = self._resolve(config)
        self.tensors = dict(base.tensors)
        for name, stored in self.replaced.items():
            self.tensors[name] = self.adapter.tensors[stored]
        if config.get("task_type") not in HEADLESS:
            self._check_ties()
        for name, factors in self.factors.items():
            self._check_shapes(name, factors)

    def _resolve(self, config: Mapping[str, Any]) -> tuple[dict[str, Factors], dict[str, str]]:
        parts: dict[str, dict[str, str]] = {}
        replaced: dict[str, str] = {}
        unknown: list[str] = []
        twice: list[str] = []

        def only(known: dict[str, str], target: str, key: str) -> None:
            """Note a second key for one target, unless it is the same bias, which PEFT writes under two names."""
            if target in known and not same_values(self.adapter, known[target], key):
                twice.append(f"{known[target]} and {key}")
            known[target] = key

        for key in self.adapter.tensors:
            path = key.removeprefix("base_model.model.")
            match = re.fullmatch(r"(.+)\.lora_(?:embedding_)?([AB]|B\.bias|magnitude_vector)(?:\.weight)?", path)
            tokens = re.fullmatch(r"(.+)\.token_adapter\.trainable_tokens_delta", path)
            if match:
                only(parts.setdefault(match[1], {}), match[2], key)
            elif tokens and config.get("trainable_token_indices"):
                self._replace_rows(tokens[1], key, config["trainable_token_indices"])
            elif "lora_" in path or "trainable_tokens" in path:
                unknown.append(key)
            elif ".original_module." not in path:  # which PEFT writes beside a module saved whole if bias is "all"
                name = re.sub(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)", "", path)
                only(replaced, self._find(name) or name, key)
        if unknown:
            raise self._refused(f"the adapter holds tensors that are not LoRA's A and B:\n{listed(unknown)}\n{ADVICE}")
        expected = {"A", "B", *(["magnitude_vector"] if config.get("use_dora") else [])}
        factors: dict[str, Factors] = {}
        used = {"A": {name: key for name, key in replaced.items() if ".base_layer." not in key}, "B": {}}
        lost: list[str] = []
        for module, pair in parts.items():
            target = self._find(f"{module}.weight")
            bias = pair.pop("B.bias", None)
            if target is None or pair.keys() != expected:
                lost.append(module)
                continue
            for letter in "AB":
                only(used[letter], target, pair[letter])
            a, b = (self.adapter.tensors[pair[letter]].shape for letter in "AB")
            if min(len(a), len(b)) < 2 or 0 in a + b:
                found = f"{list(a)} and {list(b)}"
                raise self._refused(f"LoRA's factors of {module} are no matrices: {found}. Save the adapter again.")
            scale = self._alpha(config, module) / (math.sqrt(a[0]) if config.get("use_rslora") else a[0])
            embedding = "lora_embedding_" in pair["A"]
            turned = stores_inputs_first(self.base.tensors, target, (b[0], a[1]), embedding, config)
            magnitude = pair.get("magnitude_vector")
            factors[target] = Factors(module, pair["A"], pair["B"], scale, turned, magnitude)
            if bias is not None:
                self._add_bias(f"{module}.bias", bias, scale, bool(config.get("lora_bias")))
        if twice:
            raise self._refused(
                f"two tensors of the adapter are for one tensor of {self.base.label}, of which one would be lost:\n"
                f"{listed(twice)}\nSave the adapter again from the model that was trained."
            )
        for name in (f"{module}.weight" for module in lost):
            if tied := tied_to(name, self.base):
                raise self._refused(
                    f"the adapter changes {name}, which {self.base.label} shares with {tied}: the result would no "
                    "longer be one tensor. Untie the embeddings of the base first."
                )
        if lost:
            raise self._refused(
                f"the adapter changes modules that {self.base.label} does not have, or holds other parts of them than "
                f"{' and '.join(sorted(expected))}:\n{listed(lost)}\nWas it trained on another base?"
            )
        return factors, replaced

    def _add_bias(self, name: str, key: str, scale: float, stated: bool) -> None:
        target, size = self._find(name), self.adapter.tensors[key].numel
        if target is None or self.base.tensors[target].numel != size or not self.base.tensors[target].is_float:
            raise self._refused(f"{self.base.label} has no {name} of {size} numbers that {key} could be added to")
        self._added[target] = (key, scale)
        if not stated:
            note = (
                "its config says nothing (lora_bias) of the biases that it holds, which are added; PEFT leaves them out"
            )
            self.notes += [f"{self.label}: {note}"] if not self.notes else []

    def _replace_rows(self, module: str, key: str, stated: list[int] | Mapping[str, list[int]] | None) -> None:
        """Take the rows of an embedding that were trained (`trainable_token_indices`), and of a head that is one with
        it: PEFT keeps those together."""
        if isinstance(stated, Mapping):
            stated = next((rows for end, rows in stated.items() if f".{module}".endswith(f".{end}")), None)
        name = self._find(f"{module}.weight")
        shape = self.base.tensors[name].shape if name is not None else ()
        if stated is None or len(shape) != 2 or self.adapter.tensors[key].shape != (len(stated), shape[1]):
            raise self._refused(f"trainable_token_indices and {key} do not fit an embedding of {self.base.label}")
        if stated and not 0 <= min(stated) <= max(stated) < shape[0]:
            raise self._refused(f"trainable_token_indices names rows that {name} of {self.base.label} does not have")
        assert name is not None
        heads = [head for head in {**TIED, **ties_of_class(self.base)} if tied_to(head, self.base) == name]
        for tied in (name, *(head for head in heads if head in self.base.tensors)):
            if tied == name or same_values(self.base, tied, name):
                self._rows[tied] = (key, stated)

    def _refused(self, why: str) -> InputError:
        return InputError(f"{self.folder}: {why}")

    def _check_ties(self) -> None:
        """Refuse to change one of two tensors that the base stores as one.

        PEFT changes a copy of the module that it is told to and leaves the other as it was; the merged model, with the
        config of the base, would have them both changed, or neither.
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

    def _alpha(self, config: Mapping[str, Any], module: str) -> float:
        """As in PEFT: alpha of the first pattern that matches the end of the module's path, or else ``lora_alpha``."""
        patterns = config.get("alpha_pattern") or {}
        found = (value for pattern, value in patterns.items() if self._patterns.fits(rf"(.*\.)?({pattern})", module))
        return float(next(found, config.get("lora_alpha", 8)))

    def _find(self, name: str) -> str | None:
        """The base's tensor of this name, also if a leading part is missing from one of the two."""
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
        """Names as the adapter's library may have them, where transformers loads files under other names."""
        return stored_by_class(self.base)

    def _check_shapes(self, name: str, factors: Factors) -> None:
        a, b = self.adapter.tensors[factors.a], self.adapter.tensors[factors.b]
        shape = self.tensors[name].shape
        rank, inputs, outputs = a.shape[0], math.prod(a.shape[1:]), b.shape[0]
        fits = math.prod(b.shape[1:]) == rank and len(shape) >= 2
        rows, columns = (inputs, outputs) if factors.transposed else (outputs, inputs)
        if not fits or (shape[0], math.prod(shape[1:])) != (rows, columns):
            raise self._refused(
                f"LoRA's A {list(a.shape)} and B {list(b.shape)} do not fit {name} {list(shape)} of {self.base.label}. "
                "Was it trained on another base?"
            )
        infos = [a, b, self.tensors[name]]
        if factors.magnitude is not None:
            infos.append(magnitude := self.adapter.tensors[factors.magnitude])
            if magnitude.numel != outputs:
                raise self._refused(f"DoRA's magnitudes of {name} are {magnitude.numel}, for {outputs} outputs")
        for info in infos:
            if not info.is_float:
                what = f"{name} or its LoRA factors have the type {info.dtype}"
                raise self._refused(f"{what}; quantised weights cannot be merged")

    def changes(self, name: str) -> bool:
        """Whether the adapter has anything to say of a tensor."""
        return any(name in held for held in (self.factors, self.replaced, self._added, self._rows))

    def has_only_factors(self, name: str) -> bool:
        """Whether a tensor is that of the base and scale · BA, and no more."""
        if name not in self.factors or self.factors[name].magnitude is not None or name in self._rows:
            return False
        own = self.replaced.get(name)  # PEFT saves embeddings with their factors, though they are the base's
        if own is None:
            return True
        same = self.adapter.tensors[own] == self.base.tensors[name]
        return same and equal((self.adapter, own), (self.base, name), lambda block: block.view(torch.uint8))

    def read_factors(self, name: str) -> tuple[Tensor, Tensor]:
        """scale · B (out × rank) and A (rank × in) of a tensor, in float64."""
        factors = self.factors[name]
        a, b = (self._whole(key).double().flatten(1) for key in (factors.a, factors.b))
        return b * factors.scale, a

    def _form_product(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(left, right) with left @ right = scale · BA in the layout of the target."""
        factors = self.factors[name]
        a, b = (self._whole(key).to(dtype).flatten(1) for key in (factors.a, factors.b))
        if factors.transposed:
            return (a.T * factors.scale).contiguous(), b.T.contiguous()
        return (b * factors.scale).contiguous(), a.contiguous()

    def _whole(self, key: str) -> Tensor:
        info = self.adapter.tensors[key]
        return self.adapter.read(key, 0, info.numel, Buffers()).reshape(info.shape)

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        holder, stored = self._stored(name)
        block = holder.read(stored, start, stop, buffers, slot)
        if name not in self.factors.keys() | self._added.keys() | self._rows.keys() or stop <= start:
            return block
        dtype = torch.float64 if block.dtype == torch.float64 else torch.float32
        result = block.to(dtype, copy=True)
        if name in self._rows:
            self._put_rows(name, start, stop, result)
        if name in self._added:
            key, scale = self._added[name]
            result += self.adapter.read(key, start, stop, Buffers()).to(dtype) * scale
        if name in self.factors:
            self._add_product(name, start, stop, result)
            if self.factors[name].magnitude is not None:
                lengths, columns = self._lengths(name), math.prod(self.tensors[name].shape[1:])
                entries = torch.arange(start, stop)
                result *= lengths[entries % columns if self.factors[name].transposed else entries // columns].to(dtype)
        return result

    def _add_product(self, name: str, start: int, stop: int, result: Tensor) -> None:
        """Add scale · BA to elements ``start`` to ``stop``."""
        left, right = self._product_of(name, result.dtype)
        columns = right.shape[1]
        rows = max(1, PANEL // columns)
        for first in range(start // columns // rows * rows, -(-stop // columns), rows):
            panel = (left[first : first + rows] @ right).reshape(-1)
            begin = first * columns
            low, high = max(start, begin), min(stop, begin + panel.numel())
            result[low - start : high - start] += panel[low - begin : high - begin]

    def _put_rows(self, name: str, start: int, stop: int, result: Tensor) -> None:
        key, rows = self._rows[name]
        columns = self.tensors[name].shape[1]
        for place, row in enumerate(rows):
            low, high = max(start, row * columns), min(stop, (row + 1) * columns)
            if low < high:
                shift = (place - row) * columns
                result[low - start : high - start] = self.adapter.read(key, low + shift, high + shift, Buffers())

    def _lengths(self, name: str) -> Tensor:
        """DoRA's factor of each output: its magnitude over the norm of its row of base + scale · BA, in float64."""
        with self._norming:  # which other threads would only find as well
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
                self._norms[name] = self._whole(factors.magnitude).double().flatten() / squares.sqrt()
            return self._norms[name]

    def will_need(self, name: str) -> None:
        holder, stored = self._stored(name)
        holder.will_need(stored)

    def _stored(self, name: str) -> tuple[Checkpoint, str]:
        return (self.adapter, self.replaced[name]) if name in self.replaced else (self.base, name)

    def files(self) -> list[Path]:
        return [*self.adapter.files(), *(self.base.files() if self._owns_base else [])]

    def close(self) -> None:
        self.adapter.close()
        if self._owns_base:
            self.base.close()
