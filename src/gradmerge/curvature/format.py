"""Curvature files: opened and checked like checkpoints, read a range of elements at a time; and written."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..io.atomic_dir import require_space
from ..io.reader import Entry, TensorFile, TensorInfo, bytes_of, close_files, local_path, open_files
from ..io.writer import ShardWriter
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
        self.label, self._files = label, files
        self.metadata = {key: text for file in files for key, text in file.metadata.items()}
        if self.metadata.get("format") != FORMAT:
            found = repr(self.metadata["format"][:40]) if "format" in self.metadata else "none"
            raise InputError(f"{label}: not a curvature file. Its format is {found}, not {FORMAT!r}. Is it a model?")
        self.kind = self._known("kind", "diagonal", KINDS)
        self.precision = self._known("precision", "float32", PRECISIONS)
        self.likelihood = self.metadata.get("likelihood", "")
        self.examples = self._examples()
        self._entries: dict[str, tuple[TensorFile, Entry]] = {
            name: (file, entry) for file in files for name, entry in file.entries.items()
        }
        scales = {name + LOG8 for name in self._entries} if self.precision == "log8" else set()
        self.shapes = {name: entry.shape for name, (_, entry) in self._entries.items() if name not in scales}
        self._check_types()
        self.tokens = self._tokens() if self.kind == "kronecker" else {}
        """Weight with Kronecker factors → T, the number of tokens."""
        names = self._json("fan_in_fan_out")
        self.transposed = frozenset(n for n in names if isinstance(n, str)) if isinstance(names, list) else frozenset()
        """Weights stored as (in, out), as in GPT-2's Conv1D."""
        self._tables: dict[str, Tensor] = {}

    def _known(self, key: str, default: str, known: Mapping[str, str]) -> str:
        value = self.metadata.get(key, default)
        if value not in known:
            raise InputError(f"{self.label}: unknown {key} {value[:40]!r}; known are {', '.join(known)}")
        return value

    def _examples(self) -> int:
        text = self.metadata.get("examples", "")
        if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) == 0:
            raise InputError(f"{self.label}: the header's examples are {text[:40]!r}, not a whole number above 0")
        return int(text)

    def _check_types(self) -> None:
        types = {name: self._entries[name][1].dtype for name in self.shapes}
        if wrong := [f"{name}: {dtype}" for name, dtype in types.items() if dtype != PRECISIONS[self.precision]]:
            raise InputError(
                f"{self.label}: tensors that are not {self.precision}, as the header says:\n{listed(wrong)}"
            )
        for name in self.shapes if self.precision == "log8" else ():
            scale = self._entries.get(name + LOG8)
            if scale is None or (scale[1].dtype, scale[1].shape) != ("F32", (2,)):
                raise InputError(f"{self.label}: {name + LOG8} with two float32 numbers is missing")

    def _json(self, key: str) -> Any:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(self.metadata.get(key, ""))

    def _tokens(self) -> dict[str, int]:
        tokens = self._json("tokens")
        if not isinstance(tokens, dict) or not all(type(n) is int and 0 < n < 2**63 for n in tokens.values()):
            raise InputError(f"{self.label}: the header's tokens are not a number above 0 for each layer")
        shapes = {part: self.shapes.get(part) for name in tokens for part in (name + INPUTS, name + OUTPUTS)}
        wrong = [part for part, shape in shapes.items() if not shape or len(shape) != 2 or shape[0] != shape[1]]
        if wrong:
            raise InputError(f"{self.label}: factors that are missing or not square:\n{listed(wrong)}")
        return tokens

    @property
    def parameters(self) -> set[str]:
        """The parameters whose curvature it holds."""
        factors = {name + part for name in self.tokens for part in (INPUTS, OUTPUTS)}
        return (self.shapes.keys() - factors) | self.tokens.keys()

    @property
    def holds(self) -> str:
        """The kind in words."""
        return KINDS[self.kind]

    def rename(self, new: Callable[[str], str]) -> None:
        """Rename the parameters; ``new`` changes only beginnings of names."""
        self._entries = {new(name): location for name, location in self._entries.items()}
        self.shapes = {new(name): shape for name, shape in self.shapes.items()}
        self.tokens = {new(name): count for name, count in self.tokens.items()}
        self.transposed = frozenset(map(new, self.transposed))

    def read(self, name: str, start: int, stop: int, take: Any) -> Tensor:
        """Read elements ``start`` to ``stop`` of the flattened sum in float32; ``take(nbytes)`` returns a buffer."""
        file, entry = self._entries[name]
        dtype = _TORCH[entry.dtype]
        buffer: Tensor = take((stop - start) * dtype.itemsize)
        if stop > start:
            file.read_into(bytes_of(buffer), entry.start + start * dtype.itemsize)
        values = buffer.view(dtype)
        return decode_log8(values, self._table(name)) if self.precision == "log8" else values.float()

    def read_whole(self, name: str) -> Tensor:
        """Read a sum into new memory, in float32."""
        shape = torch.Size(self.shapes[name])
        return self.read(name, 0, shape.numel(), lambda n: torch.empty(n, dtype=torch.uint8)).reshape(shape)

    def _table(self, name: str) -> Tensor:
        if name not in self._tables:
            file, entry = self._entries[name + LOG8]
            ends = torch.empty(2)
            file.read_into(bytes_of(ends), entry.start)
            low, high = ends.tolist()
            if not (0 <= low <= high < float("inf")) or (high > 0 and low == 0):
                scale = name + LOG8
                raise InputError(f"{self.label}: {scale} holds {low:g} and {high:g}, not 0 < smallest ≤ largest")
            self._tables[name] = log8_table(ends)
        return self._tables[name]

    def will_need(self, name: str) -> None:
        """Start to read a sum in the background."""
        file, entry = self._entries[name]
        file.will_need(entry.start, entry.nbytes)

    def nbytes(self, name: str) -> int:
        return self._entries[name][1].nbytes

    def files(self) -> list[Path]:
        return [file.path for file in self._files]

    def close(self) -> None:
        close_files(self._files)

    def __enter__(self) -> CurvatureFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def write_sums(
    folder: Path, sums: Mapping[str, Tensor], header: Mapping[str, str], shard_size: int, stem: str = STEM
) -> None:
    """Write files of sums, in the precision of the header. Tensors are encoded one at a time."""
    precision = header["precision"]
    tensors: dict[str, TensorInfo] = {}
    parts: dict[str, Callable[[], Tensor]] = {}
    for name, value in sums.items():
        tensors[name] = TensorInfo(PRECISIONS[precision], tuple(value.shape))
        parts[name] = functools.partial(_encode, value, precision)
        if precision == "log8":
            tensors[name + LOG8] = TensorInfo("F32", (2,))
            parts[name + LOG8] = lambda v=value: encode_log8(v.detach().cpu())[1]  # type: ignore[misc]
    writer = ShardWriter(folder, stem, tensors, shard_size, header)
    require_space(folder, writer.nbytes)
    with writer:
        for name, part in parts.items():
            writer.write(name, 0, bytes_of(part().contiguous()))
        writer.finish()


def _encode(value: Tensor, precision: str) -> Tensor:
    value = value.detach().cpu()
    return encode_log8(value)[0] if precision == "log8" else value.to(_TORCH[PRECISIONS[precision]])


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
