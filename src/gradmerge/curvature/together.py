"""An estimate by several processes: each adds up its own examples, and they meet.

They meet at the end, to add up what each has. Before that, whoever finds it time to save the sums so far, or that a
formula was wrong, calls the others: they come after the batch that they are at, and those that have no examples left
are there already. So all begin anew together, and none waits for one that never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..processes import ALONE, Processes
from .curvature import Curvature
from .kfac import KroneckerSums
from .kronecker import KroneckerCurvature, LayerFactors
from .parameter_sum import Distrusted, ParameterSum

Sums = Curvature | KroneckerCurvature
ON, DONE, AGAIN = "on", "done", "again"


class DistrustedByAll(Distrusted):
    """The same, after the processes have told each other."""


class Together:
    """What the processes of one estimate do together; one process alone just saves its sums.

    Args:
        processes: Who they are.
        due: Whether it is time to save the sums so far.
        save: Called in the first process with the sums of all, and what ``facts`` gives in each.
        facts: What goes with the sums: which examples they are of.
    """

    def __init__(
        self,
        processes: Processes = ALONE,
        due: Callable[[], bool] = lambda: False,
        save: Callable[[Sums, list[Any]], None] = lambda sums, facts: None,
        facts: Callable[[], Any] = lambda: None,
    ) -> None:
        self.processes, self._due, self._save, self._facts = processes, due, save, facts
        self._meeting = 0
        self._sums: Mapping[str, ParameterSum] = {}

    def same_factors(
        self, factors: Mapping[nn.Parameter, KroneckerSums], parameters: Mapping[str, nn.Parameter]
    ) -> dict[nn.Parameter, KroneckerSums]:
        """The factors without those that another process has none for, since it goes on from a diagonal."""
        told = self.processes.gather([name for name, parameter in parameters.items() if parameter in factors])
        common = set(told[0]).intersection(*told)
        return {parameters[name]: factors[parameters[name]] for name in told[self.processes.rank] if name in common}

    def begin(self, sums: Mapping[str, ParameterSum]) -> None:
        """From the first example on, with these sums by the names of their parameters."""
        self._sums = sums

    def after_batch(self, so_far: Callable[[], Sums], examples: int) -> None:
        """Meet if somebody asks for it; ``so_far`` gives a copy of this process's own sums, over so many examples."""
        if self._due():
            self.processes.call(self._meeting)
        if self.processes.called(self._meeting):
            self._meet(ON, so_far, examples)

    def at_end(self, so_far: Callable[[], Sums], examples: int) -> None:
        """Until no process has examples left."""
        while not self._meet(DONE, so_far, examples):
            pass

    def distrusted(self, error: Distrusted, parameters: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
        """The parameters that some process finds to be estimated wrongly; all begin anew."""
        if isinstance(error, DistrustedByAll):
            return error.parameters
        self.processes.call(self._meeting)
        names = [name for name, parameter in parameters.items() if parameter in error.parameters]
        try:
            self._meet(AGAIN, lambda: Curvature({}, 1), 0, names)
        except DistrustedByAll as agreed:
            return agreed.parameters
        raise AssertionError("a meeting to begin anew ends in beginning anew")

    def _meet(self, state: str, so_far: Callable[[], Sums], examples: int, doubted: Sequence[str] = ()) -> bool:
        """Whether all are done. If not, the sums so far are saved, or all begin anew."""
        self._meeting += 1
        held = [_held(one) for one in self._sums.values() if one.factors is not None]
        own = {"state": state, "doubted": list(doubted), "held": held, "facts": self._facts()}
        told = self.processes.gather(own)
        if any(one["state"] == AGAIN for one in told):
            names = {name for one in told for name in one["doubted"]}
            raise DistrustedByAll(self._sums[name].parameter for name in names)
        self._settle_factors([one["held"] for one in told])
        if all(one["state"] == DONE for one in told):
            return True
        sums = self.added(so_far(), examples)
        if self.processes.first:
            self._save(sums, [one["facts"] for one in told])
        return False

    def _settle_factors(self, held: Sequence[Sequence[str]]) -> None:
        """Let a layer have factors in all processes, or a diagonal in all; if it has begun with both, all begin anew.

        A process whose examples, if it has any, do not use a layer goes along with the others.
        """
        layers = [one for one in self._sums.values() if one.factors is not None]
        mixed = []
        for one, states in zip(layers, zip(*held, strict=True), strict=True):
            if "factors" in states and "diagonal" in states:
                mixed.append(one.parameter)
            elif "factors" in states and one.factors is not None:
                one.factors.begun = True
        if mixed:
            raise DistrustedByAll(mixed)

    def added(self, own: Sums, examples: int) -> Sums:
        """The sums of all processes, in place of this one's own, which may be over no example."""
        if self.processes.count == 1:
            return own
        self.processes.add(own.values())
        own.examples = sum(self.processes.gather(examples))
        if isinstance(own, KroneckerCurvature):
            counts = self.processes.gather([layer.tokens for layer in own.layers.values()])
            totals = [sum(of_layer) for of_layer in zip(*counts, strict=True)]
            for (name, layer), tokens in zip(list(own.layers.items()), totals, strict=True):
                own.layers[name] = LayerFactors(layer.inputs, layer.outputs, tokens)
        return own


def _held(one: ParameterSum) -> str:
    """What a layer that may have factors has in this process."""
    if one.has_factors:
        return "factors"
    return "diagonal" if one.slow or one.kinds else "nothing"


def parts(ranges: Iterable[Sequence[int]], chosen: range) -> list[range]:
    """Some of the numbers in ``ranges``, those from one place to another in the order of the ranges."""
    found, before = [], 0
    for first, end in ranges:
        part = range(max(first, first + chosen.start - before), min(end, first + chosen.stop - before))
        found += [part] if part else []
        before += end - first
    return found


def without(ranges: Iterable[Sequence[int]], total: int) -> list[range]:
    """What is left of ``total`` numbers outside ranges that may touch, but not overlap."""
    found, place = [], 0
    for first, end in [*sorted(map(tuple, ranges)), (total, total)]:
        found += [range(place, first)] if first > place else []
        place = end
    return found
