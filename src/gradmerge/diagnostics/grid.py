"""The settings of a preview: which weights are tried for which task, with which methods."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any

from ..errors import InputError
from ..recipe import Recipe, Varying, in_words, make_recipe, plain
from ..recipe.changing import put
from ..rules import RULES
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

    def draw(self, generator: random.Random) -> float:
        if self.listed:
            return generator.choice(self.values)
        return self.nearest(rounded(generator.uniform(self.low, self.high), self.high - self.low))


def rounded(weight: float, width: float) -> float:
    """A weight with as many decimals as anyone would write, in a range of that width."""
    return round(weight, 3 if width >= 0.1 else 6) + 0.0


def parse_range(text: str, option: str = "--weights") -> Range:
    """`0:1:0.1` with both ends, `0:1`, `0,0.3,1`, or `0.5`. Decimals stay what they are: three steps of 0.1 are 0.3."""
    where = f"{option} {text}"

    def number(part: str) -> Decimal:
        try:
            value = Decimal(part.strip())
        except InvalidOperation:
            raise InputError(
                f"{where}: {part.strip() or 'nothing'!r} is not a number. Write START:STOP:STEP such as 0:1:0.1, "
                "a list such as 0,0.3,1, or one number"
            ) from None
        if not value.is_finite() or abs(value) > 1000:
            raise InputError(f"{where}: a weight is a number between -1000 and 1000, not {part.strip()}")
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
        most = f"more than {MOST:,} weights, which is the most that are tried"
        raise InputError(f"{where}: {most}. Take a larger step, or --samples N.")
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


def parse_weights(given: Weights | None, tasks: Sequence[str], recipe: Recipe) -> Ranges:
    """The ranges of `--weights`, checked against the tasks; without any, 0 to 1 in steps of 0.1 for all tasks alike."""
    if isinstance(given, Mapping):
        given = [f"{name}={value}" for name, value in given.items()]
    texts = [given] if isinstance(given, str) else list(given or [DEFAULT])
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


@dataclass(frozen=True)
class Setting:
    """One merge of a preview."""

    method: str
    weights: tuple[Varying, ...]
    """One per task; empty for a method that takes none."""
    position: float | None = None
    """Where it lies on the axis of the figures."""
    changes: tuple[tuple[str, Any], ...] = ()
    """Keys of the recipe that are set beside these, each with its value: ("damping", 0.001), ("options.t", (0, 1)).

    Lists are tuples, and a mapping is one key for each of its own: ("reduction.mean_times", 100).
    """
    swept: str = ""
    """The key of ``changes`` that the figures' axis shows; empty where that is a weight."""

    def same(self, other: Setting) -> bool:
        """Whether both are the same merge."""
        own, others = ((one.method, one.weights, dict(one.changes)) for one in (self, other))
        return own == others

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.method, self.weights_in_words, self.changes_in_words) if part)

    @property
    def series(self) -> str:
        """What all settings of one curve have in common: the method, and changes that are not on the axis."""
        off_axis = tuple(pair for pair in self.changes if pair[0] != self.swept)
        return f"{self.method} {in_few_words(off_axis)}".strip()

    @property
    def changes_in_words(self) -> str:
        """`damping 0.001, density 0.2`."""
        return in_few_words(self.changes)

    @property
    def weights_in_words(self) -> str:
        """`0.3` where all are the same, or `0.3, 0.5`."""
        if len(set(self.weights)) == 1:
            return in_words(self.weights[0])
        return ", ".join(map(in_words, self.weights))


def takes_weights(method: str) -> bool:
    return "weights" in RULES[method].inputs


def check_methods(methods: Sequence[str] | str | None, recipe: Recipe) -> list[str]:
    """The methods of a preview: those named, or the recipe's own. Every one must fit the recipe's models."""
    if isinstance(methods, str):
        methods = [part.strip() for part in methods.split(",")]
    chosen = list(dict.fromkeys(methods or [recipe.method]))
    for method in chosen:
        if method not in RULES:
            hint = f"{nearest(method, RULES)}\n  Known are {', '.join(RULES)}."
            raise InputError(f"--methods {method}: there is no such method{hint}")
        if RULES[method].otherwise is not None:
            raise InputError(
                f"--methods: {method} works on whole matrices and cannot be previewed block by block. "
                "Leave it out with --methods, and use gradmerge merge and gradmerge evaluate for it."
            )
        recipe_with(recipe, Setting(method, tuple(recipe.weights)))
    return chosen


def grid(methods: Sequence[str], ranges: Ranges) -> list[Setting]:
    """Every combination of the ranges' weights with every method."""
    dimensions = ranges.dimensions()
    for _, one in dimensions:
        if not one.values:
            ends = f"{one.low:g}:{one.high:g}"
            step = f"a grid needs a step, such as {ends}:0.1; or draw points with --samples N"
            raise InputError(f"--weights {ends}: {step}")
    combinations = math.prod(len(one.values) for _, one in dimensions)
    count = sum(combinations if takes_weights(method) else 1 for method in methods)
    if count > MOST:
        most = f"the grid has {count:,} settings; at most {MOST:,} are tried"
        raise InputError(f"--weights: {most}. Take larger steps, or draw points from the ranges with --samples 200.")
    points = [ranges.weights(point) for point in itertools.product(*(one.values for _, one in dimensions))]
    return [setting for method in methods for setting in settings_of(method, ranges, points)]


def sample(methods: Sequence[str], ranges: Ranges, count: int, seed: int) -> list[Setting]:
    """Random points of the ranges, the same ones for every method. The same seed gives the same points."""
    if count < 1 or count * sum(map(takes_weights, methods)) > MOST:
        raise InputError(f"--samples {count}: between 1 and {MOST:,} settings can be tried, all methods together")
    generator = random.Random(seed)
    points = [ranges.weights([one.draw(generator) for _, one in ranges.dimensions()]) for _ in range(count)]
    return [setting for method in methods for setting in settings_of(method, ranges, points)]


def settings_of(method: str, ranges: Ranges, points: Sequence[tuple[Varying, ...]]) -> list[Setting]:
    """Settings of one method at some weights, each once."""
    if not takes_weights(method):
        return [Setting(method, ())]
    return [Setting(method, weights, ranges.position(weights)) for weights in dict.fromkeys(points)]


def recipe_with(recipe: Recipe, setting: Setting) -> Recipe:
    """The recipe with a setting's method, weights and changes, less keys that only its own method understands."""
    method, rule = setting.method, RULES[setting.method]
    raw = recipe.model_dump(mode="json", exclude_unset=True)
    raw["method"] = method
    for model, weight in zip(raw["models"], setting.weights or [1.0] * len(raw["models"]), strict=True):
        model.pop("weight", None)
        if takes_weights(method):
            model["weight"] = plain(weight)
    if method != recipe.method:
        for part in (raw, *raw["models"]):
            part.pop("options", None)
        for key, needed in (("weight", "base_weight"), ("penalty", "penalty"), ("examples", "prior")):
            if raw.get("base") and needed not in rule.inputs:
                raw["base"].pop(key, None)
        if rule.precision is None and raw.get("output"):
            raw["output"].pop("curvature", None)
    for key, value in setting.changes:
        put(raw, key, plain(value), key)
    return make_recipe(raw, folder=recipe.folder, where=str(recipe.file or "recipe")).read_as(recipe)


def in_few_words(changes: Sequence[tuple[str, Any]]) -> str:
    """Changes as they are shown: `damping 0.001, density 0.2`."""

    def words(value: Any) -> str:
        if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
            return " + ".join(value) or "nothing"
        return in_words(value)

    return ", ".join(f"{key.removeprefix('options.')} {words(value)}" for key, value in changes)
