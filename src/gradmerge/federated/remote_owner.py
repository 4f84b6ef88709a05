"""Tasks whose owners answer over Flower: what refinement asks becomes messages, and their answers are checked."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..curvature.gradients import Gradient
from ..curvature.kronecker import KroneckerCurvature
from ..errors import MachineError
from ..refinement.points import Point, trained
from ..text import first_line, one_line
from . import verifying
from .wire import Facts, Groups, Malformed, digest, number, packed, structure, unpacked, weights

if TYPE_CHECKING:
    from flwr.serverapp import Grid

#: Seconds between two looks for answers.
PAUSE = 0.1
#: Seconds that a client has to hear that it is over.
FAREWELL = 10.0
#: A client's name: it goes into records, cards and tables.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ClientLost(MachineError):
    """Clients that did not answer, or not as they should: name → why."""

    def __init__(self, failures: Mapping[str, str]) -> None:
        self.failures = dict(failures)
        super().__init__("; ".join(f"client {name}: {why}" for name, why in failures.items()))


class RemoteOwner:
    """A task as its client tells of it; every question goes to all clients at once, and the answers are kept."""

    held_error: float | None = None

    def __init__(self, federation: Federation, node: int, facts: Facts) -> None:
        self.name = str(facts.get("name"))
        if not NAME.fullmatch(self.name):
            raise Malformed("its name is not made of letters, digits, '.', '_' and '-'")
        self.node, self._federation = node, federation
        self.rows, self.held, self.examples = (
            int(number(facts, key, least=1, whole=True)) for key in ("rows", "held", "examples")
        )
        self.privacy = verifying.privacy_of(facts)

    def curvature(self, model: nn.Module) -> KroneckerCurvature:
        """Its Kronecker curvature; one with differential privacy tells none, and the server's own stands in."""
        told: KroneckerCurvature | None = self._federation.answer(self, "gradient", model)[1]
        return told if told is not None else KroneckerCurvature({}, self._federation.stand_in(self), self.rows)

    def gradient(self, model: nn.Module) -> Gradient:
        told: Gradient = self._federation.answer(self, "gradient", model)[0]
        return told

    def along(self, model: nn.Module, directions: Sequence[Point]) -> Tensor:
        told: Tensor = self._federation.answer(self, "along", model, directions)
        return told

    def losses(
        self, model: nn.Module, directions: Sequence[Point] = (), points: Tensor | None = None, *, held: bool
    ) -> list[float]:
        if points is None:
            return [self._federation.answer(self, "losses", model)[held]]
        told: list[float] = self._federation.answer(self, "points", model, directions, points, {"held": held})
        return told

    def label_score(self, model: nn.Module, held: bool) -> float:
        """As of a ``DataOwner``; infinite, so that nothing is doubted, where differential privacy withholds it."""
        if self.privacy:
            return float("inf")
        return float(self._federation.answer(self, "score", model, more={"held": held}))

    def verified(self, kind: str, model: nn.Module, facts: Facts, groups: Groups, counts: tuple[int, int]) -> Any:
        """Its answer to a question, with so many directions and points, as refinement takes it."""
        if self.privacy:
            self.privacy = verifying.privacy_of(facts) or self.privacy
        if kind == "gradient":
            curvature = None if self.privacy else verifying.curvature_of(model, self.rows, facts, groups)
            return verifying.gradient_of(model, self.rows, groups), curvature
        if kind == "along":
            return verifying.matrix_of(groups, counts[0], noisy=bool(self.privacy))
        if kind == "losses":
            return number(facts, "row_losses"), number(facts, "held_losses")
        return verifying.losses_of(facts, "losses", counts[1]) if kind == "points" else verifying.score_of(facts)


class Federation:
    """The clients of one refinement.

    Args:
        grid: Flower's way to the clients.
        model: The model that is refined.
        timeout: Seconds that an answer may take.
        diagonal: Curvature that stands in where no client tells one; 1 for all parameters if it is None.
    """

    def __init__(
        self,
        grid: Grid,
        model: nn.Module,
        *,
        timeout: float = 600.0,
        diagonal: Point | None = None,
    ) -> None:
        self._grid, self._timeout = grid, timeout
        self._structure, self._diagonal = structure(model), diagonal
        self._ones = {name: torch.ones_like(p, requires_grad=False) for name, p in trained(model).items()}
        self.owners: list[RemoteOwner] = []
        self._kept: dict[str, tuple[str, dict[str, Any]]] = {}

    def gather(self, clients: int, wait: float) -> tuple[list[RemoteOwner], dict[str, str]]:
        """Wait for so many clients; those that fit, by name, and why others do not."""
        end = time.monotonic() + wait
        while len(nodes := sorted(self._grid.get_node_ids())) < clients:
            if time.monotonic() > end:
                raise MachineError(
                    f"{len(nodes)} of {clients} clients came within {wait:g} s. Look at what they say, or wait longer."
                )
            time.sleep(PAUSE)
        asked = {str(node): node for node in nodes}
        answers, failures = self._ask("hello", {}, {}, asked)
        refused = {f"(node {node})": why for node, why in failures.items()}
        found: dict[str, RemoteOwner] = {}
        for node, (facts, _) in answers.items():
            label = one_line(str(facts.get("name", f"(node {node})"))[:64])
            try:
                owner = RemoteOwner(self, asked[node], facts)
                if facts.get("structure") != self._structure:
                    theirs = one_line(str(facts.get("version"))[:40])
                    raise Malformed(
                        "its model is another one: other layers, labels, types, or tensors that are not refined "
                        f"(the server runs gradmerge {__version__}, it runs {theirs})"
                    )
                if owner.name in found:
                    raise Malformed("another client has the same name")
            except Malformed as error:
                refused[label] = str(error)
            else:
                found[owner.name] = owner
        self.owners = [found[name] for name in sorted(found)]
        return self.owners, refused

    def answer(
        self,
        owner: RemoteOwner,
        kind: str,
        model: nn.Module,
        directions: Sequence[Point] = (),
        points: Tensor | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Any:
        """An owner's answer; where the question is new, all owners are asked it."""
        state = weights(model)
        extra = {"points": {"points": points}} if points is not None else {}
        key = digest(state, *directions, *extra.values()) + str(more)
        if self._kept.get(kind, ("",))[0] != key:
            groups = {"state": state, **{f"direction{k}": one for k, one in enumerate(directions)}, **extra}
            facts = {"model": digest(state), "directions": len(directions), **(more or {})}
            asked = {one.name: one for one in self.owners if kind != "score" or not one.privacy}
            answers, failures = self._ask(kind, facts, groups, {name: one.node for name, one in asked.items()})
            told, counts = {}, (len(directions), 0 if points is None else len(points))
            for name, (said, tensors) in answers.items():
                try:
                    if said.get("model") != facts["model"]:
                        raise Malformed("its answer is about another model than it was asked about")
                    told[name] = asked[name].verified(kind, model, said, tensors, counts)
                except Malformed as error:
                    failures[name] = str(error)
            if failures:
                raise ClientLost(failures)
            self._kept[kind] = key, told
        return self._kept[kind][1][owner.name]

    def stand_in(self, owner: RemoteOwner) -> Point:
        """A diagonal where no client tells its curvature: the server's own, or 1 everywhere, said by the first."""
        if owner is not self.owners[0] or not all(one.privacy for one in self.owners):
            return {}
        return self._diagonal if self._diagonal is not None else self._ones

    def leave_out(self, names: Sequence[str]) -> None:
        self.owners = [owner for owner in self.owners if owner.name not in names]
        self._kept.clear()

    def end(self) -> None:
        """Tell the clients that there are no more questions. They answer if they hear it, but nothing hangs on that."""
        self._timeout = min(self._timeout, FAREWELL)
        with contextlib.suppress(MachineError):
            self._ask("end", {}, {}, {owner.name: owner.node for owner in self.owners})

    def _ask(
        self, kind: str, facts: Facts, groups: Mapping[str, Point], nodes: Mapping[str, int]
    ) -> tuple[dict[str, tuple[Facts, Groups]], dict[str, str]]:
        """The answers of those who gave one in time, and why others are without."""
        from flwr.app import Message

        mark, life = secrets.token_hex(8), self._timeout + 60
        content = packed({**facts, "mark": mark}, groups)
        messages = [Message(content, node, f"query.{kind}", ttl=life) for node in nodes.values()]
        sent = _reached(lambda: list(self._grid.push_messages(messages)))
        waiting = {name: message for name, message in zip(nodes, sent, strict=False) if message}
        answers: dict[str, tuple[Facts, Groups]] = {}
        failures = {name: "the question could not be sent to it" for name in nodes if name not in waiting}
        begun = looked = time.monotonic()
        while waiting:
            for name, message in list(waiting.items()):
                try:
                    found = _reached(lambda message=message: list(self._grid.pull_messages([message])))  # type: ignore[misc]
                    if found:
                        del waiting[name]
                        answers[name] = _answer(found[0], mark)
                except MachineError:
                    raise
                except Malformed as error:
                    failures[name] = str(error)
                except Exception as error:  # whatever bytes a client sends, and Flower makes of them
                    waiting.pop(name, None)
                    failures[name] = f"its answer cannot be read ({one_line(first_line(error))})"
            now = time.monotonic()
            if waiting and now - looked > 2:
                looked, there = now, set(_reached(lambda: list(self._grid.get_node_ids())))
                for name in [name for name in waiting if nodes[name] not in there]:
                    del waiting[name]
                    failures[name] = "it has left"
            if waiting and now - begun > self._timeout:
                failures |= dict.fromkeys(waiting, f"it did not answer within {self._timeout:g} s")
                break
            if waiting:
                time.sleep(PAUSE)
        return answers, failures


def _answer(message: Any, mark: str) -> tuple[Facts, Groups]:
    if message.has_error():
        raise Malformed(f"it failed: {one_line(str(message.error.reason)[:300])}")
    facts, groups = unpacked(message.content)
    if refused := facts.get("refused"):
        raise Malformed(f"it refuses: {one_line(str(refused)[:300])}")
    if facts.get("mark") != mark:
        raise Malformed("its answer is to another question")
    return facts, groups


def _reached(call: Callable[[], list[Any]]) -> list[Any]:
    """What Flower's server says; its own failures are not a client's."""
    import httpx

    try:
        return call()
    except httpx.HTTPError as error:
        raise MachineError(f"Flower's SuperLink does not answer: {first_line(error)}") from error
