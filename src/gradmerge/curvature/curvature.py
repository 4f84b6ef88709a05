"""Curvature in memory: names → sums over examples. Also writes its files and its card."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import checked
from ..cards.card import as_block, as_code, as_text, markdown_table, render_card
from ..display import Displayed, View
from ..distributed import Processes
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..text import natural, size
from .format import (
    INPUTS,
    KINDS,
    OUTPUTS,
    PENALTY,
    PRECISIONS,
    STEM,
    CurvatureFile,
    metadata,
    open_curvature,
    write_sums,
)

SHARD_SIZE = 5_000_000_000
CARD = "README.md"
#: Elements of a file that are summarized at once.
_CHUNK = 1 << 20


class KroneckerFactors(NamedTuple):
    """The curvature G ⊗ A / T of one layer's [W b]."""

    inputs: Tensor
    """A = Σ x̃x̃ᵀ over tokens, x̃ = [x; 1]: (in + 1, in + 1), or (in, in) for a layer without bias."""
    outputs: Tensor
    """G = Σ yyᵀ over tokens, y the gradient of the loss with respect to the output: (out, out)."""
    tokens: int
    """T, the number of tokens without padding."""
    transposed: bool = False
    """Whether the weight is stored as (in, out), as in GPT-2's Conv1D."""


Entry = Tensor | KroneckerFactors
Entries = Mapping[str, Entry]


class Curvature(Displayed, Mapping[str, Tensor]):
    """The curvature of one model on one dataset: a mapping from names to **sums** over examples, as in its file.

    Its kind is `diagonal`, `gram` or `kronecker`. With Kronecker factors, the mapping has ``NAME.A`` and ``NAME.G`` for
    the weight NAME of a layer, whose bias is part of A, and the diagonal for every other parameter.

    Args:
        sums: Name of a parameter → Σ_i [∇ℓ_i]², XᵀX of the layer's inputs, or :class:`KroneckerFactors`.
        examples: The number of examples.
        likelihood: The labels of the gradients; see :func:`gradmerge.estimate_curvature`.
        model: The name of the model.
        kind: ``gram`` if the sums are XᵀX. By default ``kronecker`` if there are factors, else ``diagonal``.
        transposed: For ``gram``, weights stored as (in, out), as in GPT-2's Conv1D.
        stored: Returns the sums with the names of the model's files. ``save`` calls it.
        notes: What the user should know about the estimate.
    """

    def __init__(
        self,
        sums: Entries,
        examples: int,
        likelihood: str = "empirical",
        model: str = "",
        *,
        kind: str | None = None,
        transposed: Iterable[str] = (),
        stored: Callable[[Any], Entries] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        if examples != int(examples) or examples < 1:
            raise ValueError(f"examples must be a whole number of at least 1, not {examples}")
        self.layers = {name: value for name, value in sums.items() if isinstance(value, KroneckerFactors)}
        self.diagonal = {name: value for name, value in sums.items() if isinstance(value, Tensor)}
        self.examples, self.likelihood, self.model = int(examples), likelihood, model
        self.kind = kind or ("kronecker" if self.layers else "diagonal")
        self.transposed = frozenset(transposed) | {name for name, layer in self.layers.items() if layer.transposed}
        self.notes = list(notes)
        self._stored = stored
        self._tensors: dict[str, Tensor] = {}
        for name, value in sums.items():
            if isinstance(value, KroneckerFactors):
                self._tensors |= {name + INPUTS: value.inputs, name + OUTPUTS: value.outputs}
            else:
                self._tensors[name] = value

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _line(self) -> list[str]:
        what = [f"{len(self)} {'matrices' if self.kind == 'gram' else 'tensors'}"]
        if self.kind == "kronecker":
            what = [f"{len(self.layers)} layers", f"{len(self.diagonal)} diagonals"]
        return [*what, f"{self.examples} examples", *([self.likelihood] if self.kind != "gram" else [])]

    def _view(self) -> View:
        if self.kind != "diagonal":
            matrices = [[name, len(value), float(value.trace())] for name, value in self.items() if value.dim() == 2]
            return ["matrix", "size", "trace (sum over examples)"], matrices, self.notes
        columns = ["layers", "entries", "mean per entry (sum over examples)", "share of zeros", "largest"]
        rows = [[g.name, g.entries, g.per_entry, g.share_of_zeros, g.largest] for g in self.summary()]
        return columns, rows, self.notes

    @property
    def tokens(self) -> dict[str, int]:
        """Weight of a layer with Kronecker factors → T."""
        return {name: layer.tokens for name, layer in self.layers.items()}

    def sum(self) -> dict[str, Tensor]:
        """The sums over examples."""
        return dict(self._tensors)

    def mean(self) -> dict[str, Tensor]:
        """The diagonal divided by the number of examples."""
        return self.scale(1 / self.examples).sum()

    def scale(self, factor: float) -> Curvature:
        """The diagonal multiplied by a number ≥ 0."""
        if not factor >= 0:
            raise ValueError(f"factor must not be negative, but is {factor}")
        if self.kind != "diagonal":
            raise ValueError(f"only diagonal curvature can be scaled, not {KINDS[self.kind]}")
        return self._with({name: value * factor for name, value in self.items()}, self.examples)

    def __add__(self, other: Curvature) -> Curvature:
        """The curvature of both datasets together."""
        if odd := sorted(self.keys() ^ other.keys()):
            raise ValueError(f"the parameters differ: only one has {odd[0]!r}")
        if (self.kind, self.likelihood) != (other.kind, other.likelihood):
            kinds = [f"{each.kind} with {each.likelihood} labels" for each in (self, other)]
            raise ValueError(f"the two were estimated differently: {kinds[0]} and {kinds[1]}")
        sums: dict[str, Entry] = {name: value + other[name] for name, value in self.diagonal.items()}
        for name, (a, g, tokens, transposed) in self.layers.items():
            more = other.layers[name]
            sums[name] = KroneckerFactors(a + more.inputs, g + more.outputs, tokens + more.tokens, transposed)
        return self._with(sums, self.examples + other.examples)

    def _with(self, sums: Entries, examples: int) -> Curvature:
        return Curvature(
            sums,
            examples,
            self.likelihood,
            self.model,
            kind=self.kind,
            transposed=self.transposed,
            stored=self._stored,
            notes=self.notes,
        )

    def add_file(self, file: CurvatureFile) -> None:
        """Add the sums of a file in place, tensor by tensor."""
        if {name: tuple(shape) for name, shape in file.shapes.items()} != {n: tuple(v.shape) for n, v in self.items()}:
            raise InputError(f"{file.label}: the names or shapes of its tensors are those of another model")
        for name, value in self.items():
            value += file.read_whole(name).to(value)
        self._add_counts(file.examples, file.tokens)

    def all_reduce(self, processes: Processes, examples: int) -> None:
        """Replace the sums by those over all processes. This process saw a number of ``examples``, which may be 0."""
        processes.all_reduce(self.values())
        counts = processes.all_gather((examples, self.tokens))
        self._add_counts(-self.examples, {name: -count for name, count in self.tokens.items()})
        for of_process in counts:
            self._add_counts(*of_process)

    def _add_counts(self, examples: int, tokens: Mapping[str, int]) -> None:
        self.examples += examples
        self.layers = {n: layer._replace(tokens=layer.tokens + tokens[n]) for n, layer in self.layers.items()}

    def summary(self) -> list[GroupSummary]:
        """Sum, share of zeros and maximum of each layer's entries, as sums over examples."""
        return summarize(self.items())

    @checked()
    def save(
        self, path: str | Path, *, precision: str = "float32", shard_size: int = SHARD_SIZE, force: bool = False
    ) -> None:
        """Write a curvature folder atomically.

        Args:
            path: The new folder. Merges look for curvature in the folder `curvature/` of a model.
            precision: ``float32``; for diagonal curvature also ``bfloat16`` or ``log8`` (8 bits per entry).
            shard_size: Largest size of a file in bytes.
            force: Replace ``path`` if gradmerge wrote it or it is empty.

        >>> curvature.save("./yelp/curvature", precision="log8")  # doctest: +SKIP
        """
        with AtomicDir(Path(path), "curvature", force=force) as staging:
            self.write(staging.folder, precision, shard_size)

    def write(self, folder: Path, precision: str = "float32", shard_size: int = SHARD_SIZE) -> None:
        """Write the files into an existing folder, with the names of the model's files."""
        if precision not in PRECISIONS:
            raise InputError(f"precision {precision!r}: must be {', '.join(PRECISIONS)}")
        if precision != "float32" and self.kind != "diagonal":
            raise InputError(f"precision {precision!r}: {KINDS[self.kind]} are stored as float32 only")
        entries: Entries = {**self.layers, **self.diagonal}
        named = self._with(entries if self._stored is None else self._stored(entries), self.examples)
        require_finite(named)
        write_sums(folder, named, named.header(precision), shard_size)
        if self.likelihood != PENALTY:
            write_curvature_card(folder)

    def header(self, precision: str = "float32") -> Mapping[str, str]:
        """The header metadata of its file."""
        facts: dict[str, str] = {} if self.kind == "diagonal" else {"kind": self.kind}
        facts |= {"tokens": json.dumps(self.tokens)} if self.kind == "kronecker" else {}
        facts |= {"fan_in_fan_out": json.dumps(sorted(self.transposed))} if facts else {}
        likelihood = "" if self.kind == "gram" else self.likelihood
        return metadata(self.examples, likelihood, self.model, precision, **facts)

    @classmethod
    @checked()
    def load(cls, path: str | Path) -> Curvature:
        """Read a curvature folder or file of any kind, in float32.

        Args:
            path: The folder or file.

        Returns:
            The curvature, as sums over examples.

        >>> Curvature.load("./yelp/curvature").examples  # doctest: +SKIP
        560000
        """
        with open_curvature(str(path)) as file:
            sums: dict[str, Entry] = {
                name: KroneckerFactors(
                    file.read_whole(name + INPUTS), file.read_whole(name + OUTPUTS), tokens, name in file.transposed
                )
                for name, tokens in file.tokens.items()
            }
            diagonal = file.parameters - sums.keys()
            sums |= {name: file.read_whole(name) for name in file.shapes if name in diagonal}
            model = file.metadata.get("model", "")
            return cls(sums, file.examples, file.likelihood, model, kind=file.kind, transposed=file.transposed)


def require_finite(curvature: Curvature) -> None:
    """Raise InputError if a value is NaN or infinite, or a diagonal negative."""
    signed = curvature.kind != "diagonal"
    for name, value in curvature.items():
        if not bool(torch.isfinite(value).all()) or (not signed and bool((value < 0).any())):
            wrong = "not finite" if signed else "negative or not finite"
            raise InputError(f"the curvature of {name} has values that are {wrong}; it is not saved")


@dataclass
class GroupSummary:
    """Curvature of the parameters of one layer, as sums over examples; ``total`` is the sum over its entries."""

    name: str
    entries: int = 0
    total: float = 0.0
    zeros: int = 0
    largest: float = 0.0

    @property
    def per_entry(self) -> float:
        return self.total / max(1, self.entries)

    @property
    def share_of_zeros(self) -> float:
        return self.zeros / max(1, self.entries)

    def as_dict(self) -> dict[str, float | int | str]:
        return asdict(self) | {"mean_per_entry": self.per_entry, "share_of_zeros": self.share_of_zeros}


def group_of(name: str) -> str:
    """Return a parameter's layer: its path up to the first number, or else without the last word."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1][:2]) or name


def summarize(tensors: Iterable[tuple[str, Tensor]]) -> list[GroupSummary]:
    """Return groups in the order of the layers. A tensor may come in several pieces."""
    groups: dict[str, GroupSummary] = {}
    for name, values in tensors:
        group = groups.setdefault(group_of(name), GroupSummary(group_of(name)))
        group.total += float(values.double().sum())
        group.zeros += int((values == 0).sum())
        group.largest = max(group.largest, float(values.max()) if values.numel() else 0.0)
        group.entries += values.numel()
    return [groups[name] for name in sorted(groups, key=natural)]


def pieces(file: CurvatureFile) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file in pieces that fit into memory, and check them.

    For Kronecker factors it yields the diagonal of G ⊗ A / T, which is diag(G) diag(A)ᵀ / T.
    """
    factors = {name + suffix for name in file.tokens for suffix in (INPUTS, OUTPUTS)}
    made: Iterable[Tensor]
    for name in sorted((file.shapes.keys() - factors) | file.tokens.keys(), key=natural):
        if name in file.tokens:
            inputs, outputs = (file.read_whole(name + suffix).diagonal().double() for suffix in (INPUTS, OUTPUTS))
            step = max(1, _CHUNK // len(inputs))
            made = (part[:, None] * (inputs / file.tokens[name]) for part in outputs.split(step))
        else:
            made = _read(file, name)
        for values in made:
            if not bool(torch.isfinite(values).all()) or (file.kind != "gram" and bool((values < 0).any())):
                raise InputError(f"{file.label}: {name} has values that are negative or not finite; estimate it again")
            yield name, values


def _read(file: CurvatureFile, name: str) -> Iterator[Tensor]:
    numel = math.prod(file.shapes[name])
    for start in range(0, numel, _CHUNK):
        yield file.read(name, start, min(start + _CHUNK, numel), lambda n: torch.empty(n, dtype=torch.uint8))


DESCRIPTIONS = {
    "diagonal": "For every parameter, the **sum** over examples of the squared gradient of an example's loss.",
    "gram": "For every linear layer XᵀX, the **sum** over all tokens of the outer products of its inputs. `regmean` "
    "uses it.",
    "kronecker": "For every linear layer two Kronecker factors: **sums** over all tokens of the outer products of its "
    "inputs (`NAME.A`) and of the gradients of its outputs (`NAME.G`). For every other parameter, the sum over "
    "examples of the squared gradient.",
}
MERGED_CURVATURE = (
    "The curvature of a merged model: H̄ = H_0 + Σ α_t H_t, in sums over examples. It is used when the model is merged "
    "again."
)
LIKELIHOODS = {
    "empirical": "labels of the data",
    "sampled": "labels drawn from the model",
    "exact": "expectation over the model's classes",
    "adam": "second moments of Adam",
    "ivon": "curvature estimate of IVON",
}


def write_curvature_card(folder: Path, facts: Mapping[str, str] | None = None, what: str = "") -> None:
    """Write README.md into a curvature folder; see ``curvature_card``."""
    with open_curvature(str(folder)) as file:
        (folder / CARD).write_text(curvature_card(file, facts, what), "utf-8")


def curvature_card(file: CurvatureFile, facts: Mapping[str, str] | None = None, what: str = "") -> str:
    """Return the card of a curvature folder.

    Args:
        file: The curvature.
        facts: What else is known, such as the data.
        what: What the file holds, in Markdown; by default by its kind.
    """
    from huggingface_hub import ModelCardData

    model, likelihood = file.metadata.get("model", ""), file.likelihood
    entries = sum(math.prod(shape) for shape in file.shapes.values())
    nbytes = sum(path.stat().st_size for path in file.files())
    known = {
        "model": as_code(model) if model else "not named",
        "kind": file.kind,
        "examples": f"{file.examples:,}",
        "likelihood": f"{as_text(likelihood)}: {LIKELIHOODS.get(likelihood, 'unknown')}" if likelihood else "",
        **{key: as_code(text) for key, text in (facts or {}).items()},
        "stored as": f"{file.precision}, {len(file.shapes)} tensors, {entries:,} entries, {size(nbytes)}",
    }
    method = "regmean" if file.kind == "gram" else "gradient-matching"
    recipe = f"method: {method}\nbase: ./base\nmodels:\n- model: ./model\n  curvature: ./{STEM}\n"
    usage = f"""By default, a merge uses the folder `{STEM}` inside a model's folder. A recipe can name another:

{as_block("yaml", recipe)}

`gradmerge {STEM} show` prints what it contains, and `gradmerge merge recipe.yml -o merged` merges with it. It contains
no data but depends on the data. For example, the curvature of a classifier shows which words occurred."""
    return render_card(
        ModelCardData(tags=["gradmerge", STEM]),
        f"Curvature of {as_text(model)}" if model else "Curvature",
        f"{what or DESCRIPTIONS[file.kind]}\n\n{markdown_table(['', ''], [row for row in known.items() if row[1]])}",
        usage=usage,
    )
