"""Refinement by AdamW on the rows of all tasks together: passes with a learning rate that rows held back choose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..progress import NoProgress, Progress
from .newton import Penalty, Progressed, begin, losses_at
from .owners import DataOwner
from .points import evaluated, norm, trained
from .rounds import Refinement, RefinementStep, Round

#: Where the search for a learning rate begins, its factor, and how many it tries at most.
RATE, FACTOR, TRIALS = 1e-4, 3.0, 5
#: Rows of all tasks that a step is made of, however many are computed at once.
STEP_ROWS = 32
#: The share of a pass over which the rate rises: AdamW's first steps know no sizes, and move every weight as far.
WARM = 0.2


def adamw(
    model: nn.Module,
    owners: Sequence[DataOwner],
    *,
    rounds: int = 2,
    penalty: Penalty | None = None,
    seed: int = 0,
    so_far: Progressed | None = None,
    told: Callable[[Progressed], None] = lambda progressed: None,
    progress: Progress | None = None,
) -> Refinement:
    """Refine a model in place by passes over all rows; arguments as of :func:`newton`.

    The first pass is made with several learning rates, up or down from ``RATE`` while the loss on the rows held back
    falls, and the best is kept. Others follow while that loss goes on falling, at this rate or less. Inside a pass the
    rate rises over the first fifth, and falls linearly to 0.
    """
    state = so_far or begin(model, owners, "adamw", penalty)
    done, progress = state.done, progress or NoProgress()
    rows = sum(owner.rows for owner in owners)
    while len(done.rounds) <= rounds and not done.stopped:
        begun, number = time.perf_counter(), len(done.rounds)
        progress.begin(f"pass {number} of {rounds}", 2 * rows * (TRIALS if number == 1 else 1))
        best = _Best(model, done.rounds[-1].judged)
        for rate in _rates(done, best):
            order = torch.Generator().manual_seed(1000 * seed + number)
            _one_pass(model, owners, rate, penalty, order, done)
            after = losses_at(model, owners, penalty, done)
            best.offer(after, rate)
        length = best.restore()
        if best.found is None:
            done.stopped = "no pass lowers the loss on the rows held back"
            break
        step = RefinementStep(length, best.rate / RATE, best.rate)
        done.rounds.append(Round(best.found.held, best.found.rows, [step], time.perf_counter() - begun))
        told(state)
    return done


class _Best:
    """The weights before a pass, and the best ones after it."""

    def __init__(self, model: nn.Module, before: float) -> None:
        self._parameters = trained(model)
        self._start = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._kept: dict[str, Tensor] | None = None
        self.found: Round | None = None
        self.rate = 0.0
        self._judged = before

    def offer(self, after: Round, rate: float) -> None:
        """Keep the weights as they are if they are the best so far, and go back to the start."""
        if after.judged < self._judged:
            self._judged, self.found, self.rate = after.judged, after, rate
            self._kept = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._place(self._start)

    def restore(self) -> float:
        """Put the model at the best weights; how far from the start they are."""
        if self._kept is None:
            return 0.0
        self._place(self._kept)
        return norm({name: value - self._start[name] for name, value in self._kept.items()})

    def _place(self, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])


def _rates(done: Refinement, best: _Best) -> Iterator[float]:
    """The learning rates to try, each after the result of the one before is known."""
    if len(done.rounds) > 1:
        rate = done.rounds[-1].steps[-1].damping
        for power in range(3):
            if best.found is None:
                yield rate / FACTOR**power
        return
    yield RATE
    tried = 1
    for direction in (FACTOR, 1 / FACTOR):
        rate = RATE
        while tried < TRIALS:
            rate *= direction
            tried += 1
            yield rate
            if best.rate != rate:
                break
        if best.rate > RATE:
            return


def _one_pass(
    model: nn.Module,
    owners: Sequence[DataOwner],
    rate: float,
    penalty: Penalty | None,
    order: torch.Generator,
    done: Refinement,
) -> None:
    """All rows of all tasks once, in a random order."""
    parameters = trained(model)
    examples = sum(owner.examples for owner in owners)
    places = [(owner, row) for owner in owners for row in range(owner.rows)]
    shuffled = [places[place] for place in torch.randperm(len(places), generator=order).tolist()]
    steps = [shuffled[first : first + STEP_ROWS] for first in range(0, len(shuffled), STEP_ROWS)]
    optimizer = torch.optim.AdamW(parameters.values(), lr=rate, weight_decay=0.0)
    with evaluated(model), torch.enable_grad():
        for number, chosen in enumerate(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min((number + 1) / (WARM * len(steps)), 1 - number / len(steps))
            for owner in owners:
                rows = [row for one, row in chosen if one is owner]
                # What stands for the mean loss of an example of all tasks.
                weight = owner.examples / owner.rows * len(places) / examples / len(chosen)
                for loss in owner.losses_of_rows(model, rows):
                    (loss * weight).backward()
            if penalty is not None:
                for name, value in penalty.gradient(parameters).items():
                    gradient = parameters[name].grad
                    if gradient is not None:
                        gradient += value.to(gradient) / examples
            optimizer.step()
            optimizer.zero_grad()
    done.passes.update(gradient=1)
