"""Translate mergekit recipes into gradmerge recipes.

A parameter has mergekit's precedence: model, slice, module, recipe. What cannot be translated is an error that names
the key; what has no effect is a note.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError

from ...errors import InputError
from ...rules import METHODS
from ...text import nearest
from ..schedules import is_glob
from .methods import IGNORED, MERGEKIT_METHODS, REQUIRED, TEMPLATES, UNSUPPORTED, Method, Parameter, join_switches

ALL_PARAMETERS = {parameter.name for method in MERGEKIT_METHODS.values() for parameter in method.parameters}


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
    force: bool | None = None


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
    return translation.recipe(), translation.notes


class _Translation:
    def __init__(self, document: Document, find: Callable[[str], str]) -> None:
        self.document, self.find = document, find
        self.notes: list[str] = []
        self._check_keys(document, "")
        self.method = self._method()
        self.base = document.base_model
        if self.base is None and self.method.base == "needed":
            raise InputError(f"base_model: is missing; {document.merge_method} needs one")

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
            recipe |= self._with_shared_options(slices) | {"slices": slices}
        else:
            merge = self._merge(f"{where}models", module.models or [], levels)
            recipe |= self._with_shared_options([merge]) | {"models": merge["models"]}
        return recipe | self._output() | self._vocabulary()

    # Keys

    def _check_keys(self, part: Part, where: str) -> None:
        """Note unknown keys, which mergekit ignores."""
        for key in part.model_extra or {}:
            self._note(f"{where}{key} is not a mergekit key and has no effect{nearest(key, type(part).model_fields)}")
        for name in type(part).model_fields:
            for key, inner in _parts(f"{where}{name}", getattr(part, name)):
                self._check_keys(inner, f"{key}.")

    def _check_parameters(self, level: Level, of_model: bool) -> None:
        """Note parameters without effect."""
        method = self.document.merge_method
        known = {parameter.name: parameter for parameter in self.method.parameters}
        for name, value in level.values.items():
            where = f"{level.where}.{name}"
            if name in known:
                if of_model and known[name].scope == "shared":
                    self._note(f"{where} of a single model has no effect in {method}")
            elif name in (*IGNORED, *self.method.ignored):
                if name == "eps" and _number(float, value, where) > 1e-6:
                    raise InputError(f"{where}: values above 1e-6 are not supported")
                self._note(f"{where} does not change the result")
            else:
                hint = "" if name in ALL_PARAMETERS else nearest(name, known)
                self._note(f"{where} is not a parameter of {method} and has no effect{hint}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # Methods, models and slices

    def _method(self) -> Method:
        name = self.document.merge_method
        if name not in MERGEKIT_METHODS:
            known = f"{nearest(name, MERGEKIT_METHODS)}\n  Known are {', '.join(MERGEKIT_METHODS)}."
            raise InputError(f"merge_method: there is no method {name[:60]!r}{known}")
        return MERGEKIT_METHODS[name]

    def _module(self) -> tuple[str, Module]:
        """Return the part with `models` or `slices`, the recipe or its only module, and the start of its keys."""
        where, keys = "", ["models", "slices", "modules"]
        module: Module = self.document
        if self.document.modules is not None:
            if len(self.document.modules) != 1:
                raise InputError(
                    "modules: only one module is supported; merge each part of the model in its own recipe"
                )
            [(name, inner)] = self.document.modules.items()
            where = f"modules.{name}."
            if self.document.models is None and self.document.slices is None:
                module, keys = inner, ["models", "slices"]
        present = [key for key in keys if getattr(module, key) is not None]
        if len(present) != 1:
            raise InputError(f"{where or 'recipe'}: needs one of {', '.join(keys)}, but has {len(present)}")
        return where, module

    def _slice(self, where: str, part: Slice, levels: Sequence[Level]) -> dict[str, Any]:
        if part.base_model is not None and part.base_model != self.base:
            raise InputError(f"{where}.base_model: another base than that of the recipe is not supported")
        for number, source in enumerate(part.sources):
            first, stop = source.layer_range
            if not 0 <= first < stop:
                key = f"{where}.sources[{number}].layer_range"
                raise InputError(f"{key}: [{first}, {stop}] is not [first, one past the last], counted from 0")
        lengths = [source.layer_range[1] - source.layer_range[0] for source in part.sources]
        if len(set(lengths)) > 1:
            raise InputError(f"{where}: the sources have different numbers of layers: {lengths}")
        own = Level(f"{where}.parameters", part.parameters)
        self._check_parameters(own, of_model=False)
        return self._merge(f"{where}.sources", part.sources, [own, *levels])

    def _merge(self, where: str, sources: Sequence[Source], levels: Sequence[Level]) -> dict[str, Any]:
        """Return `models` and `options`, and in a slice the layers of the base as `base`.

        ``levels`` are the parameters of slice, module and recipe.
        """
        base, name, method = self.base, self.document.merge_method, self.method
        in_slice = isinstance(sources[0], SliceSource)
        references = [source.model for source in sources]
        if method.base == "a model":
            if base is not None and not in_slice and base not in references:
                sources = [*sources, Source.model_construct(model=base)]
            base = None
        if len(set(references)) < len(references):
            raise InputError(f"{where}: a model can be a source only once")
        if base is not None and in_slice and base not in references:
            raise InputError(f"{where}: {name} needs the base_model among the sources")
        merge: dict[str, Any] = {"models": []}
        for number, source in enumerate(sources):
            if base is None or source.model != base:
                merge["models"].append(self._model(f"{where}[{number}]", source, levels))
            elif isinstance(source, SliceSource):
                merge["base"] = list(source.layer_range)
        count = len(merge["models"])
        if count < method.min_models or (method.max_models is not None and count > method.max_models):
            expected = f"at least {method.min_models}" if method.max_models is None else f"{method.max_models}"
            besides = " besides the base" if base is not None else ""
            raise InputError(f"{where}: {name} takes {expected} model(s){besides}, not {count}")
        options = {p.option: self._value(p, levels, where) for p in method.parameters if p.scope == "shared"}
        return merge | {"options": join_switches(options)}

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
        shared: dict[str, Any] = dict(self.method.options)
        models = [model for merge in merges for model in merge["models"]]
        for holders in (merges, models):
            for name, value in holders[0]["options"].items():
                if all(holder["options"][name] == value for holder in holders):
                    shared[name] = value
        for holder in (*merges, *models):
            options = {name: value for name, value in holder.pop("options").items() if name not in shared}
            holder |= {"options": options} if options else {}
        defaults = {option.name: option.default for option in METHODS[self.method.rule].options}
        options = {name: value for name, value in shared.items() if value != defaults.get(name, REQUIRED)}
        return {"options": options} if options else {}

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
                f"{where}: {self.document.merge_method} needs the parameter `{parameter.name}` for every tensor. After "
                "filters, add a last `- value:`"
            )
        default = parameter.values.get(parameter.default, parameter.default)
        return [*cases, {"value": default}] if cases else default

    def _convert(self, parameter: Parameter, setting: Any, where: str) -> Any:
        """Return a value, or a list of values over the layers, in the type of the parameter."""
        if isinstance(setting, list) and setting:
            values = [self._convert(parameter, item, where) for item in setting]
            if any(value != values[0] for value in values) and parameter.kind is not float:
                raise InputError(f"{where}: a list over the layers is only supported for numbers")
            return values if any(value != values[0] for value in values) else values[0]
        value = _number(parameter.kind, setting, where)
        return parameter.values.get(value, value)

    # Output

    def _output(self) -> dict[str, Any]:
        dtype, out_dtype = self.document.dtype, self.document.out_dtype
        if dtype not in (None, "float32"):
            self._note("dtype is the type of the result; gradmerge computes in float32")
        return {"output": {"dtype": out_dtype or dtype or "widest"}}

    def _vocabulary(self) -> dict[str, Any]:
        document, tokenizer = self.document, self.document.tokenizer
        keys: dict[str, Any] = {}
        if document.tokenizer_source is not None and tokenizer is not None:
            raise InputError("tokenizer: give either `tokenizer` or `tokenizer_source`")
        if document.tokenizer_source is not None:
            keys["tokenizer"] = self._tokenizer_source(document.tokenizer_source, "tokenizer_source")
        elif tokenizer is not None:
            keys["tokenizer"] = {"source": self._tokenizer_source(tokenizer.source, "tokenizer.source")}
            if tokenizer.tokens is not None:
                keys["tokenizer"]["tokens"] = {name: self._token(name, rule) for name, rule in tokenizer.tokens.items()}
            if tokenizer.pad_to_multiple_of is not None:
                keys["tokenizer"]["pad_to_multiple_of"] = tokenizer.pad_to_multiple_of
        if (template := document.chat_template) is not None:
            text = TEMPLATES.get(template, template)
            if text in UNSUPPORTED:
                raise InputError(f"chat_template: {text} is not supported by name; give the template itself")
            if text != "auto" and "{" not in text:
                known = f"auto, {', '.join(TEMPLATES)} or a template{nearest(text, TEMPLATES)}"
                raise InputError(f"chat_template: {text[:60]!r} is not {known}")
            keys["chat_template"] = "common" if text == "auto" else text
        return keys

    def _tokenizer_source(self, value: Any, where: str) -> str:
        return str(value) if value in ("union", "base") else self._model_path(value or "union", where)

    def _model_path(self, value: Any, where: str) -> str:
        """Return the path of a model without its adapter."""
        try:
            return self.find(_reference(value).model)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None

    def _token(self, name: str, token: Token) -> dict[str, Any]:
        """Return the rule for the row of a token."""
        rule: dict[str, Any] = {} if token.force is None else {"force": token.force}
        source, where = token.source, f"tokenizer.tokens.{name}.source"
        if isinstance(source, Mapping) and "kind" in source:  # the recipe's own validation checks the rest
            model = source.get("model")
            return rule | {"source": {**source, **({"model": self._model_path(model, where)} if model else {})}}
        return rule if source is None else rule | {"source": self._model_path(source, where)}


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
