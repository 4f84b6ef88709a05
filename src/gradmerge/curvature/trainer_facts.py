"""How many examples a Trainer had, and how many went into a step, from what its checkpoint says."""

from __future__ import annotations

import json
import pickletools
import re
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..storage.smallfile import read_bounded

#: No training run has more steps, examples or processes.
MOST = 10**15
#: Bytes: more than training_args.bin and trainer_state.json ever have.
_LONGEST, _LONGEST_STATE = 1 << 24, 100_000_000
#: Opcodes of a pickle that hold plain numbers.
_LITERALS = {"BININT", "BININT1", "BININT2", "BINFLOAT"}


@dataclass(frozen=True)
class Facts:
    """What is known of a training run; None is unknown."""

    steps: int | None = None
    """Optimizer steps taken."""
    epochs: float | None = None
    """Passes over the data, in those steps."""
    batch: int | None = None
    """Examples in a forward pass of one process."""
    processes: int | None = None
    accumulated: int | None = None
    """Forward passes that a step adds up."""
    norms: tuple[float, ...] = ()
    """Logged norms of the gradient, before clipping."""
    longest: float | None = None
    """The norm that gradients were clipped to."""

    @property
    def batch_size(self) -> int | None:
        """Examples in a step."""
        if self.batch is None or self.processes is None or self.accumulated is None:
            return None
        return self.batch * self.processes * self.accumulated

    @property
    def steps_per_epoch(self) -> float | None:
        steps = self.steps / self.epochs if self.steps and self.epochs else None
        # An epoch has at least one step.
        return steps if steps is not None and 0.5 < steps <= MOST else None


def read_facts(folder: Path) -> Facts:
    """Facts from `trainer_state.json`, the numbers in `training_args.bin`, and the random states of the processes."""
    state = _state(folder / "trainer_state.json")
    written = _numbers(folder / "training_args.bin", {"gradient_accumulation_steps", "max_grad_norm"})
    # A data set without a length has no epochs: the Trainer then writes the largest integer, and shares of max_steps.
    has_epochs = state.get("num_train_epochs") != sys.maxsize
    log = state.get("log_history")
    return Facts(
        steps=_whole(state.get("global_step")),
        epochs=_positive(state.get("epoch")) if has_epochs else None,
        batch=_whole(state.get("train_batch_size")),
        processes=_processes(folder),
        accumulated=_whole(written.get("gradient_accumulation_steps")),
        norms=tuple(
            norm
            for entry in (log if isinstance(log, list) else [])
            if isinstance(entry, dict) and (norm := _positive(entry.get("grad_norm"))) is not None
        ),
        longest=_positive(written.get("max_grad_norm")),
    )


def examples_and_batch(
    folder: Path, facts: Facts, examples: int | None, batch_size: int | None, notes: list[str]
) -> tuple[int, int]:
    """(N, B): the number of examples in the data and in a step. Given numbers count, compared with the checkpoint."""
    known = facts.batch_size
    if known is not None and batch_size not in (None, known):
        notes.append(f"--batch-size {batch_size}, but the checkpoint tells of {_product(facts)}")
    elif known is not None and batch_size is None:
        notes.append(f"batch size: {_product(facts)}, as the checkpoint tells; --batch-size says otherwise")
    b = batch_size or known
    if b is None:
        raise InputError(
            f"{folder}: the number of examples in an optimizer step is not known: {_unknown(facts)}. Pass "
            "--batch-size: batch size per device × devices × gradient accumulation steps."
        )
    steps = facts.steps_per_epoch
    if examples is None:
        if steps is None:
            raise InputError(
                f"{folder}: the number of training examples is not known: trainer_state.json is missing, or tells of "
                "no epochs (a data set without a length). Pass --examples."
            )
        about = max(1, round(steps * b))
        notes.append(
            f"{about} examples: {steps:.6g} steps per epoch × {b} per step. The last step of an epoch may have had "
            "fewer; --examples says it exactly"
        )
        return about, b
    if steps is not None and not (steps - 1) * b < examples < (steps + 1) * b:
        notes.append(
            f"--examples {examples}, but {steps:.6g} steps per epoch × {b} per step are {steps * b:.6g} examples"
        )
    return examples, b


def _product(facts: Facts) -> str:
    several = "es" if facts.processes != 1 else ""
    product = f"{facts.batch} per process × {facts.processes} process{several} × {facts.accumulated} accumulated"
    return f"{product} = {facts.batch_size}"


def _unknown(facts: Facts) -> str:
    reasons = (
        (facts.batch, "trainer_state.json has no train_batch_size"),
        (facts.processes, "no rng_state.pth tells the number of processes"),
        (facts.accumulated, "no training_args.bin tells the gradient accumulation steps"),
    )
    return ", ".join(reason for value, reason in reasons if value is None)


def doubts(facts: Facts) -> list[str]:
    """Where the gradients that the optimizer saw may not have been means over the batch."""
    notes = []
    limit = facts.longest
    if limit is not None and (clipped := sum(norm > limit for norm in facts.norms)):
        notes.append(
            f"gradients were clipped to the norm {limit:g} in {clipped} of {len(facts.norms)} logged steps: the "
            "curvature is too small, by the square of how much they were shortened"
        )
    if (facts.accumulated or 1) > 1:
        notes.append(
            f"{facts.accumulated} batches were accumulated per step. Where the Trainer added their mean losses instead "
            f"of averaging them (BERT in transformers 5 is such a case), the curvature is {facts.accumulated}² times "
            f"too large: gm.Curvature.load(OUT).scale(1 / {facts.accumulated}**2) puts it right"
        )
    return notes


def _state(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        state = json.loads(read_bounded(path, _LONGEST_STATE))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a JSON file ({error}). Is the checkpoint complete?") from error
    return state if isinstance(state, dict) else {}


def _positive(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value <= sys.float_info.max else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST else None


def _processes(folder: Path) -> int | None:
    """Every process leaves its random state: `rng_state.pth` when it was alone, `rng_state_0.pth`, … otherwise."""
    if (folder / "rng_state.pth").is_file():
        return 1
    ranks = {int(m[1]) for p in folder.iterdir() if (m := re.fullmatch(r"rng_state_(\d{1,6})\.pth", p.name))}
    # A rank without a file ran on a machine with a disk of its own, so there may be more of them.
    return len(ranks) if ranks and ranks == set(range(len(ranks))) else None


def _numbers(path: Path, names: set[str]) -> dict[str, int | float]:
    """Numbers that follow these names in a pickle, which is split into its opcodes and never run.

    `training_args.bin` is a pickle of a class: to load it is to trust it. The few plain numbers that are needed stand
    in it as a name and then a literal.
    """
    found: dict[str, int | float] = {}
    name = None
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (i for i in archive.infolist() if i.filename.endswith("/data.pkl"))
            if pickled.file_size > _LONGEST:
                return {}
            for word, value, _ in pickletools.genops(archive.read(pickled)):
                if word.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                    continue
                if name is not None and isinstance(value, int | float) and word.name in _LITERALS:
                    found.setdefault(name, value)
                name = value if isinstance(value, str) and value in names else None
    except Exception:  # zipfile, its decompressors and pickletools raise errors of many kinds
        return {}
    return found
