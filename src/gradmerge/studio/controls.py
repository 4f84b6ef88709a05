"""The controls of a merge: method, weights, weights by layers, options. They make settings, and show them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

#: Decimals that a slider's number is rounded to: browsers add steps up in binary.
_DIGITS = 10
_NEAR = ("damping", "options.density", "options.t", "options.cap")


def _plain(value: Any) -> float | None:
    """A weight as one number, if it is one."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass
class Knob:
    """The components of one option, which several methods may have."""

    key: str
    by_method: dict[str, Any]
    """Method → its control."""
    number: gr.Slider | None = None
    choice: gr.Dropdown | None = None
    word: gr.Checkbox | None = None
    """Ticked, the option has its word (auto, none) instead of a number."""

    @property
    def components(self) -> list[Any]:
        return [one for one in (self.choice, self.word, self.number) if one is not None]


def _word(control: Any) -> str | None:
    """What stands instead of a number: `auto`, `none`."""
    if isinstance(control.value, str) and control.low is not None:
        return control.value
    return control.choices[0] if control.choices and control.low is not None else None


class Panel:
    """The components, in the order in which handlers are given their values."""

    def __init__(self, explorer: Any) -> None:
        self._explorer = explorer
        own = explorer.own
        self._own_weights = dict(zip(explorer.models, own.weights, strict=True)) if own.weights else {}
        self.method = gr.Dropdown(
            explorer.methods,
            value=own.method,
            label="Method",
            filterable=len(explorer.methods) > 8,
            elem_classes="gm-method",
        )
        self.weights = [self._weight(model) for model in explorer.models]
        self.without = gr.HTML(
            "This method takes no weights.", visible=not self._takes(own.method), elem_classes="gm-hint"
        )
        self.by_layers = gr.Checkbox(
            False, label="Weights by layer", info=", ".join(explorer.layer_groups), visible=self._layered(own.method)
        )
        self.layers: list[list[gr.Slider]] = []
        for model in explorer.models if explorer.layer_groups else ():
            names = [f"{model}: {group}" for group in explorer.layer_groups]
            self.layers.append([self._weight(model, name, visible=False) for name in names])
        # The numbers that decide most are at hand, the rest is behind a click.
        every = self._controls()
        near = sorted((key for key in every if key[0] in _NEAR and key[1]), key=lambda key: _NEAR.index(key[0]))
        self.knobs = [self._knob(key, every[key]) for key in near]
        with gr.Accordion("More options", open=False, visible=self._more(own.method)) as self.options:
            rest = sorted((key for key in every if key not in near), key=lambda key: not key[1])
            self.knobs += [self._knob(key, every[key]) for key in rest]

    @property
    def inputs(self) -> list[Any]:
        """All components, whose values handlers get."""
        flat = [slider for some in self.layers for slider in some]
        return [self.method, *self.weights, self.by_layers, *flat, *(c for knob in self.knobs for c in knob.components)]

    @property
    def outputs(self) -> list[Any]:
        """What :meth:`shaped` and :meth:`changed` give updates for."""
        return [*self.inputs, self.without, self.options]

    def _more(self, method: str) -> bool:
        """Whether a method has options besides those at hand."""
        return any(control.key not in _NEAR or control.low is None for control in self._explorer.controls(method))

    def _takes(self, method: str) -> bool:
        return self._explorer.weight_control(method) is not None

    def _layered(self, method: str) -> bool:
        return self._takes(method) and bool(self._explorer.layer_groups)

    def _start(self, model: str) -> float:
        """Where a model's slider begins: at the recipe's weight, of one that varies between layers at its mean."""
        weight = self._own_weights.get(model)
        plain = _plain(weight)
        if plain is not None:
            return plain
        if isinstance(weight, tuple) and all(_plain(one) is not None for one in weight):
            return round(sum(weight) / len(weight), 3)
        control = self._explorer.weight_control(self._explorer.own.method)
        return control.value if control is not None else 1.0

    def _weight(self, model: str, label: str | None = None, visible: bool = True) -> gr.Slider:
        method = self._explorer.own.method
        control = self._explorer.weight_control(method)
        low, high, step = (control.low, control.high, control.step) if control is not None else (0.0, 1.5, 0.01)
        visible = visible and control is not None
        kinds = ["gm-weight", "gm-layer"] if label else ["gm-weight"]
        return gr.Slider(
            low,
            high,
            self._start(model),
            step=step,
            label=label or model,
            visible=visible,
            buttons=[],
            elem_classes=kinds,
        )

    def _controls(self) -> dict[tuple[str, bool], dict[str, Any]]:
        """Option (and whether it is a number) → method → control."""
        found: dict[tuple[str, bool], dict[str, Any]] = {}
        for method in self._explorer.methods:
            for control in self._explorer.controls(method):
                found.setdefault((control.key, control.low is not None), {})[method] = control
        return found

    def _knob(self, key: tuple[str, bool], controls: dict[str, Any]) -> Knob:
        method = self._explorer.own.method
        knob, any_control = Knob(key[0], controls), next(iter(controls.values()))
        control = controls.get(method, any_control)
        seen = method in controls
        if not key[1]:
            knob.choice = gr.Dropdown(
                _choices(control), value=str(control.value), label=control.label, info=control.meaning, visible=seen
            )
            return knob
        if any(_word(one) for one in controls.values()):
            knob.word = gr.Checkbox(**_word_look(control, seen))
        knob.number = gr.Slider(**_slider_look(control, seen), buttons=[])
        return knob

    def read(self, values: Sequence[Any]) -> Any:
        """The setting that the values of ``inputs`` stand for, checked. What was not moved stays the recipe's."""
        explorer, given = self._explorer, iter(values)
        method = next(given)
        flat = dict(zip(explorer.models, (next(given) for _ in self.weights), strict=True))
        by_layers = next(given)
        layered = {
            model: [next(given) for _ in some] for model, some in zip(explorer.models, self.layers, strict=False)
        }
        weights: dict[str, Any] = {}
        if self._takes(method):
            for model in explorer.models:
                if by_layers and self.layers:
                    weights[model] = [round(float(one), _DIGITS) for one in layered[model]]
                elif (
                    flat[model] != self._start(model)
                    or _plain(self._own_weights.get(model)) is not None
                    or not self._own_weights
                ):
                    weights[model] = round(float(flat[model]), _DIGITS)
        changes: dict[str, Any] = {}
        for knob in self.knobs:
            value = knob_value(knob, method, given)
            if value is not None and value[0] != knob.by_method[method].value:
                changes[knob.key] = value[0]
        return explorer.setting(method, weights, changes)

    def shaped(self, setting: Any) -> list[Any]:
        """Updates of ``outputs`` that show a setting."""
        models = self._explorer.models
        chosen = dict(zip(models, setting.weights, strict=True)) if setting.weights else {}
        layered = bool(self.layers) and any(isinstance(weight, tuple) for weight in chosen.values())
        plain = [_plain(chosen.get(model)) for model in models]
        flat = [self._start(model) if weight is None else weight for model, weight in zip(models, plain, strict=True)]
        by_layers: list[float] = []
        for model, start, some in zip(models, flat, self.layers, strict=False):
            weight = chosen.get(model)
            by_layers += weight if isinstance(weight, tuple) and len(weight) == len(some) else [start] * len(some)
        return self._updates(setting.method, [*flat, layered, *by_layers], dict(setting.changes))

    def changed(self, method: str, *values: Any) -> list[Any]:
        """Updates of ``outputs`` for another method: its options appear; weights stay where its range has them."""
        return self._updates(method, values, {})

    def _updates(self, method: str, weights: Sequence[Any], changes: dict[str, Any]) -> list[Any]:
        control = self._explorer.weight_control(method)
        takes, count = control is not None, len(self.weights)
        layered = takes and bool(self.layers) and bool(weights[count])

        def slider(value: float, seen: bool) -> Any:
            if control is None:
                return _update(visible=False)
            inside = control.low <= value <= control.high
            ranges = {"minimum": control.low, "maximum": control.high, "step": control.step}
            return _update(**ranges, value=value if inside else control.value, visible=seen)

        updates = [_update(value=method), *(slider(value, not layered) for value in weights[:count])]
        updates.append(_update(value=layered, visible=self._layered(method)))
        updates += [slider(value, layered) for value in weights[count + 1 :]]
        for knob in self.knobs:
            updates += _knob_updates(knob, method, changes)
        return [*updates, _update(visible=not takes), _update(visible=self._more(method))]

    @property
    def movable(self) -> list[Any]:
        """What :meth:`changed` is given the values of."""
        return self.inputs[: 2 + len(self.weights) + sum(map(len, self.layers))]

    def layers_shown(self, by_layers: bool, *weights: float) -> list[Any]:
        """Updates of the weights and of those by layers, which begin where the others are."""
        plain = [_update(visible=not by_layers) for _ in self.weights]
        layered = []
        for weight, some in zip(weights, self.layers, strict=False):
            layered += [_update(visible=by_layers, **({"value": weight} if by_layers else {})) for _ in some]
        return plain + layered


def _update(**how: Any) -> Any:
    return gr.update(**how)


def _choices(control: Any) -> list[tuple[str, str]]:
    return [
        ({True: "yes", False: "no"}.get(one, str(one)) if isinstance(one, bool) else str(one), str(one))
        for one in control.choices
    ]


def _slider_look(control: Any, seen: bool, value: Any = None) -> dict[str, Any]:
    """A slider of a control; one with factors for steps shows the power of ten."""
    value = control.value if value is None else value
    low, high, step, label = control.low, control.high, control.step, control.label
    given = _plain(value)
    if control.logarithmic:
        low, high, step, label = math.log10(low), math.log10(high), 0.1, f"{label} (power of ten)"
        given = math.log10(given) if given is not None and given > 0 else None
    if given is None:
        given = round((low + high) / 2, 1) if control.logarithmic else min(high, max(low, 1.0))
    words = isinstance(value, str)
    return {
        "minimum": min(low, given),
        "maximum": max(high, given),
        "step": step or (high - low) / 100,
        "value": given,
        "label": label,
        "info": control.meaning,
        "visible": seen and not words,
    }


def _word_look(control: Any, seen: bool, value: Any = None) -> dict[str, Any]:
    value, word = control.value if value is None else value, _word(control)
    return {"value": isinstance(value, str), "label": f"{control.label}: {word}", "visible": seen and word is not None}


def _knob_updates(knob: Knob, method: str, changes: dict[str, Any]) -> Iterator[Any]:
    control = knob.by_method.get(method)
    for component in knob.components:
        if control is None:
            yield _update(visible=False)
        elif component is knob.choice:
            value = changes.get(knob.key, control.value)
            yield _update(
                choices=_choices(control), value=str(value), label=control.label, info=control.meaning, visible=True
            )
        elif component is knob.word:
            yield _update(**_word_look(control, True, changes.get(knob.key)))
        else:
            yield _update(**_slider_look(control, True, changes.get(knob.key)))


def knob_value(knob: Knob, method: str, given: Iterator[Any]) -> tuple[Any] | None:
    """The value of an option, of the values that its components have; None where the method has no such option."""
    values = {id(component): next(given) for component in knob.components}
    control = knob.by_method.get(method)
    if control is None:
        return None
    if knob.choice is not None:
        chosen = values[id(knob.choice)]
        return (next((one for one in control.choices if str(one) == chosen), control.value),)
    if knob.word is not None and values[id(knob.word)] and (word := _word(control)) is not None:
        return (word,)
    number = float(values[id(knob.number)])
    if control.logarithmic:
        own = _plain(control.value)
        same = own is not None and abs(math.log10(own) - number) < 1e-6
        return (own if same else float(f"{10**number:.3g}"),)
    return (int(number) if isinstance(control.step, int) else round(number, _DIGITS),)
