"""The methods, parameters and chat templates of mergekit, with their names in gradmerge."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Scope = Literal["shared", "input", "tuned"]
"""Whether a parameter has one value, one per input, or one per input other than the base."""

REQUIRED = object()
IGNORED = ("int8_mask",)
"""Parameters that change memory use and no result."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a mergekit method."""

    name: str
    option: str
    """Option of the rule, or `weight`."""
    kind: type
    default: Any = REQUIRED
    scope: Scope = "shared"
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Value in mergekit → value of the option, if they differ."""


@dataclass(frozen=True)
class Method:
    """A mergekit method: the equivalent rule and its options."""

    rule: str
    parameters: tuple[Parameter, ...] = ()
    base: Literal["needed", "possible", "a model"] = "needed"
    """With "a model", a `base_model` is merged like every other model."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that make the rule equivalent."""
    min_models: int = 1
    """Smallest number of models; a base does not count."""
    max_models: int | None = None
    ignored: Collection[str] = IGNORED
    """Parameters that change no result beyond rounding."""


WEIGHT = Parameter("weight", "weight", float, scope="tuned")


def _arithmetic(rule: str, normalize: bool, *more: Parameter, **options: Any) -> Method:
    """Return a method that adds weighted differences to the base."""
    density = () if rule == "task-arithmetic" else (Parameter("density", "density", float, 1.0, "tuned"),)
    shared = (Parameter("normalize", "normalize", bool, normalize), Parameter("lambda", "scale", float, 1.0))
    return Method(rule, (WEIGHT, *density, *shared, *more), options=options)


def _rescale(default: bool) -> Parameter:
    return Parameter("rescale", "rescale", bool, default, values={True: "norm", False: "none"})


_GAMMA = Parameter("gamma", "gamma", float, 0.01, "tuned")
_EPSILON = Parameter("epsilon", "epsilon", float, 0.15, "tuned")
_RAM = Parameter("epsilon", "epsilon", float, 1e-5)
#: Two switches that are one option here, see `join_switches`.
_AXIS = (Parameter("nuslerp_flatten", "flatten", bool, True), Parameter("nuslerp_row_wise", "row_wise", bool, False))
_VOTE = {"vote": "mergekit"}
_TIES = {"combine": "ties", **_VOTE}
_SUM = {"combine": "task-arithmetic"}

MERGEKIT_METHODS: dict[str, Method] = {
    "linear": Method(
        "weighted-average",
        (Parameter("weight", "weight", float, scope="input"), Parameter("normalize", "normalize", bool, True)),
        base="a model",
    ),
    "slerp": Method("slerp", (Parameter("t", "t", float),), options={"zeros": "arc"}, max_models=1),
    "task_arithmetic": _arithmetic("task-arithmetic", False),
    "ties": _arithmetic("ties", True, _rescale(False), scope="tensor", **_VOTE),
    "dare_linear": _arithmetic("dare", False, _rescale(True), **_SUM),
    "dare_ties": _arithmetic("dare", False, _rescale(True), **_TIES),
    "della": _arithmetic("della", True, _rescale(True), _EPSILON, **_TIES),
    "della_linear": _arithmetic("della", False, _rescale(True), _EPSILON, **_SUM),
    "breadcrumbs": _arithmetic("breadcrumbs", False, _rescale(False), _GAMMA, **_SUM),
    "breadcrumbs_ties": _arithmetic("breadcrumbs", False, _rescale(False), _GAMMA, **_TIES),
    "model_stock": Method("model-stock", (Parameter("filter_wise", "filter_wise", bool, False),), min_models=2),
    "nuslerp": Method("nuslerp", (WEIGHT, *_AXIS), base="possible", min_models=2, max_models=2),
    "multislerp": Method(
        "multislerp",
        (WEIGHT, Parameter("normalize_weights", "normalize", bool, True)),
        base="possible",
        ignored=("eps",),
    ),
    "karcher": Method(
        "karcher",
        (Parameter("max_iter", "steps", int, 10), Parameter("tol", "tolerance", float, 1e-5)),
        base="a model",
    ),
    "nearswap": Method("nearswap", (Parameter("t", "t", float),), max_models=1),
    "arcee_fusion": Method("arcee-fusion", max_models=1),
    "sce": Method("sce", (Parameter("select_topk", "select_topk", float, 1.0),)),
    "ram": Method("ram", (_RAM,)),
    "ramplus_tl": Method("ram", (_RAM, Parameter("r", "r", float, 0.1), Parameter("alpha", "alpha", float, 0.2))),
    "passthrough": Method(
        "passthrough", (Parameter("scale", "scale", float, 1.0, "input"),), base="a model", max_models=1
    ),
}


def join_switches(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the two nuslerp switches replaced by the option `axis`."""
    if "flatten" not in options:
        return options
    axis = "all" if options["flatten"] else "first" if options["row_wise"] else "last"
    return {key: value for key, value in options.items() if key not in ("flatten", "row_wise")} | {"axis": axis}


#: Chat templates that mergekit recipes name, written from the published formats.
TEMPLATES = {
    "chatml": (
        "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "alpaca": (
        "{% for turn in messages %}{% if turn.role == 'user' %}### Instruction:\n{% elif turn.role == 'assistant' %}"
        "### Response:\n{% endif %}{{ turn.content | trim }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### Response:\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for turn in messages %}<|start_header_id|>{{ turn.role }}<|end_header_id|>\n\n"
        "{{ turn.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
}
#: Other names that mergekit knows: the format of the first changed several times, and the second is rarely used.
UNSUPPORTED = ("mistral", "exaone")
