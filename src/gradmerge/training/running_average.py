"""A running average of squared gradients, kept through a training run and its checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import InputError

#: Beside the curvature of a checkpoint: what a resumed run goes on from.
STATE = "online.safetensors"
_FORMAT = "gradmerge-online/1"
_KEY = "gradmerge"
_ANEW = "Remove it to begin the average anew."


class RunningAverage:
    """E_k = decay·E_{k−1} + (1 − decay)·s_k / n_k, E_0 = 0: s_k sums over the n_k examples of the k-th step used."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        """k, the number of steps in the average."""
        self.examples = 0
        """Σ n_k."""
        self._average: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor], examples: int, keep: bool) -> None:
        """Take the sums of a step; a process that does not ``keep`` the average only counts."""
        self.steps += 1
        self.examples += examples
        if not keep:
            return
        weight = (1 - self.decay) / examples
        for name, value in sums.items():
            if name in self._average:
                self._average[name].mul_(self.decay).add_(value, alpha=weight)
            else:
                self._average[name] = value * weight

    def means(self) -> Iterator[tuple[str, Tensor]]:
        """E_k / (1 − decay^k) by name: means of the steps' means, with weights that add up to 1."""
        weights = -math.expm1(self.steps * math.log(self.decay)) if self.decay > 0 else 1.0
        for name, value in self._average.items():
            yield name, value / weights

    def save(self, path: Path, step: int) -> None:
        """Write it as it is, of optimizer step ``step``."""
        facts = {"format": _FORMAT, "step": step, "steps": self.steps, "examples": self.examples, "decay": self.decay}
        tensors = {name: value.detach().cpu().contiguous() for name, value in self._average.items()}
        # One key: safetensors writes several in any order.
        save_file(tensors, path, metadata={_KEY: json.dumps(facts)})

    def load(self, path: Path, step: int, shapes: Mapping[str, torch.Size], device: torch.device) -> None:
        """Go on from what was written at ``step``."""
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {}).get(_KEY, "{}"))
                average = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            if facts.get("format") != _FORMAT or facts["step"] != step:
                raise InputError(
                    f"{path}: the running average of another step than {step}, or of another format. {_ANEW}"
                )
            steps, examples, decay = int(facts["steps"]), int(facts["examples"]), float(facts["decay"])
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise InputError(f"{path}: cannot be read as a running average: {error}. {_ANEW}") from error
        if decay != self.decay:
            told = f"averaged with decay={decay:g}, not {self.decay:g}. Resume with the same decay"
            raise InputError(f"{path}: {told}, or remove the file to begin the average anew.")
        if odd := [name for name, value in average.items() if value.shape != shapes.get(name)]:
            told = f"the running average of another model: {odd[0]} is not a parameter of this one"
            raise InputError(f"{path}: {told}, or has another shape. {_ANEW}")
        self.steps, self.examples = steps, examples
        self._average = {name: value.to(device) for name, value in average.items()}
