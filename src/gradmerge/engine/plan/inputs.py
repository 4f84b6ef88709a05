"""Everything that a merge reads: the models, their curvature, and how a block of each becomes a tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.checkpoint import Buffers, Checkpoint
from ...checkpoints.tokenizer.embedding_rows import VocabularyRows
from ...checkpoints.tokenizer.output_tokenizer import ResultFiles
from ...curvature.format import INPUTS, OUTPUTS, CurvatureFile
from ...errors import InputError
from ...recipe import MeanTimes, reduction_factor
from ...rules import Rule
from ...rules.kronecker_matching import KroneckerFactors
from .per_layer import LayerSettings

#: Curvature above this is refused: sums over some models, times their weights, must fit float32.
LARGEST = 1e35
#: δ of `damping: auto`, but for removal.
USUAL_DAMPING = 1e-10


@dataclass(eq=False)
class CurvatureInput:
    """Curvature as a rule sees it: reduced, from a file, from memory, or the same number everywhere."""

    label: str
    file: CurvatureFile | None = None
    memory: Mapping[str, Tensor] | None = None
    constant: float | None = None
    factor: float = 1.0
    """What a stored sum is multiplied by: 1, or 1/examples for the mean."""
    examples: int = 0
    stands_for: int = 0
    """The examples that it is scaled to, where a recipe says so; else those that it was estimated on."""
    likelihood: str = ""
    tokens: Mapping[str, int] | None = None
    """Of Kronecker curvature: the weights that have factors, with the number of tokens behind those."""
    transposed: frozenset[str] = frozenset()
    """Weights whose first axis is the input's."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied heads → the embedding whose curvature is used for them."""
    rows: VocabularyRows | None = None
    """Of a model whose rows are put in the order of another vocabulary: its curvature follows them."""

    def __post_init__(self) -> None:
        if self.constant is not None and self.constant > LARGEST:
            raise InputError(f"{self.label}: {self.constant:g} is too large for a curvature; the limit is {LARGEST:g}")

    @classmethod
    def of_file(cls, file: CurvatureFile, reduction: str | MeanTimes, stands_for: int | None = None) -> CurvatureInput:
        """A file's sums over examples, reduced; or scaled to the number of examples that it ``stands_for``."""
        factor = reduction_factor(reduction, file.examples) if stands_for is None else stands_for / file.examples
        behind = file.examples if stands_for is None else stands_for
        return cls(
            file.label,
            file=file,
            factor=factor,
            examples=file.examples,
            stands_for=behind,
            likelihood=file.likelihood,
            tokens=file.tokens if file.kind == "kronecker" else None,
            transposed=file.transposed,
        )

    @property
    def kind(self) -> str:
        """`diagonal`, `gram`, `kronecker` or `constant`."""
        if self.tokens is not None:
            return "kronecker"
        return self.file.kind if self.file is not None else "constant" if self.constant is not None else "diagonal"

    @functools.cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Shapes by name; None when the curvature is a constant and fits everything."""
        shapes = self._own_shapes
        if shapes is None or self.rows is None or self.kind == "gram":
            return shapes
        return {n: self.rows.shape(s) if self.rows.covers(n, s) else s for n, s in shapes.items()}

    @property
    def _own_shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        if self.file is not None:
            return self.file.shapes
        if self.memory is not None:
            return {name: tuple(value.shape) for name, value in self.memory.items()}
        return None

    def stored_name(self, name: str, shape: tuple[int, ...]) -> str | None:
        """The name under which a tensor's curvature is held: its own, or that of the tensor it is tied to."""
        shapes = self.shapes
        if shapes is None or name in shapes:
            return name
        tied = self.aliases.get(name, "")
        return tied if shapes.get(tied) == shape else None

    def read(
        self,
        name: str,
        start: int,
        stop: int,
        buffers: Buffers,
        slot: str,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return elements ``start`` to ``stop`` of a parameter's reduced curvature; a constant gives one number."""
        if self.constant is not None:
            return torch.tensor(self.constant, dtype=dtype)
        values = self._aligned(name, start, stop, buffers, slot)
        self._check(values, name)
        values = values.to(dtype)
        return values if self.factor == 1.0 else values * self.factor

    def read_factors(self, name: str) -> KroneckerFactors:
        """The Kronecker factors of a layer's weight, in float64; the scale holds 1/T and the reduction."""
        assert self.tokens is not None
        sides = (self.read_matrix(name + part, 1.0) for part in (OUTPUTS, INPUTS))
        outputs, inputs = (side.add(side.T).mul_(0.5) for side in sides)  # symmetric, whoever wrote them
        return KroneckerFactors(outputs, inputs, self.factor / self.tokens[name])

    def read_matrix(self, name: str, factor: float | None = None) -> Tensor:
        """A whole Gram matrix, reduced, in float64. Its diagonal may not be negative; other entries may."""
        factor = self.factor if factor is None else factor
        shapes = self.shapes
        assert shapes is not None
        values = self._stored(name, 0, math.prod(shapes[name]), Buffers(), "gram").reshape(shapes[name])
        if not bool(torch.isfinite(values).all()) or bool((values.diagonal() < 0).any()):
            raise InputError(
                f"{self.label}: {name} is no Gram matrix: it has entries that are not finite, or a negative diagonal"
            )
        return values.double() * factor

    def _aligned(self, name: str, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        """Stored values; of a row for each token in the order of the result, 0 for tokens that the model lacks."""
        shapes = self._own_shapes
        if self.rows is None or shapes is None or not self.rows.covers(name, shapes[name]):
            return self._stored(name, start, stop, buffers, slot)
        columns = max(1, math.prod(shapes[name]) // max(1, self.rows.before))
        return self.rows.gather(lambda a, b: self._stored(name, a, b, buffers, slot), columns, start, stop)

    def _stored(self, name: str, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        if self.file is not None:
            return self.file.read(name, start, stop, lambda n: buffers.take(slot, n))
        assert self.memory is not None
        return self.memory[name].detach().reshape(-1)[start:stop].cpu().contiguous()

    def _check(self, values: Tensor, name: str) -> None:
        if values.numel() == 0:
            return
        low, high = torch.aminmax(values)
        if not (float(low) >= 0 and float(high) < math.inf):
            what = "negative" if float(low) < 0 else "not finite"
            raise InputError(f"{self.label}: curvature of {name} has values that are {what}; estimate it again")
        if float(high) * self.factor > LARGEST:
            raise InputError(
                f"{self.label}: curvature of {name} is as large as {float(high) * self.factor:.3g}; sums of such "
                "numbers do not fit float32. Scale the curvature of all models down alike."
            )

    def _stored_parts(self, name: str) -> list[str]:
        """The tensors of the file that hold the curvature of a parameter."""
        parts = [name + INPUTS, name + OUTPUTS] if self.tokens and name in self.tokens else [name]
        return [part for part in parts if self.shapes is not None and part in self.shapes]

    def will_need(self, name: str) -> None:
        if self.file is not None:
            for part in self._stored_parts(name):
                self.file.will_need(part)

    def nbytes(self, name: str) -> int:
        return sum(self.file.nbytes(part) for part in self._stored_parts(name)) if self.file is not None else 0

    def files(self) -> list[Path]:
        return self.file.files() if self.file is not None else []

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


Source = Checkpoint | CurvatureInput


@dataclass
class Inputs:
    """The open models and curvature of one merge, with the numbers that go with them."""

    template: Checkpoint
    """The base, or the first model where there is none: names, types, copied tensors and small files come from it."""
    base: Checkpoint | None
    tuned: list[Checkpoint]
    settings: LayerSettings
    """The weights and options, for each tensor."""
    prior: CurvatureInput | None = None
    curvature: list[CurvatureInput] = field(default_factory=list)
    penalty: list[CurvatureInput | None] = field(default_factory=list)
    """P_t of every tuned model, None where it is H_0; empty if it is H_0 for all of them."""
    grams: list[CurvatureInput] = field(default_factory=list)
    damping: float = 0.0
    """δ, but for a removal where the recipe leaves it open."""
    damping_is_open: bool = False
    """`damping: auto`."""
    mean_curvature: float | None = None
    """The mean over all entries of Σ F_t, once it is found: δ of a removal where the recipe leaves it open."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """As the recipe gives them, some of which may vary."""
    aliases: dict[Checkpoint, dict[str, str]] = field(default_factory=dict)
    """Per checkpoint: tensor → the one it is tied to there, if only that is stored."""
    result_files: ResultFiles | None = None
    """What the keys `tokenizer` and `chat_template` change beside the weights."""

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint once, the template first."""
        return list(dict.fromkeys((self.template, *self.tuned)))

    @property
    def curvatures(self) -> list[CurvatureInput]:
        every = (self.prior, *self.curvature, *self.penalty, *self.grams)
        return list(dict.fromkeys(source for source in every if source is not None))

    @property
    def sources(self) -> list[Source]:
        """Everything that is read, in the order of the record."""
        return [*self.checkpoints, *self.curvatures]

    @property
    def damps_layers(self) -> bool:
        """Whether each layer with Kronecker curvature has a δ of its own: it is open, and the base's is not c · I."""
        return self.damping_is_open and not (self.prior is not None and self.prior.constant)

    def damping_of(self, rule: Rule) -> float:
        """δ for a rule."""
        if not (self.damping_is_open and rule.auto_damping == "mean-curvature"):
            return self.damping
        assert self.mean_curvature is not None, "find_damping comes first"
        return self.mean_curvature

    def tuned_of(self, name: str) -> list[Checkpoint]:
        """The models that a tensor is merged from: all, but for layers in slices of which some merge fewer."""
        return [checkpoint for checkpoint in self.tuned if name not in checkpoint.absent]

    def stored_name(self, checkpoint: Checkpoint, name: str) -> str:
        return self.aliases.get(checkpoint, {}).get(name, name)

    def files(self) -> list[Path]:
        return [path for source in self.sources for path in source.files()]

    def close(self) -> None:
        for source in self.sources:
            source.close()
