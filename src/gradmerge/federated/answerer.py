"""A client's side: questions about a model, answered from rows that stay where they are.

A question names one of six kinds and brings weights; nothing else that a server sends is acted on. What goes wrong
here is told to the server in one of a few fixed phrases: an error's own words may quote rows or paths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .._version import __version__
from ..api.dividing import owners_on_disk
from ..curvature.files import INPUTS, OUTPUTS
from ..processes import ALONE
from ..progress import NoProgress
from ..refinement.points import Point, set_weights, trained
from ..refinement.saving import opened_start
from .privacy import Bounds, BudgetSpent, Ledger, PrivateOwner
from .settings import ClientSettings
from .wire import Facts, Groups, Malformed, digest, structure, weights

#: Directions and points of one question at most.
MOST_DIRECTIONS, MOST_POINTS = 16, 64
WEIGHTS = "weights"


class Refused(Exception):
    """A question that is not answered; the text goes to the server."""


class Answerer:
    """Answers about one model and one task. A context manager: it holds files open.

    Args:
        settings: What the client's owner allows.
        say: Told what is asked and answered, for the client's own eyes.
    """

    def __init__(self, settings: ClientSettings, say: Callable[[str], None] = lambda text: None) -> None:
        self.settings, self._say = settings, say
        self._stack = contextlib.ExitStack()
        start = self._stack.enter_context(opened_start(settings.model, settings.loading))
        self._model = start.model
        data, valid = ({settings.name: source} if source else {} for source in (settings.data, settings.valid))
        examples = {settings.name: settings.examples} if settings.examples else {}
        (self._owner,), _, notes = owners_on_disk(start, data, valid, examples, settings.seed, NoProgress(), ALONE)
        for text in notes:
            say(text)
        self._structure = structure(self._model)
        self._private: PrivateOwner | None = None
        if settings.noise:
            bounds = Bounds(settings.noise, settings.clip, settings.clip_loss, settings.clip_curvature)
            self._private = PrivateOwner(self._owner, bounds)
            self._ledger = Ledger(Path(settings.ledger), budget=settings.epsilon, delta=settings.delta)
            say(f"ε = {self._ledger.spent:.3g} of {settings.epsilon:g} is spent already, at δ = {settings.delta:g}")

    def __enter__(self) -> Answerer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters that are refined."""
        return sum(parameter.nbytes for parameter in trained(self._model).values())

    def answer(self, kind: str, facts: Facts, groups: Groups, told: int = 0) -> tuple[Facts, dict[str, Point]]:
        """The answer to a question; ``told`` is how many gradients this refinement was told so far."""
        mark = facts.get("mark")
        try:
            if not isinstance(mark, str):
                raise Malformed("has no mark")
            if self._owner.rows < self.settings.least_rows:
                raise Refused("it has fewer rows than its owner allows sums over")
            if kind == "hello":
                return {"mark": mark, **self._hello()}, {}
            if kind not in self._known():
                raise Refused("it does not answer that kind of question")
            if kind == "gradient" and 0 < self.settings.most_gradients <= told:
                raise Refused("it has told as many gradients as its owner allows")
            directions, points = self._placed(facts, groups)
            self._say(f"asked: {kind}")
            # Counted first: what is computed and not sent must not be computed again for nothing.
            spent = {} if self._private is None else self._spend()
            found, tensors = self._known()[kind](facts, directions, points)
            return {"mark": mark, "model": digest(weights(self._model)), **spent, **found}, tensors
        except Malformed as error:
            return {"refused": f"the question {error}"}, {}
        except Refused as error:
            self._say(f"refused: {error}")
            return {"refused": str(error)}, {}
        except BudgetSpent:
            self._say(f"refused: ε would exceed {self.settings.epsilon:g}")
            return {"refused": "its privacy budget is spent"}, {}
        except Exception as error:
            self._say(f"failed: {error}")
            return {"refused": "it could not compute the answer; its own log says why"}, {}

    def _known(self) -> Mapping[str, Callable[..., tuple[Facts, dict[str, Point]]]]:
        with_rows = {"losses": self._losses, "points": self._points, "gradient": self._gradient, "along": self._along}
        return with_rows if self._private is not None else {**with_rows, "score": self._score}

    def _hello(self) -> Facts:
        own = self._owner
        facts = {"name": own.name, "rows": own.rows, "held": own.held, "examples": own.examples}
        private = {} if self._private is None else self._privacy(self._ledger.spent)
        return {**facts, "structure": self._structure, "version": __version__, **private}

    def _privacy(self, epsilon: float) -> Facts:
        names = ("noise", "delta", "clip", "clip_loss", "clip_curvature")
        return {"private": True, "epsilon": epsilon, **{name: float(getattr(self.settings, name)) for name in names}}

    def _spend(self) -> Facts:
        epsilon = self._ledger.add(self.settings.noise)
        self._say(f"  ε = {epsilon:.3g} of {self.settings.epsilon:g}, at δ = {self.settings.delta:g}")
        return self._privacy(epsilon)

    def _placed(self, facts: Facts, groups: Groups) -> tuple[list[Point], Tensor | None]:
        """The weights into the model; the directions and points of a question, if they fit it."""
        own = trained(self._model)
        state = _fitting(WEIGHTS, groups.get("state", {}), own)
        if digest(state) != facts.get("model"):
            raise Malformed("brings other weights than it names")
        count = facts.get("directions", 0)
        if not isinstance(count, int) or not 0 <= count <= MOST_DIRECTIONS:
            raise Malformed("has too many directions")
        directions: list[Point] = [
            _fitting("a direction", groups.get(f"direction{number}", {}), own) for number in range(count)
        ]
        points = groups.get("points", {}).get("points")
        if points is not None and (points.dim() != 2 or points.shape[1] != count or len(points) > MOST_POINTS):
            raise Malformed("has points that are not in the span of its directions, or too many")
        set_weights(own, state)
        device = next(iter(own.values())).device
        return [{name: value.to(device) for name, value in one.items()} for one in directions], points

    def _losses(self, *_: Any) -> tuple[Facts, dict[str, Point]]:
        if self._private is not None:
            rows, held = self._private.losses(self._model)
        else:
            rows, held = (self._owner.losses(self._model, held=one)[0] for one in (False, True))
        return {"row_losses": rows, "held_losses": held}, {}

    def _points(
        self, facts: Facts, directions: Sequence[Point], points: Tensor | None
    ) -> tuple[Facts, dict[str, Point]]:
        held = facts.get("held")
        if points is None or not isinstance(held, bool):
            raise Malformed("has no points")
        if self._private is not None:
            return {"losses": self._private.losses_at_points(self._model, directions, points, held=held)}, {}
        return {"losses": self._owner.losses(self._model, directions, points, held=held)}, {}

    def _gradient(self, *_: Any) -> tuple[Facts, dict[str, Point]]:
        if self._private is not None:
            own = trained(self._model)
            noised = {name: value.to(own[name].dtype) for name, value in self._private.gradient(self._model).items()}
            return {}, {"gradient": noised}
        gradient, curvature = self._owner.gradient(self._model), self._owner.curvature(self._model)
        layers = curvature.layers
        factors = {name + INPUTS: one.inputs for name, one in layers.items()}
        factors |= {name + OUTPUTS: one.outputs for name, one in layers.items()}
        tokens = [one.tokens for one in layers.values()]
        facts: Facts = {"factors": list(layers), "tokens": tokens, "curvature_rows": curvature.examples}
        return facts, {"gradient": gradient, "curvature": {**factors, **curvature.diagonal}}

    def _along(self, _: Facts, directions: Sequence[Point], points: Tensor | None) -> tuple[Facts, dict[str, Point]]:
        if not directions:
            raise Malformed("has no directions")
        asked = self._private if self._private is not None else self._owner
        return {}, {"along": {"matrix": asked.along(self._model, directions)}}

    def _score(self, facts: Facts, *_: Any) -> tuple[Facts, dict[str, Point]]:
        return {"score": float(self._owner.label_score(self._model, held=facts.get("held") is True))}, {}


def _fitting(what: str, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if given.keys() != own.keys():
        raise Malformed(f"brings {what} of another model: other names")
    for name, value in given.items():
        if value.shape != own[name].shape or (what == WEIGHTS and value.dtype != own[name].dtype):
            raise Malformed(f"brings {what} of another model: other shapes or types")
        if not bool(value.isfinite().all()):
            raise Malformed(f"brings {what} with values that are not finite")
    return {name: given[name] for name in own}
