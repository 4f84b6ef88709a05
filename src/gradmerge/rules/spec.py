"""What a merge rule is: a pure function of tensors, and what its signature says about it.

A rule is written once, as an annotated function::

    @rule("task-arithmetic", row=("w_t", "I", "0"), reference="Ilharco et al., ICLR 2023")
    def task_arithmetic(base: Tensor, tuned: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        '''θ_0 + Σ w_t Δ_t.'''

Its positional parameters are *inputs*, taken from the list in :data:`INPUTS` by name; its keyword-only parameters
are *options*, whose type, range, default and help come from ``Annotated[float, Help("…", ge=0, le=1)]``. Everything
that knows about rules (recipe, command line, docs, engine) reads this and nothing else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from .measures import Measure

OrNone = float | Literal["none"]
"""The type of an option that is a number, or the word ``none``."""
Auto = bool | Literal["auto"]
"""The type of a switch that may be left to the rule."""

INPUTS = {
    "base": "θ_0, a block of the base model",
    "tuned": "θ_t, the same block of every tuned model",
    "weights": "w_t, one number per tuned model",
    "base_weight": "the base's own weight, or None when the recipe gives none",
    "prior": "F_0, the base's reduced curvature (without damping)",
    "curvature": "F_t, every tuned model's reduced curvature",
    "penalty": "P_t, the matrix of the penalty that each model was tuned under (None: F_0 + δ); or one P for all",
    "damping": "δ",
    "thresholds": "the magnitude from which an entry of Δ_t counts as large, one per tuned model",
    "kept": "boolean masks drawn with probability `density`, one per tuned model",
    "uniform": "random numbers from 0 to 1, one for every entry, of every tuned model",
    "grams": "XᵀX of the inputs of the linear layer, one matrix per tuned model",
}


Grain = Literal["entries", "rows", "tensor"]
"""How tensors may be cut for a rule: anywhere, so that it sees flat blocks; between indices of the first axis, so that
it sees some of those (a vector stays whole); or not at all. Rows and tensors come in their shape."""


Check = Literal["coefficients", "positive-weights", "step-size"]
"""What a merge checks before it starts: whether the coefficients of the Δ_t are far above the weights, whether a weight
is negative, or whether the step is too long to be trusted."""

Wide = Callable[[Sequence[float], Mapping[str, Any]], bool]
"""(weights, options) → whether float32 is too narrow for what a rule computes with them."""
#: Weights that are no smaller, and add up to no more, are multiplied with curvature in float32: other products may
#: vanish or overflow.
USUAL = (1e-3, 1e3)


def never(weights: Sequence[float], options: Mapping[str, Any]) -> bool:
    """Whatever the weights are, float32 is wide enough."""
    return False


def negative(weights: Sequence[float], options: Mapping[str, Any]) -> bool:
    """A negative weight makes a divisor the difference of numbers that may be nearly equal."""
    return min(weights) < 0


def unusual(weights: Sequence[float], options: Mapping[str, Any]) -> bool:
    """A weight is negative, or so large or small that its product with curvature may not fit float32."""
    if negative(weights, options):
        return True
    sizes = [abs(weight) for weight in weights if weight != 0]
    return min(sizes, default=1.0) < USUAL[0] or sum(sizes) > USUAL[1]


@dataclass(frozen=True)
class Help:
    """What an option is for, and the range of its values."""

    text: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    per_model: bool = False
    """It may differ between models: the rule is given one number, or a list with one for each tuned model."""


def each(value: float | Sequence[float], models: Sequence[Any]) -> Sequence[float]:
    """An option that may differ between models, as one number for each of them."""
    return value if isinstance(value, Sequence) else [value] * len(models)


@dataclass(frozen=True)
class Option:
    """One option of a rule, as read from the rule's signature."""

    name: str
    type: Any
    default: Any
    help: Help

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def meaning(self) -> str:
        """What it is for, and whether models may differ in it."""
        return self.help.text + (" (models may differ in it)" if self.help.per_model else "")

    @property
    def kind(self) -> str:
        """The type in words, with its range: ``number, 0 < x ≤ 1`` or ``model | tensor``."""
        if get_origin(self.type) is Literal:
            return " | ".join(get_args(self.type))
        word = {float: "number", OrNone: "number", int: "whole number", bool: "true | false"}.get(
            self.type, "true | false | auto"
        )
        low = f"{self.help.gt:g} < " if self.help.gt is not None else ""
        low = f"{self.help.ge:g} ≤ " if self.help.ge is not None else low
        high = f" ≤ {self.help.le:g}" if self.help.le is not None else ""
        word = f"{word}, {low}x{high}" if low or high else word
        return f"{word}; or none" if self.type == OrNone else word


@dataclass(frozen=True)
class Rule:
    """A merge rule: the function, and what it needs to be run."""

    name: str
    function: Callable[..., Tensor]
    row: tuple[str, str, str]
    """(α_t, H_0, H_t): the rule as a special case of gradient matching."""
    reference: str
    inputs: tuple[str, ...]
    options: tuple[Option, ...]
    when: Mapping[str, str | tuple[str, Any]] = field(default_factory=dict)
    """Inputs needed only if the named option is true, or has the value that follows its name."""
    optional: frozenset[str] = frozenset()
    """Inputs that the recipe may leave out; the function then gets None."""
    precision: Callable[..., Tensor] | None = None
    """H̄, the merged model's own curvature, as a function of the same inputs and options."""
    only_one_model: bool = False
    base_shows: bool = True
    """Where the base, or a model that has a weight, has NaN or infinity, the result has too."""
    otherwise: Rule | None = None
    """The rule for tensors that have no Gram matrix; a rule with one works on whole matrices."""
    layers: Callable[..., Tensor] | None = None
    """The same rule for a linear layer with Kronecker curvature: a function of the same inputs, as matrices [W b]."""
    wide: Wide = never
    """When the rule is given float64 whatever the files hold."""
    measures: Mapping[str, Measure] = field(default_factory=dict)
    """What is found out about whole tensors beforehand, in this order; inputs of the same names take it."""
    ranks: Callable[..., list[list[int]]] | None = None
    """Of a rule with ``thresholds``: for every model, the ranks of these among the entries of |Δ_t|."""
    grain: Grain | Callable[[Mapping[str, Any]], Grain] = "entries"
    """How tensors may be cut, possibly by the options."""
    auto_damping: Literal["usual", "mean-curvature"] = "usual"
    """δ of `damping: auto`: 1e-10 (in layers with Kronecker curvature a share of their mean), or the mean over all
    entries of Σ F_t."""
    checks: frozenset[Check] = frozenset()
    copies: int = 3
    """Of a rule that sees whole tensors: how many it holds at a time besides its inputs, in float64."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)

    @functools.cached_property
    def option_names(self) -> frozenset[str]:
        return frozenset(option.name for option in self.options)

    @property
    def summary(self) -> str:
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    @property
    def explanation(self) -> str:
        return inspect.cleandoc(self.function.__doc__ or "")

    @property
    def needs_in_words(self) -> str:
        """What a recipe for this rule must name."""
        words = (
            ["the base"] if "base" in self.inputs and "base" not in self.when and "base" not in self.optional else []
        )
        words.append("one tuned model" if self.only_one_model else "tuned models")
        if "prior" in self.inputs:
            words.append(
                "curvature of the base" + (f" (with {self.when['prior']}: true)" if "prior" in self.when else "")
            )
        if "curvature" in self.inputs:
            words.append("curvature of every tuned model")
        if "grams" in self.inputs:
            words.append("Gram matrices of every tuned model")
        return ", ".join(words)

    @property
    def memory_in_words(self) -> str:
        """What a rule that sees whole tensors needs; nothing for others."""
        if self.otherwise is None and self.grain != "tensor":
            return ""
        return f"about {8 * (self.copies + 1)} bytes, and 8 for each model, per entry of the largest tensor and thread"

    def cut(self, options: Mapping[str, Any]) -> Grain:
        """How tensors may be cut under these options."""
        return self.grain(options) if callable(self.grain) else self.grain

    def measured(self, options: Mapping[str, Any]) -> dict[str, Measure]:
        """The measures that are needed under these options, those included that others need."""
        idle = frozenset(self.inputs) - self.needs(options)
        return {name: measure for name, measure in self.measures.items() if name not in idle}

    def needs(self, options: Mapping[str, Any]) -> frozenset[str]:
        """The inputs that the function takes under these options."""

        def holds(condition: str | tuple[str, Any]) -> bool:
            if isinstance(condition, str):
                return bool(options.get(condition))
            value = options.get(condition[0])
            return isinstance(value, tuple) or bool(value == condition[1])  # a tuple varies between tensors

        return frozenset(n for n in self.inputs if n not in self.when or holds(self.when[n]))


def rule(
    name: str,
    *,
    row: tuple[str, str, str],
    reference: str,
    when: Mapping[str, str | tuple[str, Any]] | None = None,
    optional: Iterable[str] = (),
    precision: Callable[..., Tensor] | None = None,
    only_one_model: bool = False,
    base_shows: bool = True,
    otherwise: Rule | None = None,
    layers: Callable[..., Tensor] | None = None,
    wide: Wide = never,
    measures: Mapping[str, Measure] | None = None,
    ranks: Callable[..., list[list[int]]] | None = None,
    grain: Grain | Callable[[Mapping[str, Any]], Grain] = "entries",
    auto_damping: Literal["usual", "mean-curvature"] = "usual",
    checks: Iterable[Check] = (),
    copies: int = 3,
) -> Callable[[Callable[..., Tensor]], Rule]:
    """Declare a function as a merge rule; inputs and options are read from its signature."""

    def declare(function: Callable[..., Tensor]) -> Rule:
        hints = get_type_hints(function, include_extras=True)
        inputs, options = [], []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                options.append(_option(parameter, hints[parameter.name]))
            elif parameter.name in INPUTS or parameter.name in (measures or {}):
                inputs.append(parameter.name)
            else:
                raise TypeError(f"rule {name}: {parameter.name!r} is no input; inputs are {', '.join(INPUTS)}")
        return Rule(
            name=name,
            function=function,
            row=row,
            reference=reference,
            inputs=tuple(inputs),
            options=tuple(options),
            when=when or {},
            optional=frozenset(optional),
            precision=precision,
            only_one_model=only_one_model,
            base_shows=base_shows,
            otherwise=otherwise,
            layers=layers,
            wide=wide,
            measures=measures or {},
            ranks=ranks,
            grain=grain,
            auto_damping=auto_damping,
            checks=frozenset(checks),
            copies=copies,
        )

    return declare


def _option(parameter: inspect.Parameter, hint: Any) -> Option:
    if get_origin(hint) is not Annotated:
        raise TypeError(f"option {parameter.name!r} needs Annotated[type, Help(…)]")
    kind, help_ = get_args(hint)
    return Option(parameter.name, kind, parameter.default, help_)
