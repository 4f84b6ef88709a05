"""Sums of an estimate that goes on for long, saved now and then: a run that was stopped goes on from them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..curvature.curvature import Curvature
from ..curvature.kronecker import KroneckerCurvature, for_kronecker_files, stored_alone
from ..curvature.stored_names import for_files
from ..errors import InputError
from ..storage.smallfile import read_json
from ..storage.staging import MARK, REPLACED, Staging


def stored_as(sums: Curvature | KroneckerCurvature, model: nn.Module | None) -> Curvature | KroneckerCurvature:
    """The same under names of the model's files when it is saved; without a model, as in memory."""
    if isinstance(sums, KroneckerCurvature):
        convert = for_kronecker_files(model, stored_alone(model)) if model is not None else None
        facts = sums.examples, sums.likelihood, "", sums.transposed, sums.wide
        return KroneckerCurvature(sums.layers, sums.diagonal, *facts, convert)
    return Curvature(sums, sums.examples, sums.likelihood, "", for_files(model) if model is not None else None)


class SavedSums:
    """The sums so far, in the folder that becomes the result, with the request that they are for."""

    def __init__(self, staging: Staging) -> None:
        self._staging, self._folder = staging, staging.folder
        self._curvature, self._request = self._folder / "so-far", self._folder / "so-far.json"
        self.request: dict[str, Any] = {}
        staging.keep = self._request.is_file()

    def write(self, so_far: Curvature | KroneckerCurvature, rows: Sequence[Sequence[int]]) -> None:
        """Save sums, and the stretches of rows that they are of."""
        stored_as(so_far, None).save(self._curvature, force=True)
        temporary = self._request.with_suffix(".new")
        temporary.write_text(json.dumps({**self.request, "rows": [list(stretch) for stretch in rows]}))
        os.replace(temporary, self._request)  # noqa: PTH105
        self._staging.keep = True

    def clear_rest(self) -> None:
        """Make room for the result; the sums stay until that is written."""
        for child in self._folder.iterdir():
            if child not in (self._curvature, self._request, self._folder / MARK):
                shutil.rmtree(child) if child.is_dir() else child.unlink()

    def remove(self) -> None:
        self._request.unlink(missing_ok=True)
        shutil.rmtree(self._curvature, ignore_errors=True)

    def read(self, kind: str) -> tuple[Curvature | KroneckerCurvature, list[list[int]]] | None:
        """The sums that an earlier run saved, and the stretches of rows that they are of."""
        if not self._request.is_file():
            return None
        aside = self._curvature.with_name(self._curvature.name + REPLACED)
        if aside.is_dir() and not self._curvature.exists():  # a kill came while newer sums took the place of these
            aside.rename(self._curvature)
        try:
            found = read_json(self._request)
            rows = [[int(first), int(end)] for first, end in found.pop("rows")]
            load = KroneckerCurvature.load if kind == "kronecker" else Curvature.load
            so_far: Curvature | KroneckerCurvature = load(self._curvature)
        except (InputError, OSError, ValueError, KeyError, TypeError) as error:
            unread = f"what it holds cannot be read ({error})"
            raise InputError(f"{self._folder}: {unread}. Run without --resume to begin anew.") from error
        if found != self.request:
            raise InputError(
                f"{self._folder}: holds a measurement of another model, other data or other options. "
                "Run it with the same ones, or without --resume to begin anew."
            )
        return so_far, rows
