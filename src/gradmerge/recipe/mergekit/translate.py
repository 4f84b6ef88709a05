"""Translate mergekit recipes into gradmerge recipes.

A parameter has mergekit's precedence: model, slice, module, recipe. What cannot be translated is an error that names
the line; what has no effect is a note.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...notes import Note
from ...rules import METHODS
from ...text import nearest
from .chat_templates import TEMPLATES, UNSUPPORTED
from .methods import IGNORED, MERGEKIT_METHODS, REQUIRED, Method, Parameter, join_switches
from .parameters import resolve
from .yaml_values import YamlValue

KEYS = (
    *("merge_method", "base_model", "models", "slices", "modules", "parameters", "dtype", "out_dtype", "name"),
    *("tokenizer_source", "tokenizer", "chat_template"),
)
DTYPES = ("float64", "float32", "float16", "bfloat16")
ALL_PARAMETERS = {parameter.name for method in MERGEKIT_METHODS.values() for parameter in method.parameters}


class ModelReference(NamedTuple):
    """A model, and an adapter on top of it."""

    model: str
    adapter: str | None = None


@dataclass
class Source:
    """An input of a merge: its entry in the recipe, its model, and its layers in a recipe with slices."""

    entry: YamlValue
    reference: ModelReference
    layers: tuple[int, int] | None = None


def translate(document: YamlValue, find: Callable[[str], str]) -> tuple[dict[str, Any], list[Note], dict[str, str]]:
    """Translate a mergekit recipe.

    Args:
        document: The recipe.
        find: Returns the path for a model that the recipe names.

    Returns:
        The gradmerge recipe, notes, and the file's line for each key of layers in the gradmerge recipe.
    """
    translation = _Translation(document, find)
    return translation.recipe(), translation.notes, translation.lines


class _Translation:
    def __init__(self, document: YamlValue, find: Callable[[str], str]) -> None:
        self.document, self.find = document, find
        self.notes: list[Note] = []
        self.lines: dict[str, str] = {}
        self._check_keys(document, KEYS)
        self.method_name, self.method = self._method()
        base = document.get("base_model")
        self.base = None if base is None else self._reference(base)
        if self.base is None and self.method.base == "needed":
            raise document.at("merge_method").fail(f"{self.method_name} needs a `base_model`")

    def recipe(self) -> dict[str, Any]:
        module = self._module()
        holders = [module] if module.value is self.document.value else [module, self.document]
        levels = [level for holder in holders if (level := holder.get("parameters")) is not None]
        for level in levels:
            self._check_parameters(level, of_model=False)
        recipe: dict[str, Any] = {}
        if (name := self.document.get("name")) is not None:
            recipe["name"] = str(name.value)
        recipe["method"] = self.method.rule
        if self.base is not None:
            recipe["base"] = self._model_keys(self.base)
        if module.get("slices") is not None:
            slices = [self._slice(i, entry, levels) for i, entry in enumerate(module.at("slices").sequence())]
            recipe |= self._with_shared_options(slices) | {"slices": slices}
        else:
            sources = []
            for entry in module.at("models").sequence():
                self._check_keys(entry.mapping(), ("model", "parameters"))
                sources.append(Source(entry, self._reference(self._required(entry, "model"))))
            merge = self._merge(sources, levels)
            recipe |= self._with_shared_options([merge]) | {"models": merge["models"]}
        return recipe | self._output() | self._vocabulary()

    # Methods, models and slices

    def _method(self) -> tuple[str, Method]:
        value = self.document.at("merge_method")
        name = value.text()
        if name not in MERGEKIT_METHODS:
            known = f"{nearest(name, MERGEKIT_METHODS)}\n  Known are {', '.join(MERGEKIT_METHODS)}."
            raise value.fail(f"merge_method: there is no method {name[:60]!r}{known}")
        return name, MERGEKIT_METHODS[name]

    def _module(self) -> YamlValue:
        """Return the mapping with `models` or `slices`: the recipe, or its only module."""
        keys = [key for key in ("models", "slices", "modules") if self.document.get(key) is not None]
        if len(keys) != 1:
            found = " and ".join(keys) if keys else "none of them"
            raise self.document.fail(f"the recipe needs one of `models`, `slices` and `modules`, but has {found}")
        if keys != ["modules"]:
            return self.document
        modules = self.document.at("modules").mapping()
        first, *others = modules.keys or [None]
        if first is None or others:
            entry = modules.at(others[0]) if others else modules
            raise entry.fail("modules: only one module is supported; merge each part of the model in its own recipe")
        module = modules.at(first).mapping()
        self._check_keys(module, ("models", "slices", "parameters"))
        if (module.get("models") is None) == (module.get("slices") is None):
            raise module.fail(f"modules.{first}: give either `models` or `slices`")
        return module

    def _slice(self, number: int, entry: YamlValue, levels: Sequence[YamlValue]) -> dict[str, Any]:
        self._check_keys(entry.mapping(), ("sources", "base_model", "parameters", "residual_weight"))
        base = entry.get("base_model")
        if base is not None and self._reference(base) != self.base:
            raise base.fail("base_model of a slice: another base than that of the recipe is not supported")
        sources = [self._slice_source(source) for source in self._required(entry, "sources").sequence()]
        lengths = [source.layers[1] - source.layers[0] for source in sources if source.layers is not None]
        if len(set(lengths)) > 1:
            raise entry.fail(f"slices: the sources have different numbers of layers: {lengths}")
        if (own := entry.get("parameters")) is not None:
            self._check_parameters(own, of_model=False)
            levels = [own, *levels]
        merge = self._merge(sources, levels)
        models = (f"slices[{number}].models[{i}].layers" for i in itertools.count())
        for source in sources:
            is_base = self.method.base != "a model" and source.reference == self.base
            key = f"slices[{number}].base" if is_base else next(models)
            self.lines[key] = f"{source.entry.at('layer_range').where}: layer_range"
        return merge

    def _slice_source(self, entry: YamlValue) -> Source:
        self._check_keys(entry.mapping(), ("model", "layer_range", "parameters"))
        layers = self._required(entry, "layer_range")
        if not isinstance(layers.value, list) or len(layers.value) != 2:
            raise layers.fail(f"layer_range: should be [first, one past the last], but it is {layers.shown}")
        first, stop = (number.whole() for number in layers)
        if not 0 <= first < stop:
            raise layers.fail(f"layer_range: [{first}, {stop}] is not [first, one past the last], counted from 0")
        return Source(entry, self._reference(self._required(entry, "model")), (first, stop))

    def _merge(self, sources: list[Source], levels: Sequence[YamlValue]) -> dict[str, Any]:
        """Return `models` and `options`, and in a slice the layers of the base as `base`.

        ``levels`` are the parameters of slice, module and recipe.
        """
        base, in_slice = self.base, sources[0].layers is not None
        references = [source.reference for source in sources]
        if self.method.base == "a model":
            if base is not None and not in_slice and base not in references:
                sources = [*sources, Source(self.document.at("base_model"), base)]
            base = None
        for number, source in enumerate(sources):
            if source.reference in references[:number]:
                raise source.entry.fail(f"{source.reference.model}: a model can be a source only once")
        if base is not None and in_slice and base not in references:
            raise sources[0].entry.fail(f"{self.method_name} needs the base_model among the sources")
        merge: dict[str, Any] = {"models": []}
        for source in sources:
            if base is not None and source.reference == base:
                merge |= {"base": list(source.layers)} if source.layers is not None else {}
            else:
                merge["models"].append(self._model(source, levels))
        count, method = len(merge["models"]), self.method
        if count < method.min_models or (method.max_models is not None and count > method.max_models):
            expected = f"at least {method.min_models}" if method.max_models is None else f"{method.max_models}"
            besides = " besides the base" if base is not None else ""
            raise sources[0].entry.fail(f"{self.method_name} takes {expected} model(s){besides}, not {count}")
        options = {p.option: self._value(p, levels, None) for p in method.parameters if p.scope == "shared"}
        return merge | {"options": join_switches(options)}

    def _model(self, source: Source, levels: Sequence[YamlValue]) -> dict[str, Any]:
        own = source.entry.get("parameters") if isinstance(source.entry.value, dict) else None
        if own is not None:
            self._check_parameters(own, of_model=True)
            levels = [own, *levels]
        model = self._model_keys(source.reference)
        if source.layers is not None:
            model["layers"] = list(source.layers)
        values = {p.option: self._value(p, levels, source) for p in self.method.parameters if p.scope != "shared"}
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

    def _reference(self, value: YamlValue) -> ModelReference:
        if isinstance(value.value, dict):
            self._check_keys(value, ("model", "lora", "override_architecture"))
            if value.get("override_architecture") is not None:
                self._note(value.at("override_architecture"), "has no effect: tensors are matched by name")
            adapter = value.get("lora")
            model = self._path(self._required(value, "model"))
            return ModelReference(model, None if adapter is None else self._path(adapter))
        model, plus, lora = value.text().partition("+")
        if "+" in lora:
            raise value.fail(f"{value.text()[:80]}: a model takes one adapter, as MODEL+ADAPTER")
        return ModelReference(model, lora if plus else None)

    def _path(self, value: YamlValue) -> str:
        """Return a path, which may be a mapping with `path` and `revision`."""
        if not isinstance(value.value, dict):
            return value.text()
        revision = value.get("revision")
        return self._required(value, "path").text() + ("" if revision is None else f"@{revision.text()}")

    def _model_keys(self, reference: ModelReference) -> dict[str, Any]:
        adapter = {} if reference.adapter is None else {"adapter": self.find(reference.adapter)}
        return {"model": self.find(reference.model)} | adapter

    def _model_path(self, value: YamlValue) -> str:
        """Return the path of a model without its adapter."""
        return self.find(self._reference(value).model)

    # Parameters

    def _value(self, parameter: Parameter, levels: Sequence[YamlValue], source: Source | None) -> Any:
        options = METHODS[self.method.rule].options
        limits = next((option.help for option in options if option.name == parameter.option), None)
        value = resolve(parameter, levels, limits)
        if value is None:
            entry = self.document.at("merge_method") if source is None else source.entry
            model = "" if source is None else f" for {source.reference.model}"
            raise entry.fail(
                f"{self.method_name} needs the parameter `{parameter.name}`{model} for every tensor. After filters, "
                "add a last `- value:`"
            )
        return value

    def _check_parameters(self, parameters: YamlValue, of_model: bool) -> None:
        """Note parameters without effect; raise an error for one that looks misspelled."""
        known = {parameter.name: parameter for parameter in self.method.parameters}
        for name in parameters.mapping().keys:
            value = parameters.at(name)
            if name in known:
                if of_model and known[name].scope == "shared":
                    self._note(value, f"of a single model has no effect in {self.method_name}")
            elif name in (*IGNORED, *self.method.ignored):
                if name == "eps" and value.number() > 1e-6:
                    raise value.fail("eps: values above 1e-6 are not supported")
                self._note(value, "does not change the result")
            else:
                if name not in ALL_PARAMETERS:
                    self._check_spelling(value, str(name), [*known, *self.method.ignored])
                self._note(value, f"is not a parameter of {self.method_name} and has no effect")

    def _check_keys(self, mapping: YamlValue, known: Collection[str]) -> None:
        for key in mapping.keys:
            if key not in known:
                self._check_spelling(mapping.at(key), str(key), known)
                self._note(mapping.at(key), "is not a mergekit key and has no effect")
            elif key == "residual_weight":
                self._note(mapping.at(key), "has no effect in mergekit either")

    def _check_spelling(self, value: YamlValue, word: str, known: Collection[str]) -> None:
        close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.8)
        if close:
            raise value.fail(f"{word}: mergekit ignores this key; did you mean {close[0]!r}?")

    def _required(self, mapping: YamlValue, key: str) -> YamlValue:
        value = mapping.get(key)
        if value is None:
            raise mapping.fail(f"{mapping.name}: `{key}` is missing")
        return value

    def _note(self, value: YamlValue, text: str) -> None:
        note = Note(f"{value.where}: {value.name} {text}")
        if note not in self.notes:
            self.notes.append(note)

    # Output

    def _output(self) -> dict[str, Any]:
        types = {}
        for key in ("dtype", "out_dtype"):
            value = self.document.get(key)
            if value is not None:
                types[key] = value.text().removeprefix("torch.")
                if types[key] not in DTYPES:
                    raise value.fail(f"{key}: unknown type {types[key][:60]!r}; known are {', '.join(DTYPES)}")
        if types.get("dtype", "float32") != "float32":
            self._note(self.document.at("dtype"), "is the type of the result; gradmerge computes in float32")
        return {"output": {"dtype": types.get("out_dtype", types.get("dtype", "widest"))}}

    def _vocabulary(self) -> dict[str, Any]:
        source, tokenizer, template = map(self.document.get, ("tokenizer_source", "tokenizer", "chat_template"))
        keys: dict[str, Any] = {}
        if source is not None and tokenizer is not None:
            raise tokenizer.fail("tokenizer: give either `tokenizer` or `tokenizer_source`")
        if source is not None:
            keys["tokenizer"] = self._tokenizer_source(source)
        elif tokenizer is not None:
            self._check_keys(tokenizer.mapping(), ("source", "tokens", "pad_to_multiple_of"))
            source, tokens, multiple = map(tokenizer.get, ("source", "tokens", "pad_to_multiple_of"))
            choice: dict[str, Any] = {"source": "union" if source is None else self._tokenizer_source(source)}
            if tokens is not None:
                choice["tokens"] = {str(token): self._token(tokens.at(token)) for token in tokens.mapping().keys}
            if multiple is not None:
                choice["pad_to_multiple_of"] = multiple.whole()
            keys["tokenizer"] = choice
        if template is not None:
            text = TEMPLATES.get(template.text(), template.text())
            if text in UNSUPPORTED:
                raise template.fail(f"chat_template: {text} is not supported by name; give the template itself")
            if text != "auto" and "{" not in text:
                known = f"auto, {', '.join(TEMPLATES)} or a template{nearest(text, TEMPLATES)}"
                raise template.fail(f"chat_template: {text[:60]!r} is not {known}")
            keys["chat_template"] = "common" if text == "auto" else text
        return keys

    def _tokenizer_source(self, value: YamlValue) -> str:
        return str(value.value) if value.value in ("union", "base") else self._model_path(value)

    def _token(self, entry: YamlValue) -> dict[str, Any]:
        """Return the rule for the row of a token."""
        self._check_keys(entry.mapping(), ("source", "force"))
        source, force = entry.get("source"), entry.get("force")
        rule: dict[str, Any] = {} if force is None else {"force": force.truth()}
        if source is None:
            return rule
        if not isinstance(source.value, dict) or "kind" not in source.value:
            return rule | {"source": self._model_path(source)}
        self._check_keys(source, ("kind", "model", "token", "token_id"))
        kind = source.at("kind").text()
        if kind == "zero":
            return rule | {"source": {"kind": kind}}
        if kind != "model_token":
            raise source.at("kind").fail(f"kind: {kind[:60]!r} is not zero or model_token")
        keys = [key for key in ("token", "token_id") if source.get(key) is not None]
        if len(keys) != 1:
            raise source.fail("model_token: give either `token` or `token_id`")
        model = self._model_path(self._required(source, "model"))
        return rule | {"source": {"kind": kind, "model": model, keys[0]: source.at(keys[0]).value}}
