"""What a merge reads: the models, their curvature, and the penalties P_t of their training."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers, Checkpoint, RenamedCheckpoint, unwrap_chain
from ..checkpoints.embedding_rows import VocabularyCheckpoint, VocabularyRows
from ..checkpoints.tokenizer import ResultFiles
from ..curvature.format import INPUTS, OUTPUTS, CurvatureFile, open_curvature
from ..errors import InputError
from ..io.small_files import read_json, require_within
from ..notes import Kind, Note
from ..recipe import NONE, CurvatureSource, Identity, MeanTimes, check_penalty, reduction_factor
from ..rules import Rule
from ..rules.kronecker_matching import KroneckerFactors
from ..text import one_line
from .settings import LayerSettings

LARGEST = 1e35
"""Larger curvature is refused, because weighted sums over models must fit float32."""
CONSTANT_DAMPING = 1e-10
"""δ of `damping: auto`, unless the rule takes the mean curvature."""
PENALTY = "gradmerge_penalty.json"
"""The file in a model's folder with the penalty of its training: `base.penalty` as in a recipe, with paths relative to
the folder."""
PENALTY_FORMAT = "gradmerge-penalty/1"


@dataclass(eq=False)
class CurvatureInput:
    """The reduced curvature of one model: from a file, from memory, or one number for all entries."""

    label: str
    file: CurvatureFile | None = None
    memory: Mapping[str, Tensor] | None = None
    constant: float | None = None
    factor: float = 1.0
    """Factor of the stored sums: 1, or 1/examples for the mean."""
    examples: int = 0
    dataset_size: int = 0
    """The dataset size that the recipe scales it to; by default the examples that it was estimated on."""
    likelihood: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Weight with Kronecker factors → number of tokens behind them."""
    kind: str = "diagonal"
    """`diagonal`, `gram`, `kronecker` or `constant`."""
    transposed: frozenset[str] = frozenset()
    """Weights that are stored as (in, out)."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied head that the curvature lacks → the embedding whose curvature it uses."""
    rows: VocabularyRows | None = None
    """The new order of vocabulary rows, if the model's rows are reordered."""

    def __post_init__(self) -> None:
        if self.constant is not None:
            self.kind = "constant"
            if self.constant > LARGEST:
                raise InputError(
                    f"{self.label}: {self.constant:g} is too large for a curvature; the limit is {LARGEST:g}"
                )

    @classmethod
    def open(cls, source: CurvatureSource, label: str, model: Checkpoint, relative_to: Path) -> CurvatureInput:
        """Open a curvature file of a model, with the names and vocabulary rows that the model has in the merge.

        A constant has no file: its label is ``label``.
        """
        if isinstance(source, Identity):
            return cls(f"{label} (identity)", constant=source.identity)
        file = open_curvature(source, relative_to=relative_to)
        for layer in reversed([*unwrap_chain(model)]):  # unless it has the new names already
            if isinstance(layer, RenamedCheckpoint) and file.parameters & layer.inner.tensors.keys():
                file.rename(layer.new_name)
        rows = model.rows if isinstance(model, VocabularyCheckpoint) else None
        if rows is not None and (fixed := file.tokens.keys() & rows.names):
            raise InputError(
                f"{file.label}: {min(fixed)} has Kronecker factors, which cannot be reordered to another vocabulary. "
                "Exclude the tensor, or estimate the curvature again with a diagonal for it"
            )
        return cls(
            file.label,
            file=file,
            examples=file.examples,
            dataset_size=file.examples,
            likelihood=file.likelihood,
            tokens=file.tokens,
            kind=file.kind,
            transposed=file.transposed,
            rows=rows,
        )

    def reduce(self, reduction: str | MeanTimes, dataset_size: int | None) -> None:
        """Set the factor of the stored sums: that of a reduction, or the one that scales them to a dataset size."""
        if self.file is not None:
            self.factor = reduction_factor(reduction, self.examples)
            if dataset_size is not None:
                self.factor, self.dataset_size = dataset_size / self.examples, dataset_size

    @functools.cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Name → shape as rules see it; None for a constant, which fits every tensor."""
        shapes = self._stored_shapes
        if shapes is None or self.rows is None or self.kind == "gram":
            return shapes
        return {n: self.rows.shape(s) if self.rows.covers(n, s) else s for n, s in shapes.items()}

    @property
    def _stored_shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        if self.file is not None:
            return self.file.shapes
        if self.memory is not None:
            return {name: tuple(value.shape) for name, value in self.memory.items()}
        return None

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str, dtype: torch.dtype) -> Tensor:
        """Return entries ``start`` to ``stop`` of a tensor's reduced curvature.

        A constant is one number. So is 0, where the recipe allows curvature to be missing.
        """
        name = self.aliases.get(name, name)
        if self.shapes is None or name not in self.shapes:
            return torch.tensor(self.constant or 0.0, dtype=dtype)
        values = self._aligned(name, start, stop, buffers, slot)
        self._check(values, name)
        values = values.to(dtype)
        return values if self.factor == 1.0 else values * self.factor

    def read_factors(self, name: str) -> KroneckerFactors:
        """Return the Kronecker factors of a weight in float64; the scale holds 1/T and the reduction."""
        sides = (self.read_matrix(name + part, 1.0) for part in (OUTPUTS, INPUTS))
        outputs, inputs = (side.add(side.T).mul_(0.5) for side in sides)  # exactly symmetric
        return KroneckerFactors(outputs, inputs, self.factor / self.tokens[name])

    def read_matrix(self, name: str, factor: float | None = None) -> Tensor:
        """Return a whole Gram matrix, reduced, in float64."""
        factor = self.factor if factor is None else factor
        shapes = self.shapes
        assert shapes is not None
        values = self._stored(name, 0, math.prod(shapes[name]), Buffers(), "gram").reshape(shapes[name])
        if not bool(torch.isfinite(values).all()) or bool((values.diagonal() < 0).any()):
            raise InputError(
                f"{self.label}: {name} is not a Gram matrix: it has entries that are not finite, or a negative diagonal"
            )
        return values.double() * factor

    def _aligned(self, name: str, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        """Return stored values, with vocabulary rows in the order of the result and 0 for tokens without a row."""
        shapes = self._stored_shapes
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
        """Return the tensors of the file that hold the curvature of a parameter."""
        parts = [name + INPUTS, name + OUTPUTS] if name in self.tokens else [name]
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
    """The open models and curvature of a merge, with its weights and options."""

    template: Checkpoint
    """The base, or else the first model: it gives names, types, copied tensors and small files."""
    base: Checkpoint | None
    tuned: list[Checkpoint]
    settings: LayerSettings
    """Weights and options by tensor."""
    prior: CurvatureInput | None = None
    """The curvature of the base, F_0."""
    curvature: list[CurvatureInput] = field(default_factory=list)
    """The curvature of every fine-tuned model, F_t; Gram matrices for a rule that needs these."""
    penalty: list[CurvatureInput | None] = field(default_factory=list)
    """P_t of every tuned model, None where it is H_0; empty if it is H_0 for all of them."""
    damping: float = 0.0
    """δ, unless the rule computes its own for `damping: auto`."""
    damping_is_auto: bool = False
    """The recipe has `damping: auto`."""
    mean_curvature: float | None = None
    """The mean over all entries of Σ F_t, once it is computed: δ of rules with this damping."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's options, some of which may vary between tensors."""
    tied_copies: Mapping[str, str] = field(default_factory=dict)
    """Tensor of the template → the tensor that it is a copy of. Random masks are the same for both."""
    result_files: ResultFiles | None = None
    """The files of the result's tokenizer and chat template, if the recipe changes them."""

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint once, the template first."""
        return list(dict.fromkeys((self.template, *self.tuned)))

    @property
    def curvatures(self) -> list[CurvatureInput]:
        """Every curvature once."""
        sources = (self.prior, *self.curvature, *self.penalty)
        return list(dict.fromkeys(source for source in sources if source is not None))

    @property
    def sources(self) -> list[Source]:
        """All inputs, in the order of the record."""
        return [*self.checkpoints, *self.curvatures]

    @property
    def damps_layers(self) -> bool:
        """Whether each layer with Kronecker curvature has its own δ: `damping: auto`, and no base of c · I."""
        return self.damping_is_auto and not (self.prior is not None and self.prior.constant)

    def needs_mean_curvature(self, rule: Rule) -> bool:
        """Return whether the rule takes the mean curvature as δ, and the mean is not computed yet."""
        return rule.auto_damping == "mean-curvature" and self.damping_is_auto and self.mean_curvature is None

    def damping_of(self, rule: Rule) -> float:
        """Return δ for a rule."""
        if not (self.damping_is_auto and rule.auto_damping == "mean-curvature"):
            return self.damping
        assert self.mean_curvature is not None, "call compute_mean_curvature first"
        return self.mean_curvature

    def tuned_of(self, name: str) -> list[Checkpoint]:
        """Return the models that a tensor is merged from. Slices may merge fewer models in some layers."""
        return [checkpoint for checkpoint in self.tuned if name not in checkpoint.absent]

    def files(self) -> list[Path]:
        return [path for source in self.sources for path in source.files()]

    def close(self) -> None:
        for source in self.sources:
            source.close()


def zero_if_none(penalty: CurvatureSource) -> CurvatureSource:
    """Return the penalty, which is 0 for the word `none`."""
    return Identity(identity=0.0) if penalty == NONE else penalty


def recorded_penalty(model: Checkpoint) -> CurvatureInput | None:
    """Return the penalty that is recorded in a model's folder. Its file holds P, whatever the recipe's reduction is."""
    path = None if model.folder is None else model.folder / PENALTY
    if path is None or model.folder is None or not path.is_file():
        return None
    require_within(path, model.folder)
    record, label = read_json(path), f"{model.label}/{PENALTY}"
    if record.get("format") != PENALTY_FORMAT:
        raise InputError(f"{label}: its format is {str(record.get('format'))[:40]!r}, not {PENALTY_FORMAT!r}")
    source = zero_if_none(check_penalty(record.get("penalty"), label))
    if isinstance(source, Identity):
        return CurvatureInput.open(source, label, model, Path())
    inside = model.folder / source
    if Path(source).is_absolute() or ".." in Path(source).parts or not inside.exists():
        raise InputError(f"{label}: the penalty {one_line(source[:80])!r} is not in the model's folder")
    require_within(inside, model.folder)
    return CurvatureInput.open(str(inside), label, model, Path())


def penalty_notes(inputs: Inputs) -> Iterator[Note]:
    """Yield a warning if only some models have a recorded penalty."""
    pairs = list(zip(inputs.tuned, inputs.penalty, strict=False))
    lacking = [model.label for model, penalty in pairs if penalty is None]
    if lacking:
        recorded = [model.label for model, penalty in pairs if penalty is not None]
        yield Note(
            f"{', '.join(recorded)} recorded the penalty of the training, and {', '.join(lacking)} did not: the latter "
            "count as trained under H_0. If that is wrong, set base.penalty for all models, or write a "
            f'{PENALTY} into the model\'s folder: {{"format": "{PENALTY_FORMAT}", "penalty": "none"}} for training '
            "without a penalty.",
            Kind.PENALTIES,
            lacking=lacking,
        )
