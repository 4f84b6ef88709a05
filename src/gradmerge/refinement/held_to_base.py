"""The penalty ½‖θ − θ_0‖²_P that a refinement keeps to: as it is asked for, or as the merge's record names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.model import Buffers
from ..checkpoints.opening import open_checkpoint
from ..checkpoints.published import RECORD
from ..curvature.files import open_curvature
from ..engine.record import digest_of
from ..errors import GradmergeError, InputError
from ..storage.smallfile import MAX_TOKENIZER, readable_json
from .newton import Penalty
from .saving import Start


def penalty_of(start: Start, penalty: str | None, base: str | None) -> tuple[Penalty | None, dict[str, Any], list[str]]:
    """P and θ_0, how a record names them, and notes.

    ``penalty`` is a diagonal curvature, ``identity:c`` or ``none``; None is what the record of the start names, and
    nothing if it names none. ``base`` is θ_0; None is the base that the record names.
    """
    if penalty == "none":
        return None, {"penalty": None}, []
    recorded = _recorded(start)
    notes: list[str] = []
    stated = recorded.get("penalty")
    if penalty is None and stated is None:
        stated, notes = _of_models(start, recorded)
    if penalty is None and (stated is None or stated == "none"):
        if base is not None:
            raise InputError(f"--base {base}: is θ_0 of a penalty, and there is none. Give one with --penalty")
        return None, {"penalty": None}, notes
    if start.adapter:
        if penalty is not None:
            raise InputError(f"--penalty {penalty}: only whole models can be held to a base, not {start.reference}")
        return None, {"penalty": None}, ["an adapter is refined without the penalty that its record names"]
    try:
        where = base if base is not None else _base_of(start, recorded)
        folder = start.info.folder
        text = penalty or (
            f"identity:{stated['identity']}" if isinstance(stated, dict) else _found(str(stated), folder)
        )
        matrix, origin = matrix_of(start, text), _weights(start, where)
    except (GradmergeError, KeyError) as error:
        if penalty is not None:
            raise
        notes.append(f"the penalty that {RECORD} names is not used, P = 0: {error}")
        return None, {"penalty": None}, notes
    both = {name: value for name, value in matrix.items() if name in origin}
    if not both:
        raise InputError(f"--penalty {text}: has no tensor of {start.reference}")
    return Penalty(both, origin), {"penalty": text, "base": where}, notes


def _recorded(start: Start) -> dict[str, Any]:
    """The base of the recipe that the start was merged by, with its penalty; of a refined model, what that used."""
    record = readable_json(start.info.folder / RECORD, MAX_TOKENIZER)
    if record is None or "layers" in record:  # of slices, whose layers are not those of the base with the same numbers
        return {}
    for keys in (("recipe", "base"), ("refinement", "penalty_of")):
        found: Any = record
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            digests = {
                one.get("digest") for one in record.get("inputs", []) if isinstance(one, dict) and one["role"] == "base"
            }
            return {**found, "digests": digests - {None}, "of_models": record.get("penalty")}
    return {}


def _of_models(start: Start, recorded: dict[str, Any]) -> tuple[Any, list[str]]:
    """The one penalty that all models of a merge were tuned under, as recorded beside them; or a note why not."""
    entries = recorded.get("of_models")
    known = [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
    if not known:
        return None, []
    stated = [one.get("penalty") for one in known if one.get("from") == "recorded"]
    if len(stated) < len(known):
        others = [str(one.get("model")) for one in known if one.get("from") != "recorded"]
        why = f"no penalty is recorded beside {', '.join(others)}, and that of the merge was only assumed"
    elif all(_same(start, stated[0], other) for other in stated[1:]):
        return stated[0], []
    else:
        why = "the models of the merge were tuned under different ones"
    advice = "If the target is to be held to its base, give --penalty identity:c or a curvature folder."
    return None, [f"refined without a penalty, P = 0: {why}. {advice}"]


def _same(start: Start, one: Any, other: Any) -> bool:
    """Whether two records mean the same P: files beside two models may hold equal numbers."""
    if one == other or not (isinstance(one, str) and isinstance(other, str)) or "none" in (one, other):
        return bool(one == other)
    try:
        a, b = (matrix_of(start, _found(text, start.info.folder)) for text in (one, other))
    except GradmergeError:
        return False
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def _base_of(start: Start, recorded: dict[str, Any]) -> str:
    """The base that the record names, where it is still to be found with the same weights."""
    stated = recorded.get("model", recorded.get("base"))
    if not isinstance(stated, str):
        raise InputError(f"{start.reference}: its record names no base; give it with --base")
    found = _found(stated, start.info.folder)
    with open_checkpoint(found) as checkpoint:
        digests = recorded["digests"]
        if digests and f"xxh3-128:{digest_of(checkpoint).hex()}" not in digests:
            raise InputError(f"{found}: is not the base that the merge was made from; give it with --base")
    return found


def _found(stated: str, folder: Path) -> str:
    """A path as a recipe wrote it: from the working folder, or from where a recipe may have lain beside the merge."""
    home = folder.resolve()
    for beside in (Path(), home, home.parent, home.parent.parent):
        if (beside / stated).exists():
            return str(beside / stated)
    return stated


def matrix_of(start: Start, text: str) -> dict[str, Tensor]:
    """A diagonal by the names of parameters: ``identity:c``, or of a curvature folder those that fit."""
    parameters = {name: p for name, p in start.model.named_parameters() if p.requires_grad}
    kind, colon, number = text.partition(":")
    if kind == "identity" and colon:
        try:
            c = float(number)
        except ValueError:
            c = math.nan
        if not 0 <= c < math.inf:
            raise InputError(f"--penalty {text}: the number after identity: must be finite and not negative")
        return {name: torch.full_like(p, c, requires_grad=False) for name, p in parameters.items()}
    with open_curvature(text) as file:
        if file.kind != "diagonal":
            raise InputError(f"--penalty {text}: holds {file.kind} curvature; a diagonal is needed")
        return _by_parameter(start, file.shapes, file.read_whole)


def _weights(start: Start, base: str) -> dict[str, Tensor]:
    buffers = Buffers()
    with open_checkpoint(base) as checkpoint:

        def read(name: str) -> Tensor:
            info = checkpoint.tensors[name]
            return checkpoint.read(name, 0, info.numel, buffers).reshape(info.shape).clone()

        return _by_parameter(start, {name: info.shape for name, info in checkpoint.tensors.items()}, read)


def _by_parameter(start: Start, shapes: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Tensors of a file by the names of parameters, of those that have the shape of their parameter."""
    parameters = {name: p for name, p in start.model.named_parameters() if p.requires_grad}
    found = {}
    for name, source in start.sources.items():
        if name in shapes and source in parameters and tuple(shapes[name]) == tuple(parameters[source].shape):
            found[source] = read(name).to(parameters[source])
    return found
