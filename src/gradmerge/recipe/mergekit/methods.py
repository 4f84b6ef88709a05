"""mergekit's methods and their parameters, and what they are called here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Scope = Literal["shared", "input", "tuned"]
"""Whose a parameter is: everybody's, every input's, or every input's but the base."""

REQUIRED = object()
#: It changes how mergekit holds masks in memory, and no result.
IDLE = ("int8_mask",)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method of mergekit's."""

    name: str
    option: str
    """What it is called here; `weight` is the model's."""
    kind: type
    default: Any = REQUIRED
    scope: Scope = "shared"
    words: Mapping[Any, Any] = field(default_factory=dict)
    """Values that are called otherwise here."""


@dataclass(frozen=True)
class Method:
    """A method of mergekit's: the rule that does the same, and what has to be said to it."""

    rule: str
    parameters: tuple[Parameter, ...] = ()
    base: Literal["needed", "possible", "a model"] = "needed"
    """Whether it starts from a base; where it does not, one that is named is one more model."""
    options: Mapping[str, Any] = field(default_factory=dict)
    least: int = 1
    """How few models it takes, without the base where it starts from one."""
    most: int | None = None
    idle: Collection[str] = IDLE
    """Parameters that change no result, or none that can be told from rounding."""


WEIGHT = Parameter("weight", "weight", float, scope="tuned")


def _arithmetic(rule: str, normalize: bool, *more: Parameter, **options: Any) -> Method:
    """One of the methods that add up differences to the base."""
    density = () if rule == "task-arithmetic" else (Parameter("density", "density", float, 1.0, "tuned"),)
    shared = (Parameter("normalize", "normalize", bool, normalize), Parameter("lambda", "scale", float, 1.0))
    return Method(rule, (WEIGHT, *density, *shared, *more), options=options)


def _rescale(default: bool) -> Parameter:
    return Parameter("rescale", "rescale", bool, default, words={True: "norm", False: "none"})


_GAMMA = Parameter("gamma", "gamma", float, 0.01, "tuned")
_EPSILON = Parameter("epsilon", "epsilon", float, 0.15, "tuned")
_RAM = Parameter("epsilon", "epsilon", float, 1e-5)
#: Both at once are one option here: :func:`settled`.
_AXIS = (Parameter("nuslerp_flatten", "flatten", bool, True), Parameter("nuslerp_row_wise", "row_wise", bool, False))
#: What its votes on the sign count, and a combination by one.
_VOTE = {"vote": "mergekit"}
_TIES = {"combine": "ties", **_VOTE}
_SUM = {"combine": "task-arithmetic"}

MERGEKIT_METHODS: dict[str, Method] = {
    "linear": Method(
        "weighted-average",
        (Parameter("weight", "weight", float, scope="input"), Parameter("normalize", "normalize", bool, True)),
        base="a model",
    ),
    "slerp": Method("slerp", (Parameter("t", "t", float),), options={"zeros": "arc"}, most=1),
    "task_arithmetic": _arithmetic("task-arithmetic", False),
    "ties": _arithmetic("ties", True, _rescale(False), scope="tensor", **_VOTE),
    "dare_linear": _arithmetic("dare", False, _rescale(True), **_SUM),
    "dare_ties": _arithmetic("dare", False, _rescale(True), **_TIES),
    "della": _arithmetic("della", True, _rescale(True), _EPSILON, **_TIES),
    "della_linear": _arithmetic("della", False, _rescale(True), _EPSILON, **_SUM),
    "breadcrumbs": _arithmetic("breadcrumbs", False, _rescale(False), _GAMMA, **_SUM),
    "breadcrumbs_ties": _arithmetic("breadcrumbs", False, _rescale(False), _GAMMA, **_TIES),
    "model_stock": Method("model-stock", (Parameter("filter_wise", "filter_wise", bool, False),), least=2),
    "nuslerp": Method("nuslerp", (WEIGHT, *_AXIS), base="possible", least=2, most=2),
    "multislerp": Method(
        "multislerp", (WEIGHT, Parameter("normalize_weights", "normalize", bool, True)), base="possible", idle=("eps",)
    ),
    "karcher": Method(
        "karcher",
        (Parameter("max_iter", "steps", int, 10), Parameter("tol", "tolerance", float, 1e-5)),
        base="a model",
    ),
    "nearswap": Method("nearswap", (Parameter("t", "t", float),), most=1),
    "arcee_fusion": Method("arcee-fusion", most=1),
    "sce": Method("sce", (Parameter("select_topk", "select_topk", float, 1.0),)),
    "ram": Method("ram", (_RAM,)),
    "ramplus_tl": Method("ram", (_RAM, Parameter("r", "r", float, 0.1), Parameter("alpha", "alpha", float, 0.2))),
    "passthrough": Method("passthrough", (Parameter("scale", "scale", float, 1.0, "input"),), base="a model", most=1),
}


def settled(options: dict[str, Any]) -> dict[str, Any]:
    """Options of ours, two of mergekit's switches being one word here."""
    if "flatten" not in options:
        return options
    by_row = {key: value for key, value in options.items() if key not in ("flatten", "row_wise")}
    return by_row | {"axis": "all" if options["flatten"] else "first" if options["row_wise"] else "last"}
