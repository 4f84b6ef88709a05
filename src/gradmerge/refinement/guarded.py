"""Refinement with its guards: what is returned is never worse on the rows held back, nor learned from noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

from ..arguments import check_known
from ..errors import InputError
from ..processes import ALONE, Processes
from ..progress import NoProgress, Progress
from .adamw import adamw
from .newton import Penalty, Progressed, begin, newton
from .owners import DataOwner, Owner
from .points import set_weights, trained
from .rounds import Refinement

METHODS = ("newton", "adamw")
#: Labels that fit the start better than chance by fewer standard deviations may be noise, and are if those held back
#: do not fit the refined model better by as many. They have chosen its steps, so that less would be no surprise.
LEAST_SCORE = 3.0


def check_request(method: str, rounds: int) -> None:
    check_known(f"--with {method}", method, METHODS)
    if rounds < 1:
        raise InputError(f"--rounds {rounds}: at least one is needed")


def refine_model(
    model: nn.Module,
    owners: Sequence[Owner],
    method: str = "newton",
    rounds: int = 2,
    *,
    penalty: Penalty | None = None,
    seed: int = 0,
    so_far: Progressed | None = None,
    told: Callable[[Progressed], None] = lambda progressed: None,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> Refinement:
    """Refine a model in place by one of ``METHODS``; their other arguments.

    Labels that fit the start no better than the same labels dealt out at random are doubted: such a task may be new to
    the model, or noise, and a model that fits noise may have a lower loss only because it is less sure of itself. If
    the refined model does not tell the doubted labels from chance on the rows held back, the model stays as it was.
    """
    check_request(method, rounds)
    progress = progress or NoProgress()
    parameters = trained(model)
    start = {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}
    # Loss and score on all rows.
    progress.begin("evaluating", 2 * sum(owner.rows + owner.held for owner in owners))
    if so_far is not None:
        set_weights(parameters, so_far.weights)
    state = so_far or begin(model, owners, method, penalty)
    first = state.done.rounds[0]
    if so_far is None:
        state.done.doubted = [o.name for o in owners if o.label_score(model, held=False) < LEAST_SCORE]
    if method == "newton":
        shared = {"penalty": penalty, "so_far": state, "told": told, "progress": progress, "processes": processes}
        done = newton(model, owners, rounds=rounds, **shared)  # type: ignore[arg-type]
    else:
        at_hand = [owner for owner in owners if isinstance(owner, DataOwner)]
        if len(at_hand) < len(owners):
            raise InputError("--with adamw: needs the rows at hand, which their owners keep: use newton")
        done = adamw(
            model,
            at_hand,
            rounds=rounds,
            penalty=penalty,
            seed=seed,
            start=start,
            so_far=state,
            told=told,
            progress=progress,
            processes=processes,
        )
    doubted = [owner for owner in owners if owner.name in done.doubted]
    if doubted and done.improved and _together([o.label_score(model, held=True) for o in doubted]) < LEAST_SCORE:
        set_weights(parameters, start)
        done.rounds = [first]
        done.stopped = "labels are no better than chance"
        done.notes.append(
            f"the labels of {', '.join(done.doubted)} fit neither the start nor the refined model better than the same "
            "labels in a random order: the model stays as it was. Look at these labels, or leave the task out."
        )
    return done


def _together(scores: Sequence[float]) -> float:
    """One standard score of several that are independent."""
    return sum(scores) / math.sqrt(len(scores))
