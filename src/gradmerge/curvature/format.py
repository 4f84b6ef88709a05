"""Curvature files: opened and checked like checkpoints, read a range of elements at a time."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..io.reader import Entry, TensorFile, bytes_of, close_files, local_path, open_files
from ..text import listed
from ..urls import redact

FORMAT = "gradmerge-curvature/1"
STEM = "curvature"
#: Where the likelihood stands, in a file that holds the matrix of a penalty.
PENALTY = "penalty"
#: Kinds of curvature, and what messages call what a file holds.
KINDS = {"diagonal": "diagonal curvature", "gram": "Gram matrices", "kronecker": "Kronecker factors"}
#: Suffixes of the names of a weight's Kronecker factors.
INPUTS, OUTPUTS = ".A", ".G"
#: How a value is stored, by precision.
PRECISIONS = {"float32": "F32", "bfloat16": "BF16", "log8": "U8"}
#: Suffix of two numbers of a tensor in `log8`: its smallest and its largest nonzero value.
#: Code 0 is zero; codes 1 to 255 are equally spaced in ln(value) between the two.
LOG8 = ".log8"
_TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


class CurvatureFile:
    """Curvature on disk: the sum over ``examples`` of squared gradients by parameter, or matrices by weight."""

    def __init__(self, label: str, files: list[TensorFile]) -> None:
        self.label = label
        self._files = files
        self._new: Callable[[str], str] = str
        self.metadata = {key: text for file in files for key, text in file.metadata.items()}
        self.kind = self.metadata.get("kind", "diagonal")
        self._check_format()
        self.examples = examples_of(label, self.metadata)
        self.likelihood = self.metadata.get("likelihood", "")
        self.precision = self.metadata.get("precision", "float32")
        self._places: dict[str, tuple[TensorFile, Entry]] = {
            name: (file, entry) for file in files for name, entry in file.entries.items()
        }
        scales = {name + LOG8 for name in self._places} if self.precision == "log8" else set()
        self.shapes = {name: entry.shape for name, (_, entry) in self._places.items() if name not in scales}
        self._check_types()
        self.tokens = self._tokens() if self.kind == "kronecker" else {}
        """Weight with Kronecker factors → T, the number of tokens."""
        self._tables: dict[str, Tensor] = {}

    def _check_format(self) -> None:
        name = self.metadata.get("format")
        if name != FORMAT:
            known = "none" if name is None else repr(name[:40])
            raise InputError(
                f"{self.label}: not a curvature file. Its format is {known}, not {FORMAT!r}. Is it a model?"
            )
        if self.kind not in KINDS:
            known = ", ".join(KINDS)
            raise InputError(f"{self.label}: curvature of an unknown kind, {self.kind[:40]!r}; known are {known}")

    def _check_types(self) -> None:
        if self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise InputError(f"{self.label}: unknown precision {self.precision[:40]!r}; known are {known}")
        types = {name: self._places[name][1].dtype for name in self.shapes}
        wrong = [f"{name}: {dtype}" for name, dtype in types.items() if dtype != PRECISIONS[self.precision]]
        if wrong:
            raise InputError(
                f"{self.label}: tensors that are not {self.precision}, as the header says:\n{listed(wrong)}"
            )
        if self.precision == "log8":
            for name in self.shapes:
                scale = self._places.get(name + LOG8)
                if scale is None or (scale[1].dtype, scale[1].shape) != ("F32", (2,)):
                    raise InputError(f"{self.label}: {name + LOG8} with two float32 numbers is missing")

    @property
    def transposed(self) -> frozenset[str]:
        """Weights stored as (in, out), as in GPT-2's Conv1D."""
        try:
            names = json.loads(self.metadata.get("fan_in_fan_out", "[]"))
        except (ValueError, RecursionError):
            names = []
        return frozenset(self._new(n) for n in names if isinstance(n, str)) if isinstance(names, list) else frozenset()

    @property
    def parameters(self) -> set[str]:
        """The parameters whose curvature it holds."""
        return (self.shapes.keys() - {name + part for name in self.tokens for part in (INPUTS, OUTPUTS)}) | set(
            self.tokens
        )

    def rename(self, new: Callable[[str], str]) -> None:
        """Rename the parameters; ``new`` changes only beginnings of names."""
        before = self._new
        self._new = lambda name: new(before(name))
        self._places = {new(name): location for name, location in self._places.items()}
        self.shapes = {new(name): shape for name, shape in self.shapes.items()}
        self.tokens = {new(name): count for name, count in self.tokens.items()}

    @property
    def holds(self) -> str:
        """The kind in words."""
        return KINDS[self.kind]

    def _tokens(self) -> dict[str, int]:
        tokens: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            tokens = json.loads(self.metadata.get("tokens", ""))
        if not isinstance(tokens, dict) or not all(
            type(count) is int and 0 < count < 2**63 for count in tokens.values()
        ):
            raise InputError(f"{self.label}: the header's tokens are not a number above 0 for each layer")
        wrong = []
        for part in (name + suffix for name in tokens for suffix in (INPUTS, OUTPUTS)):
            shape = self.shapes.get(part)
            if shape is None or len(shape) != 2 or shape[0] != shape[1]:
                wrong.append(f"{part}: {'missing' if shape is None else f'of shape {list(shape)}'}")
        if wrong:
            raise InputError(f"{self.label}: layers without two square factors:\n{listed(wrong)}")
        return tokens

    def read(self, name: str, start: int, stop: int, take: Any) -> Tensor:
        """Read elements ``start`` to ``stop`` of the flattened sum in float32; ``take(nbytes)`` returns a buffer."""
        file, entry = self._places[name]
        dtype = _TORCH[entry.dtype]
        size = dtype.itemsize
        buffer: Tensor = take((stop - start) * size)
        if stop > start:
            file.read_into(bytes_of(buffer), entry.start + start * size)
        values = buffer.view(dtype)
        if self.precision == "log8":
            return decode_log8(values, self._table(name))
        return values.float()

    def read_whole(self, name: str) -> Tensor:
        """Read a sum into new memory, in float32."""
        shape = torch.Size(self.shapes[name])
        return self.read(name, 0, shape.numel(), lambda n: torch.empty(n, dtype=torch.uint8)).reshape(shape)

    def _table(self, name: str) -> Tensor:
        if name not in self._tables:
            file, entry = self._places[name + LOG8]
            ends = torch.empty(2)
            file.read_into(bytes_of(ends), entry.start)
            low, high = ends.tolist()
            if not (0 <= low <= high < float("inf")) or (high > 0 and low == 0):
                scale = name + LOG8
                raise InputError(f"{self.label}: {scale} holds {low:g} and {high:g}, not 0 < smallest ≤ largest")
            self._tables[name] = log8_table(ends)
        return self._tables[name]

    def will_need(self, name: str) -> None:
        file, entry = self._places[name]
        file.will_need(entry.start, entry.nbytes)

    def nbytes(self, name: str) -> int:
        return self._places[name][1].nbytes

    def files(self) -> list[Path]:
        return [file.path for file in self._files]

    def close(self) -> None:
        close_files(self._files)

    def __enter__(self) -> CurvatureFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def examples_of(label: str, header: Mapping[str, str]) -> int:
    """Return the number of examples in a header."""
    text = header.get("examples", "")
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) == 0:
        raise InputError(f"{label}: the header's number of examples is {text[:40]!r}, not a whole number above 0")
    return int(text)


def open_curvature(reference: str, *, relative_to: Path | None = None) -> CurvatureFile:
    """Open a curvature folder or file, or a model folder that contains a `curvature/` folder."""
    path = local_path(reference, relative_to)
    if not path.is_file() and not path.is_dir():
        raise InputError(f"{reference}: no such curvature folder or file ({path.absolute()})")
    files = [TensorFile(path)] if path.is_file() else open_files(path, STEM) or open_files(path / STEM, STEM)
    if files is None:
        raise InputError(f"{reference}: no {STEM}.safetensors, and no {STEM}.safetensors.index.json, in this folder")
    try:
        return CurvatureFile(redact(reference), files)
    except BaseException:
        close_files(files)
        raise


def default_curvature(folder: Path | None) -> Path | None:
    """Return the `curvature/` folder inside a model folder, or None."""
    return folder / STEM if folder is not None and (folder / STEM).is_dir() else None


def metadata(examples: int, likelihood: str, model: str, precision: str = "float32", **more: str) -> Mapping[str, str]:
    """Return the header of a curvature file."""
    facts = {"format": FORMAT, "examples": str(examples), "likelihood": likelihood, "model": redact(model)}
    return {**facts, "precision": precision, **more}


def encode_log8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return uint8 codes, and the smallest and largest nonzero value. The error is at most half a step in ln."""
    values = values.float().double()  # what float32 cannot hold is 0
    positive = values[values > 0]
    if positive.numel() == 0:
        return torch.zeros(values.shape, dtype=torch.uint8), torch.zeros(2)
    ends = torch.stack([positive.min(), positive.max()]).float()
    low, high = (math.log(end) for end in ends.tolist())
    step = (high - low) / 254
    exact = (values.clamp(min=math.exp(low)).log() - low) / step if step > 0 else torch.zeros_like(values)
    codes = exact.round().clamp(0, 254) + 1
    return torch.where(values > 0, codes, 0.0).to(torch.uint8), ends


def log8_table(ends: Tensor) -> Tensor:
    """Return the values of the 256 codes of a tensor, as float32."""
    low, high = ends.double().tolist()
    if high <= 0:
        return torch.zeros(256)
    values = torch.linspace(math.log(low), math.log(high), 255, dtype=torch.float64).exp()
    return torch.cat([torch.zeros(1, dtype=torch.float64), values]).float()


def decode_log8(codes: Tensor, values: Tensor) -> Tensor:
    """Return the values of codes, from the tensor's table."""
    return values.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)
