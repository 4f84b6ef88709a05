"""Differential privacy of a client: every answer is a sum over rows, each row's part of bounded length, plus noise.

Two data sets are neighbours if one row of one counts as nothing in the other; how many rows there are is public. Then
a sum of parts of length at most C changes by at most C, and noise N(0, z²C²) on every entry makes it a Gaussian
mechanism with noise multiplier z, whatever is asked and in whatever order. Opacus' accountant adds up all answers that
were ever given about the data, which a ledger on the client's disk keeps. Covered are gradients, the curvature along
directions and all losses. Kronecker curvature and label scores are not told at all.

A row's part must not depend on other rows, not even by rounding: a server can send weights that make much of a last
bit. So every row is computed alone. Nor may the server learn to foretell the noise: it comes from the system's source
for keys. A generator of torch's has a seed of 32 bits, which one known answer is enough to find.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..curvature.losses import logits_of
from ..errors import InputError, MachineError
from ..refinement.along import curvature_along
from ..refinement.owners import DataOwner
from ..refinement.points import Point, evaluated, moving, trained
from ..storage.smallfile import read_json
from ..text import first_line

FORMAT = "gradmerge-privacy/1"
#: Entries that noise is drawn for at once.
AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Bounds:
    """How far a row's part of an answer may reach, and how much noise there is."""

    noise: float
    """z, the standard deviation of the noise as a multiple of the bound."""
    clip: float
    """Of a row's gradient, its length over all parameters."""
    clip_loss: float
    """Of a row's loss, in nats: it is taken between 0 and this."""
    clip_curvature: float
    """Of a row's curvature along the directions, the Frobenius norm of its matrix."""


class BudgetSpent(Exception):
    """Another answer would cost more privacy than the client's owner allows."""


def epsilon_of(releases: Sequence[tuple[float, int]], delta: float) -> float:
    """ε at δ of answers, (noise multiplier, how many) each, by Opacus' accountant of Rényi divergences."""
    try:
        from opacus.accountants import RDPAccountant  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(
            f"Opacus is needed to count what answers reveal, and is not there ({first_line(error)}): "
            "pip install 'gradmerge[federated]'"
        ) from error
    if not releases:
        return 0.0
    accountant = RDPAccountant()
    accountant.history = [(noise, 1.0, count) for noise, count in releases]
    with warnings.catch_warnings():  # that a finer grid of orders could give a smaller ε
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))


class Ledger:
    """All answers with noise that were ever given about some data, in a file; written before an answer leaves."""

    def __init__(self, path: Path, *, budget: float, delta: float) -> None:
        # Resolved, so that the lock beside it is the same under all its names.
        self._path, self._budget, self.delta = path.resolve(), budget, delta

    @property
    def spent(self) -> float:
        return epsilon_of(self._read(), self.delta)

    def add(self, noise: float) -> float:
        """Count one more answer; ε with it. If that is over the budget, nothing is counted."""
        with self._locked():
            releases = self._read()
            if releases and releases[-1][0] == noise:
                releases[-1] = noise, releases[-1][1] + 1
            else:
                releases.append((noise, 1))
            epsilon = epsilon_of(releases, self.delta)
            if not epsilon <= self._budget:
                raise BudgetSpent
            self._write(releases)
        return epsilon

    def _read(self) -> list[tuple[float, int]]:
        if not self._path.exists():
            return []
        try:
            found = read_json(self._path)
            if found["format"] != FORMAT:
                raise ValueError("another format")
            releases = [(float(noise), int(count)) for noise, count in found["releases"]]
            if any(not math.isfinite(noise) or noise <= 0 or count < 1 for noise, count in releases):
                raise ValueError("impossible numbers")
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise InputError(
                f"{self._path}: is not a ledger of answers ({first_line(error)}). Without it nobody knows what the "
                "data have told already: bring the file back, or give another only for data that were never asked."
            ) from error
        return releases

    def _write(self, releases: Sequence[tuple[float, int]]) -> None:
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            with fresh.open("w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, "releases": releases}, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise MachineError(f"{self._path}: writing failed, so no answer leaves: {error.strerror}") from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time: two answers must not be counted as one."""
        try:
            with self._path.with_name(self._path.name + ".lock").open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise MachineError(f"{self._path}: cannot be written beside: {error.strerror}") from error


class PrivateOwner:
    """A task's answers with every row's part bounded and noise added; what it cannot bound it does not tell."""

    def __init__(self, owner: DataOwner, bounds: Bounds) -> None:
        self._owner, self._bounds = owner, bounds

    def gradient(self, model: nn.Module) -> dict[str, Tensor]:
        sums = self.clipped_gradient(model)
        return {name: self._noised(value, self._bounds.clip) for name, value in sums.items()}

    def clipped_gradient(self, model: nn.Module) -> dict[str, Tensor]:
        """Σ_i ∇ℓ_i min(1, C/‖∇ℓ_i‖), without noise."""
        parameters = trained(model)
        sums = {n: torch.zeros_like(p, dtype=torch.float64, requires_grad=False) for n, p in parameters.items()}
        with evaluated(model), torch.enable_grad():
            for row in self._owner.rows_alone(model, held=False):
                loss = self._owner.losses_at(model, logits_of(model, row), row).sum()
                found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
                parts = [None if value is None else value.double() for value in found]
                length = math.sqrt(sum(float(part.square().sum()) for part in parts if part is not None))
                if scale := _scale(length, self._bounds.clip):
                    for into, part in zip(sums.values(), parts, strict=True):
                        if part is not None:
                            into.add_(part, alpha=scale)
        return sums

    def along(self, model: nn.Module, directions: Sequence[Point]) -> Tensor:
        noised = self._noised(self.clipped_along(model, directions), self._bounds.clip_curvature)
        # The upper half on both sides: it alone is told, and it is no longer than the whole.
        return noised.triu() + noised.triu(1).T

    def clipped_along(self, model: nn.Module, directions: Sequence[Point]) -> Tensor:
        """Vᵀ GGN V, each row's matrix of a Frobenius norm at most what is allowed."""
        total = torch.zeros(len(directions), len(directions), dtype=torch.float64)
        for row in self._owner.rows_alone(model, held=False):
            own = curvature_along(model, [row], directions, self._owner.losses_at)
            if scale := _scale(float(own.norm()), self._bounds.clip_curvature):
                total += own * scale
        return total

    def losses(self, model: nn.Module) -> tuple[float, float]:
        """The sum over rows, and the mean of those held back. A row is in one of the two: one answer, not two."""
        rows, held = (self.clipped_losses(model, held=held) for held in (False, True))
        noised = self._noised(torch.tensor([rows, held], dtype=torch.float64), self._bounds.clip_loss)
        return float(noised[0]), float(noised[1]) / self._owner.held

    def losses_at_points(
        self, model: nn.Module, directions: Sequence[Point], points: Tensor, *, held: bool
    ) -> list[float]:
        """As of a ``DataOwner``. A row's losses at all points are one part of the answer, of length √k times one's."""
        with moving(model, directions) as move:
            sums = []
            for point in points:
                move(point)
                sums.append(self.clipped_losses(model, held=held))
        bound = math.sqrt(len(points)) * self._bounds.clip_loss
        noised = self._noised(torch.tensor(sums, dtype=torch.float64), bound)
        return (noised / (self._owner.held if held else 1)).tolist()

    def clipped_losses(self, model: nn.Module, *, held: bool) -> float:
        most, total = self._bounds.clip_loss, 0.0
        with evaluated(model), torch.no_grad():
            for row in self._owner.rows_alone(model, held=held):
                loss = float(self._owner.losses_at(model, logits_of(model, row), row).sum())
                total += min(max(loss, 0.0), most) if loss == loss else most
        return total

    def _noised(self, sums: Tensor, bound: float) -> Tensor:
        return sums.double() + self._bounds.noise * bound * _gaussian(sums.numel()).view(sums.shape).to(sums.device)


def _scale(length: float, most: float) -> float:
    """What takes a row's part to the bound; 0, as if the row were not there, for one without a finite length."""
    return min(1.0, most / length) if math.isfinite(length) and length > 0 else 0.0


def _gaussian(count: int) -> Tensor:
    """Independent N(0, 1) in float64, of the system's source of randomness."""
    found = torch.empty(count, dtype=torch.float64)
    for some in found.split(AT_ONCE):
        bits = torch.frombuffer(bytearray(os.urandom(8 * len(some))), dtype=torch.int64) & ((1 << 52) - 1)
        some.copy_(torch.special.ndtri((bits.double() + 0.5) / (1 << 52)))  # neither 0 nor 1: both are exact
    return found
