"""What a merge rule is: a pure function of tensors, and the facts that its signature and decorator state about it.

A rule is written once, as an annotated function::

    @rule("task-arithmetic", matching_form=("w_t", "I", "0"), reference="Ilharco et al., ICLR 2023")
    def task_arithmetic(base: Tensor, tuned: Tensors, weights: Numbers) -> Tensor:
        '''θ_0 + Σ w_t Δ_t.'''

Its positional parameters are *inputs*, named as in :data:`INPUTS`. Its keyword-only parameters are *options*, whose
type, range, default and help come from ``Annotated[float, Help("…", ge=0, le=1)]``. The recipe, the command line, the
documentation and the engine read these facts from the :class:`Rule` and know no rule by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

if TYPE_CHECKING:
    from .measures import Measure

Tensors = Sequence[Tensor]
"""One tensor per fine-tuned model."""
Numbers = Sequence[float]
"""Numbers, such as one per fine-tuned model."""
OrNone = float | Literal["none"]
"""The type of an option that takes a number or the word ``none``."""
Auto = bool | Literal["auto"]
"""The type of an on/off option whose default depends on other options."""

INPUTS = {
    "base": "θ_0, a block of the base model",
    "tuned": "θ_t, the same block of every fine-tuned model",
    "weights": "w_t, one number per fine-tuned model",
    "base_weight": "the weight of the base, or None if the recipe sets none",
    "prior": "F_0, the base's reduced curvature (without damping)",
    "curvature": "F_t, the reduced curvature of every fine-tuned model",
    "penalty": "P_t, the penalty matrix used in training, one per model (None: F_0 + δ) or one for all",
    "damping": "δ",
    "thresholds": "the magnitude from which an entry of Δ_t counts as large, one per fine-tuned model",
    "kept": "boolean masks drawn with probability `density`, one per fine-tuned model",
    "uniform": "uniform random numbers from 0 to 1, one per entry of every fine-tuned model",
    "normal": "random numbers from N(0, 1), one per entry of every fine-tuned model",
    "grams": "XᵀX of the inputs of the linear layer, one matrix per fine-tuned model",
}
"""The inputs that a rule can take, by parameter name."""

RANDOM_INPUTS = {"kept", "uniform", "normal"}

Granularity = Literal["entries", "rows", "tensor"]
"""How the engine may split tensors for a rule.

``entries``: anywhere; the rule gets flat blocks. ``rows``: between indices of the first axis; the rule gets some rows
(a vector is never split). ``tensor``: not at all. Rows and tensors keep their shape.
"""

Check = Literal["coefficients", "positive-weights", "step-size"]
"""A check before the merge.

``coefficients``: note if gradient matching equals task arithmetic on most entries. ``positive-weights``: note negative
weights. ``step-size``: refuse a removal that moves the model too far.
"""

NORMAL_WEIGHTS = (1e-3, 1e3)
"""With weights at least this large, whose sum is at most this large, products with curvature fit float32."""


def negative_weights(weights: Numbers, options: Mapping[str, Any]) -> bool:
    """Return whether a weight is negative: the divisor may then be a difference of nearly equal numbers."""
    return min(weights) < 0


def extreme_weights(weights: Numbers, options: Mapping[str, Any]) -> bool:
    """Return whether a weight is negative, or its product with curvature may underflow or overflow float32."""
    sizes = [weight for weight in weights if weight != 0]
    return min(sizes, default=1.0) < NORMAL_WEIGHTS[0] or sum(sizes) > NORMAL_WEIGHTS[1]


@dataclass(frozen=True)
class Help:
    """The help text of an option and the range of its values."""

    text: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    per_model: bool = False
    """Models may have different values; the rule then gets a list with one value per fine-tuned model."""


def per_model(value: float | Numbers, models: Sequence[Any]) -> Numbers:
    """Return an option that is one number or a list as one number per model."""
    return value if isinstance(value, Sequence) else [value] * len(models)


@dataclass(frozen=True)
class Option:
    """An option of a rule, read from the rule's signature."""

    name: str
    type: Any
    default: Any
    help: Help

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def meaning(self) -> str:
        """The help text, with a remark if models may have different values."""
        return self.help.text + (" (can be set per model)" if self.help.per_model else "")

    @property
    def kind(self) -> str:
        """The type with its range: ``number, 0 < x ≤ 1`` or ``model | tensor``."""
        if get_origin(self.type) is Literal:
            return " | ".join(get_args(self.type))
        word = {float: "number", OrNone: "number", int: "whole number", bool: "true | false"}.get(
            self.type, "true | false | auto"
        )
        low = f"{self.help.gt:g} < " if self.help.gt is not None else ""
        low = f"{self.help.ge:g} ≤ " if self.help.ge is not None else low
        high = f" ≤ {self.help.le:g}" if self.help.le is not None else ""
        if low or high:
            word = f"{word}, {low}x{high}"
        return f"{word}; or none" if self.type == OrNone else word


@dataclass(frozen=True, eq=False)
class Rule:
    """A merge rule: the function and what the engine has to know to run it."""

    name: str
    function: Callable[..., Tensor]
    matching_form: tuple[str, str, str]
    """(α_t, H_0, H_t): the rule as a special case of gradient matching."""
    reference: str
    when: Mapping[str, str | tuple[str, Any]] = field(default_factory=dict)
    """Inputs that are needed only if an option is true (its name) or has a value (name, value)."""
    optional: Set[str] = frozenset()
    """Inputs that the recipe may omit; the function then gets None."""
    precision: Callable[..., Tensor] | None = None
    """H̄, the curvature of the merged model, as a function of the same inputs and options."""
    only_one_model: bool = False
    """The rule takes exactly one fine-tuned model."""
    removes: bool = False
    """Positive weights subtract the changes of the models: the rule is for removal, not for merging."""
    propagates_nonfinite: bool = True
    """NaN and infinity in the base, or in a model with a positive weight, always reach the result."""
    fallback: Rule | None = None
    """The rule for tensors without a Gram matrix; a rule with a fallback works on whole matrices."""
    layers: Callable[..., Tensor] | None = None
    """The rule for a linear layer with Kronecker curvature: a function of the same inputs, as matrices [W b]."""
    needs_float64: Callable[[Numbers, Mapping[str, Any]], bool] = lambda weights, options: False
    """(weights, options) → whether the rule computes in float64 even if the files hold float32."""
    measures: Mapping[str, Measure] = field(default_factory=dict)
    """Statistics of whole tensors that the engine computes first, in this order; inputs of the same names get them."""
    ranks: Callable[..., list[list[int]]] | None = None
    """For a rule with ``thresholds``: the rank of each threshold among the entries of |Δ_t|, per model."""
    granularity: Granularity | Callable[[Mapping[str, Any]], Granularity] = "entries"
    """How the engine may split tensors, possibly depending on the options."""
    workspace: int = 3
    """For a rule that gets whole tensors: the number of float64 copies it allocates besides its inputs."""
    auto_damping: Literal["constant", "mean-curvature"] = "constant"
    """δ for ``damping: auto``: 1e-10 (in layers with Kronecker curvature a share of their mean), or the mean over all
    merged entries of Σ F_t."""
    checks: Set[Check] = frozenset()
    """What the engine checks before the merge."""

    file: str = ""
    """The Python file that defines the rule, as the recipe names it; empty for rules of packages."""
    digest: str = ""
    """The SHA-256 of that file's content."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs)

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the positional parameters."""
        names = tuple(p.name for p in self._parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY)
        for name in names:
            if name not in INPUTS and name not in self.measures:
                raise TypeError(f"rule {self.name}: unknown input {name!r}; the inputs are {', '.join(INPUTS)}")
        return names

    @functools.cached_property
    def options(self) -> tuple[Option, ...]:
        """The keyword-only parameters."""
        hints = get_type_hints(self.function, include_extras=True)
        options = []
        for parameter in self._parameters:
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                continue
            hint = hints.get(parameter.name)
            help_ = get_args(hint)[-1] if get_origin(hint) is Annotated else None
            if not isinstance(help_, Help):
                raise TypeError(f"rule {self.name}: option {parameter.name!r} needs Annotated[type, Help(…)]")
            options.append(Option(parameter.name, get_args(hint)[0], parameter.default, help_))
        return tuple(options)

    @functools.cached_property
    def _parameters(self) -> list[inspect.Parameter]:
        return list(inspect.signature(self.function).parameters.values())

    @functools.cached_property
    def option_names(self) -> frozenset[str]:
        return frozenset(option.name for option in self.options)

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    @property
    def explanation(self) -> str:
        """The whole docstring."""
        return inspect.cleandoc(self.function.__doc__ or "")

    @property
    def needs_in_words(self) -> str:
        """What a recipe for this rule must name."""
        words = []
        if "base" in self.inputs and "base" not in self.when and "base" not in self.optional:
            words.append("the base")
        words.append("one fine-tuned model" if self.only_one_model else "fine-tuned models")
        if "prior" in self.inputs:
            condition = f" (with {self.when['prior']}: true)" if "prior" in self.when else ""
            words.append(f"curvature of the base{condition}")
        if "curvature" in self.inputs:
            words.append("curvature of every fine-tuned model")
        if "grams" in self.inputs:
            words.append("Gram matrices of every fine-tuned model")
        return ", ".join(words)

    @property
    def memory_in_words(self) -> str:
        """The memory that a rule on whole tensors needs; empty for other rules."""
        if self.fallback is None and self.granularity != "tensor":
            return ""
        size = 8 * (self.workspace + 1)
        return f"about {size} bytes, and 8 for each model, per entry of the largest tensor and thread"

    def granularity_of(self, options: Mapping[str, Any]) -> Granularity:
        """Return how the engine may split tensors under these options."""
        return self.granularity(options) if callable(self.granularity) else self.granularity

    def measures_of(self, options: Mapping[str, Any]) -> dict[str, Measure]:
        """Return the measures that these options need, including those that other measures need."""
        unused = frozenset(self.inputs) - self.needs(options)
        return {name: measure for name, measure in self.measures.items() if name not in unused}

    def needs(self, options: Mapping[str, Any]) -> frozenset[str]:
        """Return the inputs that the function uses under these options."""

        def holds(condition: str | tuple[str, Any]) -> bool:
            if isinstance(condition, str):
                return bool(options.get(condition))
            value = options.get(condition[0])
            return isinstance(value, tuple) or bool(value == condition[1])  # a tuple varies between tensors

        return frozenset(name for name in self.inputs if name not in self.when or holds(self.when[name]))


def rule(name: str, **attributes: Any) -> Callable[[Callable[..., Tensor]], Rule]:
    """Declare a function as a merge rule; ``attributes`` are those of :class:`Rule`.

    Inputs and options come from the function's signature, which is read when they are first used.
    """
    return lambda function: Rule(name, function, **attributes)
