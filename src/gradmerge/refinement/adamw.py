"""Refinement by AdamW on the rows of all tasks together: passes with a learning rate that rows held back choose."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import variance
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.batches import examples_in, joined, shape_of
from ..curvature.losses import logits_of
from ..processes import ALONE, Processes
from ..progress import NoProgress, Progress
from .filling import Filling
from .newton import Penalty, Progressed, begin, losses_at
from .owners import DataOwner
from .points import Point, evaluated, norm, set_weights, trained
from .rounds import Refinement, RefinementStep, Round

#: Where the search for a learning rate begins, its factor, how many it tries at most, and by how many passes each.
RATE, FACTOR, TRIALS, SEARCHED = 1e-4, 2.0, 8, 2
#: This share of the passes, in a row, that does not lower the loss on the rows held back ends a refinement: while the
#: rate is high that loss goes up and down, and falls as the rate does.
PATIENCE = 0.5
#: Rows of a step, however many are computed at once.
STEP_ROWS = 32
#: The share of a pass over which the rate rises: AdamW's first steps know no sizes, and move every weight as far.
WARM = 0.2
#: A result counts if its loss on the rows held back is below the start's by more than so many standard errors of the
#: difference: the lowest of many tries on a few rows is low by luck.
DOUBT = 1.0
MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw(
    model: nn.Module,
    owners: Sequence[DataOwner],
    *,
    rounds: int = 2,
    penalty: Penalty | None = None,
    seed: int = 0,
    start: Point | None = None,
    so_far: Progressed | None = None,
    told: Callable[[Progressed], None] = lambda progressed: None,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> Refinement:
    """Refine a model in place by up to ``rounds`` passes over all rows; other arguments as of :func:`newton`.

    Several learning rates, up or down from ``RATE`` while the loss on the rows held back falls, are tried with two
    passes each. If more are asked for, all are made at the best rate, from the start. The rate rises at the beginning
    of the first pass, and falls linearly to 0 over all of them. The result is the best of what the search and each of
    these passes ended with, if its loss on the rows held back is below the start's by more than a standard error of the
    difference, row by row.

    Args:
        start: The weights to begin with, where the model has those of ``so_far``.
    """
    state = so_far or begin(model, owners, "adamw", penalty)
    done, progress, parameters = state.done, progress or NoProgress(), trained(model)
    start = start or _copied(parameters)
    work = 2 * sum(owner.rows for owner in owners)
    passes = _Passes(model, owners, penalty, seed, done, start, processes)
    if so_far is None:
        passes.at_start = [owner.held_losses for owner in owners]
    if not done.improved:
        begun, planned = time.perf_counter(), min(rounds, SEARCHED)
        progress.begin("learning rate", work * planned * TRIALS)
        best, kept = done.rounds[0], dict(start)

        def tried(rate: float) -> float:
            nonlocal best, kept
            set_weights(parameters, start)
            made = list(passes.plan(rate, planned))
            after = made[-1][0]
            fell = passes.fell(after)
            if fell and after.judged < best.judged:
                best, kept = replace(after, steps=[step for _, step in made]), _copied(parameters)
            change = after.judged - done.rounds[0].judged
            if fell or change > 0:
                return change
            return math.inf if math.isnan(change) else 0.0

        _search(tried)
        set_weights(parameters, kept)
        if not best.steps:
            done.stopped = "no pass lowers the loss on the rows held back by more than a standard error"
            return done
        best.seconds = time.perf_counter() - begun
        done.rounds.append(best)
        told(state)
    if rounds > SEARCHED:
        progress.begin(f"{rounds} passes", work * rounds)
        _long(state, passes, rounds, told)
    return done


def _search(tried: Callable[[float], float]) -> None:
    """Try rates, up from the first while each is better than all before, and down if the first step up was not.

    While none is below 0, better than the start, it goes on downwards: all of them may have been too high.
    """
    found = [tried(RATE)]
    for factor in (FACTOR, 1 / FACTOR):
        rate, falling = RATE, True
        while falling and len(found) < TRIALS:
            rate *= factor
            loss = tried(rate)
            falling = loss < min(found) or (factor < 1 and min(loss, *found) >= 0)
            found.append(loss)
        if rate > FACTOR * RATE * 1.01 and min(found) < 0:
            return


def _long(state: Progressed, passes: _Passes, rounds: int, told: Callable[[Progressed], None]) -> None:
    """All passes at the rate that was found; those that are done already are not made again."""
    done, parameters = state.done, trained(state.done.model)
    best, made = _copied(parameters), sum(len(one.steps) for one in done.rounds[2:])
    lowest, idle = done.rounds[-1].judged if made else math.inf, 0
    if not made:
        set_weights(parameters, passes.start)
    begun, steps = time.perf_counter(), []
    for after, step in passes.plan(done.rounds[1].steps[0].damping, rounds, made, state.last):
        steps.append(step)
        idle = 0 if after.judged < lowest else idle + 1
        lowest = min(lowest, after.judged)
        if after.judged < done.rounds[-1].judged and passes.fell(after):
            lowest, idle = after.judged, 0  # as for one who goes on from here
            done.rounds.append(replace(after, steps=steps, seconds=time.perf_counter() - begun))
            best, begun, steps = _copied(parameters), time.perf_counter(), []
            state.last = passes.moments()
            told(state)
        if idle >= PATIENCE * rounds:
            done.stopped = f"{idle} passes in a row did not lower the loss on the rows held back"
            break
    state.last = {}
    set_weights(parameters, best)


class _Passes:
    """AdamW over all rows, pass by pass."""

    def __init__(
        self,
        model: nn.Module,
        owners: Sequence[DataOwner],
        penalty: Penalty | None,
        seed: int,
        done: Refinement,
        start: Point,
        processes: Processes = ALONE,
    ) -> None:
        self._model, self._owners, self._penalty, self._seed, self._done = model, owners, penalty, seed, done
        self.start, self._processes = start, processes
        self._examples = sum(owner.examples for owner in owners)
        # Rows that can be computed together are mixed over the tasks, which makes better steps. Others would cost a
        # forward pass for each task.
        self._filling = Filling()
        first = self._filling(model, [owner.batches_of([0])[0] for owner in owners], math.inf)
        self._mixed = len(set(map(shape_of, first))) == 1
        self._optimizer: torch.optim.AdamW | None = None

    def plan(
        self, rate: float, passes: int, made: int = 0, moments: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[Round, RefinementStep]]:
        """From where the model is, the losses after each of the passes that are not yet made."""
        parameters = trained(self._model)
        optimizer = self._optimizer = torch.optim.AdamW(parameters.values(), lr=rate, weight_decay=0.0)
        for number in range(made, passes):
            steps = self._steps(number)
            if number == made and moments:
                for name, parameter in parameters.items():
                    if f"{MOMENTS[0]}/{name}" in moments:
                        own = {moment: moments[f"{moment}/{name}"].clone() for moment in MOMENTS}
                        optimizer.state[parameter] = {"step": torch.tensor(float(made * len(steps))), **own}
            with evaluated(self._model), torch.enable_grad():
                for place, chosen in enumerate(steps):
                    falling = 1 - (number + place / len(steps)) / passes
                    rising = (place + 1) / (WARM * len(steps)) if number == 0 else 1.0
                    for group in optimizer.param_groups:
                        group["lr"] = rate * min(rising, falling)
                    self._differentiate(chosen, len(steps) / self._examples)
                    optimizer.step()
                    optimizer.zero_grad()
            # Machines of several kinds may round differently.
            self._processes.from_first(parameters.values())
            self._done.passes.update(gradient=1)
            after = losses_at(self._model, self._owners, self._penalty, self._done)
            moved = {name: p.detach().cpu() - self.start[name].cpu() for name, p in parameters.items()}
            yield after, RefinementStep(norm(moved), (number + 1) / passes, rate)

    @cached_property
    def at_start(self) -> list[Tensor]:
        """The losses of the rows held back, of each owner, at the start."""
        parameters = trained(self._model)
        here = _copied(parameters)
        set_weights(parameters, self.start)
        found = [owner.row_losses(self._model, held=True) for owner in self._owners]
        set_weights(parameters, here)
        self._done.passes.update(held=1)
        return found

    def fell(self, after: Round) -> bool:
        """Whether the loss on the rows held back, as it was just told, is below the start's by more than its error.

        Of a single row no error is known, and its change is taken to be all of it.
        """
        pairs = zip(self._owners, self.at_start, strict=True)
        changes = [(owner.held_losses - before).tolist() for owner, before in pairs]
        squares = (variance(own) / len(own) if len(own) > 1 else own[0] ** 2 for own in changes)
        return after.judged - self._done.rounds[0].judged < -DOUBT * math.sqrt(sum(squares))

    def moments(self) -> dict[str, Tensor]:
        """What AdamW knows after a pass."""
        states = self._optimizer.state if self._optimizer is not None else {}
        named = {name: states[p] for name, p in trained(self._model).items() if p in states}
        return {f"{moment}/{name}": one[moment] for name, one in named.items() for moment in MOMENTS}

    def _steps(self, number: int) -> list[list[tuple[DataOwner, int]]]:
        """All rows once, in a random order, in steps of about as many."""
        order = torch.Generator().manual_seed(1000 * self._seed + number + 1)
        pools = [[(owner, row) for row in range(owner.rows)] for owner in self._owners]
        if self._mixed:
            pools = [list(itertools.chain.from_iterable(pools))]
        steps = []
        for pool in pools:
            shuffled = [pool[place] for place in torch.randperm(len(pool), generator=order).tolist()]
            count = -(-len(pool) // STEP_ROWS)
            steps += [shuffled[first::count] for first in range(count)]
        return [steps[place] for place in torch.randperm(len(steps), generator=order).tolist()]

    def _differentiate(self, chosen: Sequence[tuple[DataOwner, int]], scale: float) -> None:
        """The gradient of these rows' losses, each N_t/n_t times, and of the penalty, for the mean loss of an example.

        ``scale``: steps of a pass per example, so that the gradients of a pass have the right mean.
        """
        mine = self._processes.share(len(chosen))
        rows: dict[DataOwner, list[int]] = {}
        for owner, row in chosen[mine.start : mine.stop]:
            rows.setdefault(owner, []).append(row)
        found = [(owner, part) for owner in self._owners for part in owner.batches_of(rows.get(owner, []))]
        alike: dict[tuple[DataOwner, object], list[Any]] = {}
        for (owner, _), part in zip(found, self._filling(self._model, [part for _, part in found]), strict=True):
            alike.setdefault((owner, shape_of(part)), []).append(part)
        together: dict[object, list[tuple[DataOwner, Any]]] = {}
        for (owner, _), own in alike.items():
            for batch in owner.learned_from(self._model, [joined(own)]):
                together.setdefault(shape_of(batch), []).append((owner, batch))
        for parts in together.values():
            logits = logits_of(self._model, joined([batch for _, batch in parts]))
            pieces = logits.split([examples_in(batch) for _, batch in parts])
            losses = [
                owner.losses_at(self._model, piece, batch).sum() * (owner.examples / owner.rows * scale)
                for (owner, batch), piece in zip(parts, pieces, strict=True)
            ]
            torch.stack(losses).sum().backward()
        parameters = trained(self._model)
        self._add_up(parameters)
        if self._penalty is not None:
            for name, value in self._penalty.gradient(parameters).items():
                gradient = parameters[name].grad
                if gradient is not None:
                    gradient += value.to(gradient) / self._examples

    def _add_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients over the processes; what none has a gradient of stays without."""
        if self._processes.count == 1:
            return
        lacking = self._processes.gather([name for name, p in parameters.items() if p.grad is None])
        nowhere = set(lacking[0]).intersection(*lacking)
        for name, parameter in parameters.items():
            if parameter.grad is None and name not in nowhere:
                parameter.grad = torch.zeros_like(parameter)
        self._processes.add(p.grad for p in parameters.values() if p.grad is not None)


def _copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU: copies would fill the memory of an accelerator."""
    return {name: value.detach().cpu().clone() for name, value in values.items()}
