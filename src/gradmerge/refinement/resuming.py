"""A refinement that was stopped between two rounds, in the folder that becomes its result."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from ..errors import InputError
from ..processes import Processes
from ..storage.smallfile import read_json
from ..storage.staging import Staging
from .newton import Progressed
from .points import trained
from .rounds import Refinement, RefinementStep, Round

WEIGHTS, LAST = "weights/", "last/"


def shared_progress(processes: Processes, so_far: Progressed | None, model: nn.Module) -> Progressed | None:
    """What the first process goes on from, in all of them."""
    if processes.count == 1:
        return so_far
    facts = None
    if so_far is not None:
        sizes = {name: list(value.shape) for name, value in so_far.last.items()}
        rounds, done = [asdict(one) for one in so_far.done.rounds], so_far.done
        facts = [done.method, rounds, dict(done.passes), done.doubted, done.stopped, sizes]
    told = processes.gather(facts)[0]
    if told is None:
        return None
    method, rounds, passes, doubted, stopped, sizes = told
    parameters = trained(model)
    if so_far is None:
        done = Refinement(model, method, [_round(one) for one in rounds], passes=Counter(passes), stopped=stopped)
        done.doubted = doubted
        usual = next(iter(parameters.values()))
        last = {name: torch.empty(size, dtype=usual.dtype, device=usual.device) for name, size in sizes.items()}
        so_far = Progressed(done, last, {name: torch.empty_like(p, device="cpu") for name, p in parameters.items()})
    processes.from_first(so_far.last[name] for name in sizes)
    processes.from_first(so_far.weights[name] for name in parameters)
    return so_far


def _round(facts: Mapping[str, Any]) -> Round:
    return Round(**{**facts, "steps": [RefinementStep(**step) for step in facts["steps"]]})


class SavedRounds:
    """Weights and losses after the last round, with the request that they are for."""

    def __init__(self, staging: Staging, request: dict[str, Any]) -> None:
        self._staging = staging
        # As JSON reads it again.
        self._request = json.loads(json.dumps(request))
        self._facts = staging.folder / "so-far.json"
        staging.keep = self._facts.is_file()

    def write(self, state: Progressed) -> None:
        """Save what the next round needs. Of two saves, one is whole at any time: the facts name its tensors' file."""
        done = state.done
        tensors = {WEIGHTS + name: p.detach().cpu().contiguous() for name, p in trained(done.model).items()}
        tensors |= {LAST + name: value.detach().cpu().contiguous() for name, value in state.last.items()}
        name = f"so-far-{len(done.rounds)}.safetensors"
        save_file(tensors, self._staging.folder / name)
        facts = {
            "request": self._request,
            "tensors": name,
            "rounds": [asdict(one) for one in done.rounds],
            "passes": dict(done.passes),
            "doubted": done.doubted,
            "stopped": done.stopped,
        }
        fresh = self._facts.with_suffix(".new")
        fresh.write_text(json.dumps(facts), "utf-8")
        os.replace(fresh, self._facts)  # noqa: PTH105
        self._staging.keep = True
        for path in self._staging.folder.glob("so-far-*.safetensors"):
            if path.name != name:
                path.unlink()

    def read(self, model: nn.Module, method: str) -> Progressed | None:
        """What an earlier run left, if it left something."""
        if not self._facts.is_file():
            return None
        folder = self._staging.folder
        try:
            facts = read_json(self._facts)
            if facts["request"] != self._request:
                raise InputError(
                    f"{folder}: holds an unfinished refinement of another model, other data or other options. Run it "
                    "with the same ones, or without --resume to begin anew."
                )
            tensors = load_file(folder / str(facts["tensors"]))
            done = Refinement(model, method, passes=Counter(facts["passes"]), stopped=facts["stopped"])
            done.doubted = list(facts["doubted"])
            done.rounds += [_round(one) for one in facts["rounds"]]
            shapes = {name: parameter.shape for name, parameter in trained(model).items()}
            weights = {name: tensors[WEIGHTS + name] for name in shapes}
            last = {name.removeprefix(LAST): value for name, value in tensors.items() if name.startswith(LAST)}
            if any(weights[name].shape != shape for name, shape in shapes.items()):
                raise ValueError("other shapes")
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            unread = f"what it holds cannot be read ({error})"
            raise InputError(f"{folder}: {unread}. Run without --resume to begin anew.") from error
        place = next(model.parameters()).device
        return Progressed(done, {name: value.to(place) for name, value in last.items()}, weights)

    def remove(self) -> None:
        self._facts.unlink(missing_ok=True)
        for path in self._staging.folder.glob("so-far*"):
            path.unlink()
