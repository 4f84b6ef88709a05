"""Translate mergekit recipes into gradmerge recipes.

A parameter has mergekit's precedence: model, slice, module, recipe. What cannot be translated is an error that names
the key; what has no effect is a note.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError

from ..errors import InputError
from ..rules import METHODS
from ..text import nearest
from .schedules import is_glob

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
    scope: Literal["shared", "input", "tuned"] = "shared"
    """Whether it has one value, one per input, or one per input other than the base."""
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
    ignored: Collection[str] = IGNORED
    """Parameters that change no result beyond rounding."""


def _arithmetic(rule: str, normalize: bool, *more: Parameter, **options: Any) -> Method:
    """Return a method that adds weighted differences to the base."""
    density = () if rule == "task-arithmetic" else (Parameter("density", "density", float, 1.0, "tuned"),)
    shared = (Parameter("normalize", "normalize", bool, normalize), Parameter("lambda", "scale", float, 1.0))
    return Method(rule, (_WEIGHT, *density, *shared, *more), options=options)


def _rescale(default: bool) -> Parameter:
    return Parameter("rescale", "rescale", bool, default, values={True: "norm", False: "none"})


_WEIGHT = Parameter("weight", "weight", float, scope="tuned")
_GAMMA = Parameter("gamma", "gamma", float, 0.01, "tuned")
_EPSILON = Parameter("epsilon", "epsilon", float, 0.15, "tuned")
_RAM = Parameter("epsilon", "epsilon", float, 1e-5)
#: Two switches that are one option here, see `_join_switches`.
_AXIS = (Parameter("nuslerp_flatten", "flatten", bool, True), Parameter("nuslerp_row_wise", "row_wise", bool, False))
_TIES = {"combine": "ties", "vote": "mergekit"}
_SUM = {"combine": "task-arithmetic"}

MERGEKIT_METHODS: dict[str, Method] = {
    "linear": Method(
        "weighted-average",
        (Parameter("weight", "weight", float, scope="input"), Parameter("normalize", "normalize", bool, True)),
        base="a model",
    ),
    "slerp": Method("slerp", (Parameter("t", "t", float),), options={"zeros": "arc"}),
    "task_arithmetic": _arithmetic("task-arithmetic", False),
    "ties": _arithmetic("ties", True, _rescale(False), scope="tensor", vote="mergekit"),
    "dare_linear": _arithmetic("dare", False, _rescale(True), **_SUM),
    "dare_ties": _arithmetic("dare", False, _rescale(True), **_TIES),
    "della": _arithmetic("della", True, _rescale(True), _EPSILON, **_TIES),
    "della_linear": _arithmetic("della", False, _rescale(True), _EPSILON, **_SUM),
    "breadcrumbs": _arithmetic("breadcrumbs", False, _rescale(False), _GAMMA, **_SUM),
    "breadcrumbs_ties": _arithmetic("breadcrumbs", False, _rescale(False), _GAMMA, **_TIES),
    "model_stock": Method("model-stock", (Parameter("filter_wise", "filter_wise", bool, False),)),
    "nuslerp": Method("nuslerp", (_WEIGHT, *_AXIS), base="possible"),
    "multislerp": Method(
        "multislerp",
        (_WEIGHT, Parameter("normalize_weights", "normalize", bool, True)),
        base="possible",
        ignored=("int8_mask", "eps"),
    ),
    "karcher": Method(
        "karcher",
        (Parameter("max_iter", "steps", int, 10), Parameter("tol", "tolerance", float, 1e-5)),
        base="a model",
    ),
    "nearswap": Method("nearswap", (Parameter("t", "t", float),)),
    "arcee_fusion": Method("arcee-fusion"),
    "sce": Method("sce", (Parameter("select_topk", "select_topk", float, 1.0),)),
    "ram": Method("ram", (_RAM,)),
    "ramplus_tl": Method("ram", (_RAM, Parameter("r", "r", float, 0.1), Parameter("alpha", "alpha", float, 0.2))),
    "passthrough": Method("passthrough", (Parameter("scale", "scale", float, 1.0, "input"),), base="a model"),
}
ALL_PARAMETERS = {parameter.name for method in MERGEKIT_METHODS.values() for parameter in method.parameters}

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


class ModelReference(NamedTuple):
    """A model, and an adapter on top of it."""

    model: str
    adapter: str | None = None


def _reference(value: Any) -> ModelReference:
    """Read MODEL, MODEL+ADAPTER or {model: …, lora: …}; a path may be {path: …, revision: …}."""
    if isinstance(value, Mapping):
        parts: list[Any] = [value.get("model"), value.get("lora")]
    else:
        parts = str(value).split("+")
        if len(parts) > 2:
            raise ValueError("should name one adapter, as MODEL+ADAPTER")
    paths = []
    for part in parts:
        if isinstance(part, Mapping) and part.get("revision") is not None:
            part = f"{part.get('path')}@{part['revision']}"
        elif isinstance(part, Mapping):
            part = part.get("path")
        paths.append(part if isinstance(part, str) and part else None)
    if paths[0] is None:
        raise ValueError("should be a model")
    return ModelReference(paths[0], *paths[1:])


Reference = Annotated[ModelReference, PlainValidator(_reference)]
Settings = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
DType = Annotated[
    Literal["float64", "float32", "float16", "bfloat16"],
    BeforeValidator(lambda value: value.removeprefix("torch.") if isinstance(value, str) else value),
]


class Part(BaseModel):
    """A mapping of a mergekit recipe. mergekit ignores unknown keys."""

    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True)


class Source(Part):
    """A model that is merged."""

    model: Reference
    parameters: Settings = {}


class SliceSource(Source):
    layer_range: tuple[int, int]


class Slice(Part):
    sources: list[SliceSource] = Field(min_length=1)
    base_model: Reference | None = None
    parameters: Settings = {}


class Module(Part):
    models: list[Source] | None = Field(None, min_length=1)
    slices: list[Slice] | None = Field(None, min_length=1)
    parameters: Settings = {}


class Token(Part):
    source: Any = None
    force: bool = False


class Tokenizer(Part):
    source: Any = "union"
    tokens: dict[str, Token] | None = None
    pad_to_multiple_of: int | None = None


class Document(Module):
    """A mergekit recipe."""

    merge_method: str
    name: str | None = None
    base_model: Reference | None = None
    modules: dict[str, Module] | None = None
    dtype: DType | None = None
    out_dtype: DType | None = None
    tokenizer_source: Any = None
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None


class Level(NamedTuple):
    """`parameters` of the recipe, a module, a slice or a model."""

    where: str
    values: Mapping[str, Any]


def translate(recipe: Mapping[str, Any], find: Callable[[str], str]) -> tuple[dict[str, Any], list[str]]:
    """Translate a mergekit recipe. Raise InputError or pydantic's ValidationError if that is impossible.

    Args:
        recipe: The recipe.
        find: Returns the path for a model that the recipe names.

    Returns:
        The gradmerge recipe, and notes.
    """
    translation = _Translation(Document.model_validate(recipe), find)
    return translation.recipe(), list(dict.fromkeys(translation.notes))


class _Translation:
    def __init__(self, document: Document, find: Callable[[str], str]) -> None:
        self.document, self.find, self.name = document, find, document.merge_method
        self.notes: list[str] = []
        self._check_keys(document, "")
        if self.name not in MERGEKIT_METHODS:
            known = f"{nearest(self.name, MERGEKIT_METHODS)}\n  Known are {', '.join(MERGEKIT_METHODS)}."
            raise InputError(f"merge_method: there is no method {self.name[:60]!r}{known}")
        self.method = MERGEKIT_METHODS[self.name]
        self.base = document.base_model
        if self.base is None and self.method.base == "needed":
            raise InputError(f"base_model: is missing; {self.name} needs one")

    def recipe(self) -> dict[str, Any]:
        document = self.document
        where, module = self._module()
        levels = [Level("parameters", document.parameters)]
        if where:
            levels.insert(0, Level(f"{where}parameters", module.parameters))
        for level in levels:
            self._check_parameters(level, of_model=False)
        recipe: dict[str, Any] = {} if document.name is None else {"name": document.name}
        recipe["method"] = self.method.rule
        if self.base is not None:
            recipe["base"] = self._model_keys(self.base)
        if module.slices is not None:
            slices = [self._slice(f"{where}slices[{i}]", part, levels) for i, part in enumerate(module.slices)]
            recipe |= {"options": self._with_shared_options(slices), "slices": slices}
        else:
            merge = self._merge(f"{where}models", module.models or [], levels)
            recipe |= {"options": self._with_shared_options([merge]), "models": merge["models"]}
        if document.dtype not in (None, "float32"):
            self.notes.append("dtype is the type of the result; gradmerge computes in float32")
        recipe["output"] = {"dtype": document.out_dtype or document.dtype or "widest"}
        return recipe | self._tokenizer() | self._chat_template()

    # Keys

    def _check_keys(self, part: Part, where: str) -> None:
        """Note unknown keys, which mergekit ignores."""
        for key in part.model_extra or {}:
            near = nearest(key, type(part).model_fields)
            self.notes.append(f"{where}{key} is not a mergekit key and has no effect{near}")
        for name in type(part).model_fields:
            for key, inner in _parts(f"{where}{name}", getattr(part, name)):
                self._check_keys(inner, f"{key}.")

    def _check_parameters(self, level: Level, of_model: bool) -> None:
        """Note parameters without effect."""
        known = {parameter.name: parameter for parameter in self.method.parameters}
        for name, value in level.values.items():
            where = f"{level.where}.{name}"
            if name in known:
                if of_model and known[name].scope == "shared":
                    self.notes.append(f"{where} of a single model has no effect in {self.name}")
            elif name in self.method.ignored:
                if name == "eps" and _number(float, value, where) > 1e-6:
                    raise InputError(f"{where}: values above 1e-6 are not supported")
                self.notes.append(f"{where} does not change the result")
            else:
                hint = "" if name in ALL_PARAMETERS else nearest(name, known)
                self.notes.append(f"{where} is not a parameter of {self.name} and has no effect{hint}")

    # Models and slices

    def _module(self) -> tuple[str, Module]:
        """Return the part with `models` or `slices`, the recipe or its only module, and the start of its keys."""
        module, where, keys = self.document, "", ["models", "slices", "modules"]
        present = [key for key in keys if getattr(module, key) is not None]
        if present == ["modules"] and module.modules is not None:
            if len(module.modules) != 1:
                raise InputError(
                    "modules: only one module is supported; merge each part of the model in its own recipe"
                )
            [(name, inner)] = module.modules.items()
            where, keys = f"modules.{name}.", ["models", "slices"]
            present = [key for key in keys if getattr(inner, key) is not None]
            if len(present) == 1:
                return where, inner
        if len(present) != 1:
            raise InputError(f"{where or 'recipe'}: needs one of {', '.join(keys)}, but has {len(present)}")
        return where, module

    def _slice(self, where: str, part: Slice, levels: Sequence[Level]) -> dict[str, Any]:
        if part.base_model is not None and part.base_model != self.base:
            raise InputError(f"{where}.base_model: another base than that of the recipe is not supported")
        own = Level(f"{where}.parameters", part.parameters)
        self._check_parameters(own, of_model=False)
        return self._merge(f"{where}.sources", part.sources, [own, *levels])

    def _merge(self, where: str, sources: Sequence[Source], levels: Sequence[Level]) -> dict[str, Any]:
        """Return `models` and `options`, and in a slice the layers of the base as `base`.

        ``levels`` are the parameters of slice, module and recipe.
        """
        base, in_slice = self.base, isinstance(sources[0], SliceSource)
        references = [source.model for source in sources]
        if self.method.base == "a model":
            if base is not None and not in_slice and base not in references:
                sources = [*sources, Source.model_construct(model=base)]
            base = None
        if len(set(references)) < len(references):
            raise InputError(f"{where}: a model can be a source only once")
        if base is not None and in_slice and base not in references:
            raise InputError(f"{where}: {self.name} needs the base_model among the sources")
        merge: dict[str, Any] = {"models": []}
        for number, source in enumerate(sources):
            if base is None or source.model != base:
                merge["models"].append(self._model(f"{where}[{number}]", source, levels))
            elif isinstance(source, SliceSource):
                merge["base"] = list(source.layer_range)
        options = {p.option: self._value(p, levels, where) for p in self.method.parameters if p.scope == "shared"}
        return merge | {"options": _join_switches(options)}

    def _model(self, where: str, source: Source, levels: Sequence[Level]) -> dict[str, Any]:
        own = Level(f"{where}.parameters", source.parameters)
        self._check_parameters(own, of_model=True)
        model = self._model_keys(source.model)
        if isinstance(source, SliceSource):
            model["layers"] = list(source.layer_range)
        each = [parameter for parameter in self.method.parameters if parameter.scope != "shared"]
        values = {parameter.option: self._value(parameter, [own, *levels], where) for parameter in each}
        if "weight" in values:
            model["weight"] = values.pop("weight")
        return model | {"options": values}

    def _with_shared_options(self, merges: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Move options that are equal everywhere to the recipe, and remove defaults."""
        shared = dict(self.method.options)
        models = [model for merge in merges for model in merge["models"]]
        for holders in filter(None, (merges, models)):
            for name, value in holders[0]["options"].items():
                if all(holder["options"][name] == value for holder in holders):
                    shared[name] = value
        for holder in (*merges, *models):
            holder["options"] = {name: value for name, value in holder["options"].items() if name not in shared}
        defaults = {option.name: option.default for option in METHODS[self.method.rule].options}
        return {name: value for name, value in shared.items() if value != defaults.get(name, REQUIRED)}

    def _model_keys(self, reference: ModelReference) -> dict[str, Any]:
        adapter = {} if reference.adapter is None else {"adapter": self.find(reference.adapter)}
        return {"model": self.find(reference.model)} | adapter

    # Parameters

    def _value(self, parameter: Parameter, levels: Sequence[Level], where: str) -> Any:
        """Return the value of a parameter for a gradmerge recipe: a tensor takes the first level's that has one."""
        cases: list[dict[str, Any]] = []
        for level in levels:
            key = f"{level.where}.{parameter.name}"
            for filter_, setting in _cases(level.values.get(parameter.name), key):
                value = self._convert(parameter, setting, key)
                if filter_ is None:
                    return [*cases, {"value": value}] if cases else value
                if parameter.kind is not float:
                    raise InputError(f"{key}: filters are only supported for numbers")
                # A filter of mergekit is a substring, so glob characters are escaped.
                cases.append({"filter": f"*{glob.escape(filter_)}*" if is_glob(filter_) else filter_, "value": value})
        if parameter.default is REQUIRED:
            raise InputError(
                f"{where}: {self.name} needs the parameter `{parameter.name}` for every tensor. After filters, add a "
                "last `- value:`"
            )
        default = parameter.values.get(parameter.default, parameter.default)
        return [*cases, {"value": default}] if cases else default

    def _convert(self, parameter: Parameter, setting: Any, where: str) -> Any:
        """Return a value, or a list of values over the layers, in the type of the parameter."""
        if isinstance(setting, list) and setting:
            values = [self._convert(parameter, item, where) for item in setting]
            if all(value == values[0] for value in values):
                return values[0]
            if parameter.kind is not float:
                raise InputError(f"{where}: a list over the layers is only supported for numbers")
            return values
        value = _number(parameter.kind, setting, where)
        return parameter.values.get(value, value)

    # Output

    def _tokenizer(self) -> dict[str, Any]:
        source, tokenizer = self.document.tokenizer_source, self.document.tokenizer
        if source is not None and tokenizer is not None:
            raise InputError("tokenizer: give either `tokenizer` or `tokenizer_source`")
        if source is not None:
            return {"tokenizer": self._model_path(source or "union", "tokenizer_source", ("union", "base"))}
        if tokenizer is None:
            return {}
        source = self._model_path(tokenizer.source or "union", "tokenizer.source", ("union", "base"))
        choice: dict[str, Any] = {"source": source}
        if tokenizer.tokens:
            choice["tokens"] = {name: self._token(name, token) for name, token in tokenizer.tokens.items()}
        if tokenizer.pad_to_multiple_of is not None:
            choice["pad_to_multiple_of"] = tokenizer.pad_to_multiple_of
        return {"tokenizer": choice}

    def _token(self, name: str, token: Token) -> dict[str, Any]:
        """Return the rule for the row of a token."""
        source, where = token.source, f"tokenizer.tokens.{name}.source"
        rule: dict[str, Any] = {"force": True} if token.force else {}
        if isinstance(source, Mapping) and "kind" in source:  # the recipe's own validation checks the rest
            model = source.get("model")
            return rule | {"source": {**source, **({"model": self._model_path(model, where)} if model else {})}}
        return rule if source is None else rule | {"source": self._model_path(source, where)}

    def _model_path(self, value: Any, where: str, words: Collection[str] = ()) -> str:
        """Return the path of a model without its adapter, or one of these words."""
        if value in words:
            return str(value)
        try:
            return self.find(_reference(value).model)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None

    def _chat_template(self) -> dict[str, Any]:
        if (template := self.document.chat_template) is None:
            return {}
        text = TEMPLATES.get(template, template)
        if text in UNSUPPORTED:
            raise InputError(f"chat_template: {text} is not supported by name; give the template itself")
        if text != "auto" and "{" not in text:
            known = f"auto, {', '.join(TEMPLATES)} or a template{nearest(text, TEMPLATES)}"
            raise InputError(f"chat_template: {text[:60]!r} is not {known}")
        return {"chat_template": "common" if text == "auto" else text}


def _join_switches(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the two nuslerp switches replaced by the option `axis`."""
    if "flatten" not in options:
        return options
    axis = "all" if options["flatten"] else "first" if options["row_wise"] else "last"
    return {key: value for key, value in options.items() if key not in ("flatten", "row_wise")} | {"axis": axis}


def _parts(where: str, value: Any) -> Iterator[tuple[str, Part]]:
    """Yield the mappings in a value, with their keys."""
    if isinstance(value, Part):
        yield where, value
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _parts(f"{where}[{number}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _parts(f"{where}.{key}", item)


def _cases(setting: Any, where: str) -> Iterator[tuple[str | None, Any]]:
    """Yield (filter, value); the filter is None for a value that applies to all tensors."""
    if setting is None or setting == []:
        return
    items = setting if isinstance(setting, list) else [setting]
    if not any(isinstance(item, dict) for item in items):
        yield None, setting
        return
    for item in items:
        if not isinstance(item, dict) or item.get("value") is None or item.keys() - {"filter", "value"}:
            raise InputError(f"{where}: should have a `value` and a `filter`, but it is {str(item)[:60]}")
        yield None if item.get("filter") in (None, "", "*") else str(item["filter"]), item["value"]


def _number(kind: type, value: Any, where: str) -> Any:
    """Return a finite number or a truth value; YAML reads 1e-5, without a dot, as text."""
    checked: Any = Annotated[float, Field(allow_inf_nan=False)] if kind is float else kind
    try:
        return TypeAdapter(checked).validate_python(value)
    except ValidationError:
        expected = {bool: "true or false", int: "a whole number"}.get(kind, "a number")
        raise InputError(f"{where}: should be {expected}, but it is {str(value)[:60]!r}") from None
