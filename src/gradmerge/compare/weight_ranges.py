"""Ranges of weights: which are tried for which task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

from ..errors import InputError
from ..recipe import Recipe, Varying
from ..text import nearest

#: A grid with more settings is refused.
MOST = 2000
DEFAULT = "0:1:0.1"
#: What a weight may be where nothing is said.
LOW, HIGH = 0.0, 1.5

Weights = str | Sequence[str] | Mapping[str, "str | float"]
"""`0:1:0.1` for one weight that all tasks share, `yelp=0:1:0.25` for one task, or several of these; or task → range."""


@dataclass(frozen=True)
class Range:
    """The weights that are tried for a task."""

    low: float
    high: float
    values: tuple[float, ...] = ()
    """Those of a grid; none where only the ends are given."""
    listed: bool = False
    """Only these values count, and none between them."""

    def nearest(self, weight: float) -> float:
        """The closest weight of the range."""
        if self.listed:
            return min(self.values, key=lambda value: abs(value - weight))
        return min(max(weight, self.low), self.high)


def rounded(weight: float, width: float) -> float:
    """A weight with as many decimals as anyone would write, in a range of that width."""
    return round(weight, 3 if width >= 0.1 else 6) + 0.0


def parse_range(text: str, option: str = "--weights", word: str = "weight", most: float = 1000) -> Range:
    """`0:1:0.1` with both ends, `0:1`, `0,0.3,1`, or `0.5`. Decimals stay what they are: three steps of 0.1 are 0.3."""
    where = f"{option}{'' if option.endswith('=') else ' '}{text}"

    def number(part: str) -> Decimal:
        try:
            value = Decimal(part.strip())
        except InvalidOperation:
            raise InputError(
                f"{where}: {part.strip() or 'nothing'!r} is not a number. Write START:STOP:STEP such as 0:1:0.1, "
                "a list such as 0,0.3,1, or one number"
            ) from None
        if not value.is_finite() or abs(value) > most:
            raise InputError(f"{where}: a {word} is a number between {-most:g} and {most:g}, not {part.strip()}")
        return value

    if ":" not in text:
        numbers = [number(part) for part in text.split(",")]
        values = tuple(dict.fromkeys(float(value) for value in numbers))
        return Range(min(values), max(values), values, listed=True)
    parts = [number(part) for part in text.split(":")]
    if len(parts) == 2:
        low, high = sorted(float(part) for part in parts)
        return Range(low, high)
    if len(parts) != 3:
        raise InputError(f"{where}: write START:STOP:STEP, such as 0:1:0.1")
    start, stop, step = parts
    if step == 0:
        raise InputError(f"{where}: the step is 0; write START:STOP:STEP, such as 0:1:0.1")
    if (stop - start) * step < 0:
        raise InputError(f"{where}: steps of {step} from {start} never come to {stop}")
    steps = int((stop - start) / step)
    if steps >= MOST:
        many = f"more than {MOST:,} {word}s, which is the most that are tried"
        raise InputError(f"{where}: {many}. Take a larger step.")
    values = tuple(sorted(float(start + i * step) + 0.0 for i in range(steps + 1)))
    return Range(min(values[0], float(stop)), max(values[-1], float(stop)), values)


@dataclass(frozen=True)
class Ranges:
    """Which weights of which tasks are tried; tasks that are not named have the recipe's weight, or share one."""

    tasks: tuple[str, ...]
    recipe_weights: tuple[Varying, ...]
    shared: Range | None = None
    own: Mapping[str, Range] = field(default_factory=dict)

    @property
    def _swept(self) -> list[int]:
        """The tasks whose own weight varies."""
        return [self.tasks.index(name) for name, one in self.own.items() if one.high > one.low]

    @property
    def vary(self) -> bool:
        """Whether any weight does."""
        return any(one.high > one.low for _, one in self.dimensions())

    @property
    def axis(self) -> str:
        """What a figure's horizontal axis shows."""
        if self.shared is None and len(self._swept) == 1:
            return f"weight of {self.tasks[self._swept[0]]}"
        return "weight, the same for all tasks" if len(self.tasks) > 1 else "weight"

    def position(self, weights: Sequence[Varying]) -> float | None:
        """Where a setting lies on that axis; None where its weights are a point of more dimensions."""
        swept = self._swept
        free = [i for i, task in enumerate(self.tasks) if task not in self.own]
        if self.shared is None and len(swept) == 1:
            return _number(weights[swept[0]])
        places = swept + free if self.shared is not None or not swept else list(range(len(self.tasks)))
        values = {weights[i] for i in places}
        return _number(values.pop()) if len(values) == 1 else None

    def dimensions(self) -> list[tuple[list[int], Range]]:
        """What varies on its own: the tasks (by number) that one weight belongs to, and its range."""
        found = [([self.tasks.index(name)], one) for name, one in self.own.items()]
        free = [i for i, task in enumerate(self.tasks) if task not in self.own]
        if self.shared is not None and free:
            found.append((free, self.shared))
        return found

    def weights(self, point: Sequence[Varying]) -> tuple[Varying, ...]:
        """One number per dimension as one weight per task."""
        weights = list(self.recipe_weights)
        for (places, _), value in zip(self.dimensions(), point, strict=True):
            for place in places:
                weights[place] = value
        return tuple(weights)

    def holds(self, weights: Sequence[Varying]) -> bool:
        """Whether weights are in the ranges."""
        own = [weights[places[0]] for places, _ in self.dimensions()]
        point = [value for value in own if not isinstance(value, tuple)]
        if len(point) < len(own):
            return False
        inside = all(one.nearest(value) == value for value, (_, one) in zip(point, self.dimensions(), strict=True))
        return inside and self.weights(point) == tuple(weights)


def _number(weight: Varying) -> float | None:
    return None if isinstance(weight, tuple) else weight


def parse_weights(given: Weights | None, tasks: Sequence[str], recipe: Recipe, default: str | None = DEFAULT) -> Ranges:
    """The ranges of `--weights`, checked; without any, ``default`` for all tasks alike, or the recipe's weights."""
    if isinstance(given, Mapping):
        given = [f"{name}={value}" for name, value in given.items()]
    texts = [given] if isinstance(given, str) else list(given or ([default] if default else []))
    shared: Range | None = None
    own: dict[str, Range] = {}
    for text in texts:
        name, equals, rest = text.rpartition("=")
        if not equals:
            if shared is not None:
                known = "there is a range for all tasks already"
                raise InputError(f"--weights {text}: {known}; for one task write NAME={text}")
            shared = parse_range(rest)
            continue
        if name not in tasks:
            hint = f"{nearest(name, tasks)}\n  Tasks are {', '.join(tasks)}."
            raise InputError(f"--weights {text}: no task of the recipe is called {name!r}{hint}")
        if name in own:
            raise InputError(f"--weights {text}: {name} has a range already")
        own[name] = parse_range(rest, f"--weights {name}=")
    return Ranges(tuple(tasks), tuple(recipe.weights), shared, own)
