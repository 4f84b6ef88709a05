"""Recipes of mergekit, as ours.

What mergekit takes is read here, parameter by parameter and with its own precedence: a model's, then its slice's, its
module's, and the recipe's. What it says is kept; where that is not possible, the message names the line.
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
from ..yaml_values import YamlValue
from .chat_templates import LEFT_OUT, TEMPLATES
from .methods import IDLE, MERGEKIT_METHODS, REQUIRED, Method, Parameter, settled
from .parameters import resolved

TOP = (
    *("merge_method", "base_model", "models", "slices", "modules", "parameters", "dtype", "out_dtype", "name"),
    *("tokenizer_source", "tokenizer", "chat_template"),
)
TYPES = ("float64", "float32", "float16", "bfloat16")


class ModelReference(NamedTuple):
    """A model as mergekit names it, and an adapter on top of it."""

    model: str
    adapter: str | None = None


@dataclass
class InputModel:
    """A model that goes into a slice: where it is named, its layers if the recipe is of slices, and its parameters."""

    place: YamlValue
    reference: ModelReference
    layers: tuple[int, int] | None


def translate(document: YamlValue, find: Callable[[str], str]) -> tuple[dict[str, Any], list[Note], dict[str, str]]:
    """A recipe of mergekit's as ours, with notes on what was read otherwise than one might think.

    ``find`` gives the place of a model or adapter that mergekit names. Last come keys of layers in ours, each with
    where the file has them.
    """
    translation = _Translation(document, find)
    return translation.recipe(), translation.notes, translation.layers


class _Translation:
    def __init__(self, top: YamlValue, find: Callable[[str], str]) -> None:
        self.top, self.find = top, find
        self.notes: list[Note] = []
        self.layers: dict[str, str] = {}
        self._check_keys(top, TOP)
        self.method_name, self.method = self._method()
        base = top.get("base_model")
        self.base = None if base is None else self._reference(base)
        if self.base is None and self.method.base == "needed":
            raise top.at("merge_method").fail(f"{self.method_name} needs a base: give a `base_model`")

    def recipe(self) -> dict[str, Any]:
        module = self._module()
        levels = [place for place in (module.get("parameters"), self.top.get("parameters")) if place is not None]
        if module.value is self.top.value:
            levels = levels[:1]
        for level in levels:
            self._check_parameters(level, one_model=False)
        made: dict[str, Any] = {"method": self.method.rule}
        if self.base is not None:
            made["base"] = self._named(self.base)
        if module.get("slices") is not None:
            made |= self._slices(module.at("slices").sequence(), levels)
        else:
            made |= self._models(module.at("models").sequence(), levels)
        name = self.top.get("name")
        return ({} if name is None else {"name": str(name.value)}) | made | self._output() | self._vocabulary()

    # What is merged

    def _method(self) -> tuple[str, Method]:
        place = self.top.at("merge_method")
        name = place.text()
        if name not in MERGEKIT_METHODS:
            known = f"{nearest(name, MERGEKIT_METHODS)}\n  Known are {', '.join(MERGEKIT_METHODS)}."
            raise place.fail(f"merge_method: there is no method {name[:60]!r}{known}")
        return name, MERGEKIT_METHODS[name]

    def _module(self) -> YamlValue:
        """Where `models` or `slices` are: in the recipe, or in its only module."""
        given = [key for key in ("models", "slices", "modules") if self.top.get(key) is not None]
        if len(given) != 1:
            told = " and ".join(given) if given else "none of them"
            raise self.top.fail(f"one of `models`, `slices` and `modules` says what is merged; here is {told}")
        if given != ["modules"]:
            return self.top
        modules = self.top.at("modules").mapping()
        first, *others = list(modules.keys) or [None]
        if first is None or others:
            place = modules.at(others[0]) if others else modules
            raise place.fail("modules: only a recipe with one module can be read; merge each part of the model apart")
        module = modules.at(first).mapping()
        self._check_keys(module, ("models", "slices", "parameters"))
        if (module.get("models") is None) == (module.get("slices") is None):
            raise module.fail(f"modules.{first}: give either `models` or `slices`")
        return module

    def _models(self, places: YamlValue, levels: Sequence[YamlValue]) -> dict[str, Any]:
        sources = []
        for place in places:
            self._check_keys(place.mapping(), ("model", "parameters"))
            sources.append(InputModel(place, self._reference(self._model(place)), None))
        return self._lifted([self._merged(sources, levels)], sliced=False)

    def _slices(self, places: YamlValue, levels: Sequence[YamlValue]) -> dict[str, Any]:
        made = []
        for place in places:
            self._check_keys(place.mapping(), ("sources", "base_model", "parameters", "residual_weight"))
            if place.get("sources") is None:
                raise place.fail("slices: `sources` is missing")
            own = place.get("base_model")
            if own is not None and self._reference(own) != self.base:
                raise own.fail("base_model of a slice: other than the recipe's is not supported; make it two recipes")
            sources = [self._slice_source(source) for source in place.at("sources").sequence()]
            lengths = [source.layers[1] - source.layers[0] for source in sources if source.layers is not None]
            if len(set(lengths)) > 1:
                raise place.fail(f"slices: its sources have different numbers of layers: {lengths}")
            inner = place.get("parameters")
            if inner is not None:
                self._check_parameters(inner, one_model=False)
            made.append(self._merged(sources, [*([inner] if inner else []), *levels]))
            self._keep_lines(f"slices[{len(made) - 1}]", sources)
        return self._lifted(made, sliced=True)

    def _keep_lines(self, key: str, sources: Sequence[InputModel]) -> None:
        """Where the layers of a slice are in the file."""
        base = None if self.method.base == "a model" else self.base
        models = (f"{key}.models[{number}].layers" for number in itertools.count())
        for source in sources:
            own = f"{key}.base" if source.reference == base else next(models)
            self.layers[own] = f"{source.place.at('layer_range').where}: layer_range"

    def _slice_source(self, place: YamlValue) -> InputModel:
        self._check_keys(place.mapping(), ("model", "layer_range", "parameters"))
        span = place.get("layer_range")
        if span is None:
            raise place.fail("slices: `layer_range` is missing; give the first layer and one past the last")
        if not isinstance(span.value, list) or len(span.value) != 2:
            raise span.fail(f"layer_range: should be [first, one past the last], but it is {span.shown}")
        first, stop = (end.whole() for end in span)
        if not 0 <= first < stop:
            raise span.fail(f"layer_range: [{first}, {stop}] are no layers: give the first and one past the last")
        return InputModel(place, self._reference(self._model(place)), (first, stop))

    def _merged(self, sources: list[InputModel], levels: Sequence[YamlValue]) -> dict[str, Any]:
        """What is merged into some layers: models, options, and the base's layers.

        ``levels`` are the parameters that are not of single models, the nearest first.
        """
        method, sliced, base = self.method, sources[0].layers is not None, self.base
        if method.base == "a model":
            if base is not None and not sliced and base not in [source.reference for source in sources]:
                sources = [*sources, InputModel(self.top.at("base_model"), base, None)]
            base = None
        made: dict[str, Any] = {"models": [], "options": {}}
        seen: list[ModelReference] = []
        for source in sources:
            if source.reference in seen:
                raise source.place.fail(f"{source.reference.model}: is there twice; mergekit takes a model once")
            seen.append(source.reference)
            if base is not None and source.reference == base:
                made["base"] = source.layers
            else:
                made["models"].append(self._model_of(source, levels))
        if base is not None and sliced and base not in seen:
            raise sources[0].place.fail(f"the base_model is not among the sources; {self.method_name} needs its layers")
        count = len(made["models"])
        if count < method.least or (method.most is not None and count > method.most):
            wanted = f"at least {method.least}" if method.most is None else f"{method.most}"
            besides = " besides the base" if base is not None else ""
            raise sources[0].place.fail(f"{self.method_name} takes {wanted} model(s){besides}, not {count}")
        for parameter in method.parameters:
            if parameter.scope == "shared":
                made["options"][parameter.option] = self._value(parameter, levels, None)
        made["options"] = settled(made["options"])
        return made

    def _model_of(self, source: InputModel, levels: Sequence[YamlValue]) -> dict[str, Any]:
        own = source.place.get("parameters") if isinstance(source.place.value, dict) else None
        if own is not None:
            self._check_parameters(own, one_model=True)
            levels = [own, *levels]
        made: dict[str, Any] = self._named(source.reference)
        if source.layers is not None:
            made["layers"] = list(source.layers)
        options: dict[str, Any] = {}
        for parameter in self.method.parameters:
            if parameter.scope != "shared":
                value = self._value(parameter, levels, source)
                (made if parameter.option == "weight" else options)[parameter.option] = value
        return made | {"options": options}

    def _lifted(self, parts: list[dict[str, Any]], sliced: bool) -> dict[str, Any]:
        """Slices, or models, with every option as far up as it is the same, and none that is at its default."""
        defaults = {option.name: option.default for option in METHODS[self.method.rule].options}
        shared: dict[str, Any] = dict(self.method.options)
        for name in list(parts[0]["options"]):
            if all(part["options"][name] == parts[0]["options"][name] for part in parts):
                shared[name] = parts[0]["options"][name]
        models = [model for part in parts for model in part["models"]]
        for name in list(models[0]["options"]):
            if all(model["options"][name] == models[0]["options"][name] for model in models):
                shared[name] = models[0]["options"][name]
        for holder in (*parts, *models):
            holder["options"] = {key: value for key, value in holder["options"].items() if key not in shared}
            if not holder["options"]:
                del holder["options"]
        options = {key: value for key, value in shared.items() if value != defaults.get(key, REQUIRED)}
        made: dict[str, Any] = {"options": options} if options else {}
        if not sliced:
            return {"models": models} | made
        for part in parts:
            part.update({"base": list(part["base"])} if part.get("base") is not None else {})
        return {"slices": parts} | made

    def _model(self, place: YamlValue) -> YamlValue:
        model = place.get("model")
        if model is None:
            raise place.fail("`model` is missing")
        return model

    def _reference(self, place: YamlValue) -> ModelReference:
        if isinstance(place.value, dict):
            self._check_keys(place, ("model", "lora", "override_architecture"))
            if place.get("override_architecture") is not None:
                self._note(place.at("override_architecture"), "has no effect: tensors are matched by their names")
            lora = place.get("lora")
            return ModelReference(_path(self._model(place)), None if lora is None else _path(lora))
        model, plus, adapter = place.text().partition("+")
        if "+" in adapter:
            raise place.fail(f"{place.text()[:80]}: a model takes one adapter, as MODEL+ADAPTER")
        return ModelReference(model, adapter) if plus else ModelReference(model)

    def _named(self, reference: ModelReference) -> dict[str, Any]:
        made = {"model": self.find(reference.model)}
        return made | ({"adapter": self.find(reference.adapter)} if reference.adapter else {})

    # Parameters

    def _value(self, parameter: Parameter, levels: Sequence[YamlValue], source: InputModel | None) -> Any:
        options = METHODS[self.method.rule].options
        limits = next((option.help for option in options if option.name == parameter.option), None)
        value = resolved(parameter, levels, limits)
        if value is None:
            place = self.top.at("merge_method") if source is None else source.place
            of = "" if source is None else f" for {source.reference.model}"
            raise place.fail(
                f"{self.method_name} needs the parameter `{parameter.name}`{of}, and for every tensor: after filters, "
                "add a last `- value:`"
            )
        return value

    def _check_parameters(self, place: YamlValue, one_model: bool) -> None:
        """Note parameters that have no effect, and stop at one that is probably misspelt."""
        known = {parameter.name: parameter for parameter in self.method.parameters}
        for name in place.mapping().keys:
            parameter = known.get(name)
            if parameter is not None:
                if one_model and parameter.scope == "shared":
                    self._note(place.at(name), f"of a single model has no effect in {self.method_name}")
            elif name in (*IDLE, *self.method.idle):
                if name == "eps" and place.at(name).number() > 1e-6:
                    raise place.at(name).fail("eps: more than 1e-6 is not supported")
                self._note(place.at(name), "changes no result")
            else:
                elsewhere = {parameter.name for method in MERGEKIT_METHODS.values() for parameter in method.parameters}
                if name not in elsewhere:
                    self._check_spelling(place.at(name), str(name), [*known, *self.method.idle])
                self._note(place.at(name), f"is no parameter of {self.method_name}, and has no effect")

    def _check_keys(self, place: YamlValue, known: Collection[str]) -> None:
        for key in place.keys:
            if key not in known:
                self._check_spelling(place.at(key), str(key), known)
                self._note(place.at(key), "is no key of mergekit's here, and has no effect")
            elif key == "residual_weight":
                self._note(place.at(key), "has no effect in mergekit either")

    def _check_spelling(self, place: YamlValue, word: str, known: Collection[str]) -> None:
        close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.8)
        if close:
            raise place.fail(f"{word}: mergekit would not read it; did you mean {close[0]!r}?")

    def _note(self, place: YamlValue, text: str) -> None:
        note = Note(f"{place.where}: {place.name} {text}")
        if note not in self.notes:
            self.notes.append(note)

    # What is written

    def _output(self) -> dict[str, Any]:
        types = {}
        for key in ("dtype", "out_dtype"):
            place = self.top.get(key)
            if place is not None:
                types[key] = place.text().removeprefix("torch.")
                if types[key] not in TYPES:
                    raise place.fail(f"{key}: there is no type {types[key][:60]!r}; known are {', '.join(TYPES)}")
        if types.get("dtype", "float32") != "float32":
            self._note(self.top.at("dtype"), "is the type of the result; the arithmetic is in float32")
        return {"output": {"dtype": types.get("out_dtype", types.get("dtype", "widest"))}}

    def _vocabulary(self) -> dict[str, Any]:
        source, choice = self.top.get("tokenizer_source"), self.top.get("tokenizer")
        if source is not None and choice is not None:
            raise choice.fail("tokenizer: stands instead of `tokenizer_source`; leave one of the two out")
        made: dict[str, Any] = {}
        if source is not None:
            made["tokenizer"] = self._tokenizer_source(source)
        elif choice is not None:
            made["tokenizer"] = self._tokenizer(choice.mapping())
        template = self.top.get("chat_template")
        if template is not None:
            text = TEMPLATES.get(template.text(), template.text())
            if text in LEFT_OUT:
                raise template.fail(f"chat_template: {text} comes with mergekit; give the template itself")
            if text != "auto" and "{" not in text:
                known = f"{', '.join(TEMPLATES)}{nearest(text, TEMPLATES)}"
                raise template.fail(f"chat_template: {text[:60]!r} is neither auto nor a template nor one of {known}")
            made["chat_template"] = "common" if text == "auto" else text
        return made

    def _tokenizer_source(self, place: YamlValue) -> str:
        if place.value in ("union", "base"):
            return str(place.value)
        return self.find(self._reference(place).model)

    def _tokenizer(self, place: YamlValue) -> dict[str, Any]:
        self._check_keys(place, ("source", "tokens", "pad_to_multiple_of"))
        source, tokens, multiple = (place.get(key) for key in ("source", "tokens", "pad_to_multiple_of"))
        made: dict[str, Any] = {"source": "union" if source is None else self._tokenizer_source(source)}
        if tokens is not None:
            made["tokens"] = {str(token): self._token(tokens.at(token).mapping()) for token in tokens.mapping().keys}
        return made | ({} if multiple is None else {"pad_to_multiple_of": multiple.whole()})

    def _token(self, place: YamlValue) -> dict[str, Any]:
        """Where the rows of a token come from."""
        self._check_keys(place, ("source", "force"))
        source, force = place.get("source"), place.get("force")
        made: dict[str, Any] = {} if force is None else {"force": force.truth()}
        if source is None:
            return made
        if not isinstance(source.value, dict) or "kind" not in source.value:
            return {"source": self.find(self._reference(source).model)} | made
        self._check_keys(source, ("kind", "model", "token", "token_id"))
        kind = source.at("kind").text()
        if kind == "zero":
            return {"source": {"kind": "zero"}} | made
        if kind != "model_token":
            raise source.at("kind").fail(f"kind: {kind[:60]!r} is neither zero nor model_token")
        of: dict[str, Any] = {"kind": kind, "model": self.find(self._reference(self._model(source)).model)}
        which = [key for key in ("token", "token_id") if source.get(key) is not None]
        if len(which) != 1:
            raise source.fail("model_token: give either its `token` or its `token_id`")
        return {"source": of | {which[0]: source.at(which[0]).value}} | made


def _path(place: YamlValue) -> str:
    """A path, or a mapping with path and revision."""
    if not isinstance(place.value, dict):
        return place.text()
    path, revision = place.get("path"), place.get("revision")
    if path is None:
        raise place.fail(f"{place.name}: `path` is missing")
    return path.text() + ("" if revision is None else f"@{revision.text()}")
