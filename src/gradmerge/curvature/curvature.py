"""Curvature in memory: names → sums of squared gradients."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..arguments import checked
from ..display import Displayed, View
from ..errors import InputError
from ..io.atomic_dir import AtomicDir, require_space
from ..io.reader import bytes_of
from ..io.writer import ShardWriter
from . import log8
from .curvature_card import write_curvature_card
from .format import PENALTY, PRECISIONS, STEM, metadata, open_curvature
from .sum_storage import release_pages
from .summary import GroupSummary, summarize

SHARD_SIZE = 5_000_000_000


class NamedSums(Displayed, Mapping[str, Tensor]):
    """What diagonals, Gram matrices and Kronecker factors share: a mapping from names to sums over the examples."""

    def __init__(self, sums: Mapping[str, Tensor], examples: int, model: str = "") -> None:
        if examples != int(examples) or examples < 1:
            raise ValueError(f"curvature is a sum over a whole number of examples, at least 1, not over {examples}")
        self._sums = dict(sums)
        self.examples = int(examples)
        self.model = model

    def __getitem__(self, name: str) -> Tensor:
        return self._sums[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    @checked()
    def save(
        self, path: str | Path, *, precision: str = "float32", shard_size: int = SHARD_SIZE, force: bool = False
    ) -> None:
        """Write a folder, whole or not at all.

        Args:
            path: The new folder; of curvature the model's own `curvature/` is where merges look for it.
            precision: ``float32``; of diagonal curvature also ``bfloat16`` or ``log8`` (8 bits per entry).
            shard_size: Largest size of one file, in bytes.
            force: Replace ``path`` if gradmerge wrote it, or it is empty.

        >>> curvature.save("./yelp/curvature", precision="log8")  # doctest: +SKIP
        """
        with AtomicDir(Path(path), "curvature", force=force) as staging:
            self.write(staging.folder, precision, shard_size)

    @abstractmethod
    def write(self, folder: Path, precision: str = "float32", shard_size: int = SHARD_SIZE) -> None:
        """Write the files into a folder that is there."""


class Curvature(NamedSums):
    """The diagonal curvature of one model on one data set: a mapping from parameter names to sums over examples.

    Args:
        sums: Name of a parameter in memory → Σ_i [∇ℓ_i]², the **sum** over examples of squared gradients.
        examples, model: How many examples, of which model.
        likelihood: What the gradients were taken of; see :func:`gradmerge.estimate_curvature`.
        stored: Turns the names into those of the model's files, where the two differ, when the curvature is saved.
    """

    def __init__(
        self,
        sums: Mapping[str, Tensor],
        examples: int,
        likelihood: str = "empirical",
        model: str = "",
        stored: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(sums, examples, model)
        self.likelihood = likelihood
        self._stored = stored

    def _line(self) -> list[str]:
        return [f"{len(self)} tensors", f"{self.examples} examples", self.likelihood]

    def _view(self) -> View:
        columns = ["layers", "entries", "mean per entry (sum over examples)", "share of zeros", "largest"]
        return columns, [[g.name, g.entries, g.per_entry, g.share_of_zeros, g.largest] for g in self.summary()], ()

    def sum(self) -> dict[str, Tensor]:
        """Σ_i [∇ℓ_i]² over the examples."""
        return dict(self._sums)

    def mean(self) -> dict[str, Tensor]:
        """(1/N) Σ_i [∇ℓ_i]²."""
        return {name: value / self.examples for name, value in self._sums.items()}

    def __add__(self, other: Curvature) -> Curvature:
        """The curvature of both data sets together: sums and numbers of examples add up."""
        if self.keys() != other.keys():
            odd = sorted(self.keys() ^ other.keys())
            raise ValueError(f"the two do not have the same parameters: {odd[0]!r} is in one of them only")
        if self.likelihood != other.likelihood:
            raise ValueError(f"the two were estimated differently: {self.likelihood} and {other.likelihood}")
        sums = {name: value + other[name] for name, value in self._sums.items()}
        return Curvature(sums, self.examples + other.examples, self.likelihood, self.model or other.model, self._stored)

    def scale(self, factor: float) -> Curvature:
        """Every sum times a number ≥ 0."""
        if not factor >= 0:
            raise ValueError(f"curvature can only be scaled by a number that is not negative, not by {factor}")
        sums = {name: value * factor for name, value in self._sums.items()}
        return Curvature(sums, self.examples, self.likelihood, self.model, self._stored)

    def summary(self) -> list[GroupSummary]:
        """Sum, share of zeros and maximum of each layer's entries, as sums over examples."""
        return summarize(self._sums.items())

    def write(self, folder: Path, precision: str = "float32", shard_size: int = SHARD_SIZE) -> None:
        """Write the files into a folder that is there; ``precision`` is ``float32``, ``bfloat16`` or ``log8``."""
        if precision not in PRECISIONS:
            raise InputError(f"precision {precision!r}: known are {', '.join(PRECISIONS)}")
        sums = self._stored(self._sums) if self._stored is not None else self._sums
        require_finite(sums, signed=False)
        write_sums(folder, sums, self.header(precision), shard_size)

    def header(self, precision: str = "float32") -> Mapping[str, str]:
        """The header metadata of its file."""
        return metadata(self.examples, self.likelihood, self.model, precision)

    @classmethod
    @checked()
    def load(cls, path: str | Path) -> Curvature:
        """Read a curvature folder or file whole, in float32.

        Args:
            path: The folder or file.

        Returns:
            The curvature, as sums over examples.

        >>> Curvature.load("./yelp/curvature").examples  # doctest: +SKIP
        560000
        """
        with open_curvature(str(path)) as file:
            if file.kind != "diagonal":
                raise InputError(f"{path}: holds {file.holds}, where a diagonal is needed (--kind diagonal)")
            sums = {name: file.read_whole(name) for name in file.shapes}
            return cls(sums, file.examples, file.likelihood, file.metadata.get("model", ""))


def require_finite(sums: Mapping[str, Tensor], what: str = "curvature", *, signed: bool = True) -> None:
    """Raise if a value is NaN or infinite, or negative where ``signed`` is False."""
    for name, value in sums.items():
        if not bool(torch.isfinite(value).all()) or (not signed and bool((value < 0).any())):
            wrong = "not finite" if signed else "negative or not finite"
            raise InputError(f"the {what} of {name} has values that are {wrong}; it is not saved")
        release_pages(value)


def write_sums(
    folder: Path, sums: Mapping[str, Tensor], header: Mapping[str, str], shard_size: int, stem: str = STEM
) -> None:
    """Write files of sums, in the precision that the header says. Tensors are encoded one at a time."""
    precision = header.get("precision", "float32")
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    parts: dict[str, Callable[[], Tensor]] = {}
    for name, value in sums.items():
        tensors[name] = (PRECISIONS[precision], tuple(value.shape))
        parts[name] = functools.partial(_encoded, value, precision)
        if precision == "log8":
            tensors[name + log8.SUFFIX] = ("F32", (2,))
            parts[name + log8.SUFFIX] = lambda v=value: log8.encode(v.detach().cpu())[1]  # type: ignore[misc]
    writer = ShardWriter(folder, stem, tensors, shard_size, header)
    require_space(folder, writer.nbytes)
    with writer:
        for name, part in parts.items():
            writer.write(name, 0, bytes_of(part().contiguous()))
            if name in sums:
                release_pages(sums[name])
        writer.finish()
    if stem == STEM and header["likelihood"] != PENALTY:
        write_curvature_card(folder)


def _encoded(value: Tensor, precision: str) -> Tensor:
    value = value.detach().cpu()
    if precision == "log8":
        return log8.encode(value)[0]
    return value.to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
