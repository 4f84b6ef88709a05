"""The controls of a merge: method, weights, weights by layer, options. They make settings, and show them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ..compare.settings import Setting
from .choices import Control
from .explorer import Explorer

#: Decimals of a slider's number: browsers add up steps in binary.
_DIGITS = 10
#: Options that are not under "More options".
_MAIN_OPTIONS = ("damping", "options.density", "options.t", "options.cap")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass
class OptionControl:
    """The components of one option, which several methods may have."""

    key: str
    by_method: dict[str, Control]
    slider: gr.Slider
    checkbox: gr.Checkbox | None = None
    """Ticked, the option has a word (auto, none) instead of a number."""

    @property
    def components(self) -> list[Any]:
        return [self.slider] if self.checkbox is None else [self.checkbox, self.slider]


class Panel:
    """The controls of an explorer."""

    def __init__(self, explorer: Explorer) -> None:
        self._explorer, self._choices, own = explorer, explorer.choices, explorer.own
        self._own_weights = dict(zip(explorer.models, own.weights, strict=True)) if own.weights else {}
        methods = self._choices.methods
        self.method = gr.Dropdown(
            methods, value=own.method, label="Method", filterable=len(methods) > 8, elem_classes="gm-method"
        )
        self.weights = [self._weight_slider(model) for model in explorer.models]
        self.without_weights = gr.HTML(
            "This method takes no weights.", visible=not self._takes_weights(own.method), elem_classes="gm-hint"
        )
        every: dict[str, dict[str, Control]] = {}
        for method in methods:
            for control in self._choices.controls(method):
                every.setdefault(control.key, {})[method] = control
        first = sorted(every, key=lambda key: key not in _MAIN_OPTIONS)
        self.options = [self._option(key, every[key]) for key in first]

    @property
    def inputs(self) -> list[Any]:
        """All components in the order of the values that :meth:`read` takes."""
        return [self.method, *self.weights, *(one for option in self.options for one in option.components)]

    @property
    def outputs(self) -> list[Any]:
        """The components that :meth:`show` and :meth:`change_method` update."""
        return [*self.inputs, self.without_weights]

    @property
    def weight_inputs(self) -> list[Any]:
        """The components whose values :meth:`change_method` takes."""
        return self.inputs[: 1 + len(self.weights)]

    def _takes_weights(self, method: str) -> bool:
        return self._choices.weight_control(method) is not None

    def _start(self, model: str) -> float:
        """The recipe's weight of a model; the mean of a weight that differs between layers."""
        weight = self._own_weights.get(model)
        if (number := _number(weight)) is not None:
            return number
        if isinstance(weight, tuple) and all(_number(one) is not None for one in weight):
            return round(sum(weight) / len(weight), 3)  # type: ignore[arg-type]
        control = self._choices.weight_control(self._explorer.own.method)
        return float(control.value) if control is not None else 1.0

    def _weight_slider(self, model: str) -> gr.Slider:
        control = self._choices.weight_control(self._explorer.own.method)
        low, high = (control.low, control.high) if control is not None else (0.0, 1.5)
        return gr.Slider(
            low,
            high,
            self._start(model),
            step=0.01,
            label=model,
            visible=control is not None,
            buttons=[],
            elem_classes="gm-weight",
        )

    def _option(self, key: str, controls: dict[str, Control]) -> OptionControl:
        method = self._explorer.own.method
        control, visible = controls.get(method, next(iter(controls.values()))), method in controls
        checkbox = None
        if any(one.word for one in controls.values()):
            checkbox = gr.Checkbox(**_checkbox(control, control.value, visible))
        slider = gr.Slider(**_slider(control, control.value, visible), buttons=[])
        return OptionControl(key, controls, slider, checkbox)

    def read(self, values: Sequence[Any]) -> Setting:
        """The setting of the components' values; what was not moved stays the recipe's."""
        explorer, given = self._explorer, iter(values)
        method = next(given)
        flat = {model: float(next(given)) for model in explorer.models}
        weights: dict[str, Any] = {}
        for model in explorer.models if self._takes_weights(method) else ():
            moved = flat[model] != self._start(model)
            if moved or _number(self._own_weights.get(model)) is not None or not self._own_weights:
                weights[model] = round(flat[model], _DIGITS)
        changes: dict[str, Any] = {}
        for option in self.options:
            value = _read_option(option, method, {id(one): next(given) for one in option.components})
            if method in option.by_method and value != option.by_method[method].value:
                changes[option.key] = value
        return explorer.setting(method, weights, changes)

    def show(self, setting: Setting) -> list[Any]:
        """Updates of ``outputs`` for a setting."""
        models = self._explorer.models
        chosen = dict(zip(models, setting.weights, strict=True)) if setting.weights else {}
        numbers = [_number(chosen.get(model)) for model in models]
        weights = [self._start(model) if n is None else n for model, n in zip(models, numbers, strict=True)]
        return self._updates(setting.method, weights, setting.changes)

    def change_method(self, method: str, *weights: Any) -> list[Any]:
        """Updates of ``outputs`` for another method; weights stay if they are in its range."""
        return self._updates(method, weights, {})

    def _updates(self, method: str, weights: Sequence[Any], changes: dict[str, Any]) -> list[Any]:
        control = self._choices.weight_control(method)

        def slider(value: float) -> Any:
            if control is None:
                return gr.update(visible=False)
            value = value if control.low <= value <= control.high else control.value
            return gr.update(minimum=control.low, maximum=control.high, step=control.step, value=value, visible=True)

        updates = [gr.update(value=method), *map(slider, weights)]
        for option in self.options:
            updates += _option_updates(option, method, changes)
        return [*updates, gr.update(visible=control is None)]


def _slider(control: Control, value: Any, visible: bool) -> dict[str, Any]:
    """A slider; for a logarithmic scale, it shows the power of ten."""
    low, high, step, label, number = control.low, control.high, control.step, control.label, _number(value)
    if control.logarithmic:
        low, high, step, label = math.log10(low), math.log10(high), 0.1, f"{label} (power of ten)"
        number = math.log10(number) if number is not None and number > 0 else None
    if number is None:
        number = round((low + high) / 2, 1) if control.logarithmic else min(high, max(low, 1.0))
    return {
        "minimum": min(low, number),
        "maximum": max(high, number),
        "step": step,
        "value": number,
        "label": label,
        "info": control.meaning,
        "visible": visible and not isinstance(value, str),
    }


def _checkbox(control: Control, value: Any, visible: bool) -> dict[str, Any]:
    label = f"{control.label}: {control.word}"
    return {"value": isinstance(value, str), "label": label, "visible": visible and control.word is not None}


def _option_updates(option: OptionControl, method: str, changes: dict[str, Any]) -> Iterator[Any]:
    control = option.by_method.get(method)
    for component in option.components:
        if control is None:
            yield gr.update(visible=False)
            continue
        look = _slider if component is option.slider else _checkbox
        yield gr.update(**look(control, changes.get(option.key, control.value), True))


def _read_option(option: OptionControl, method: str, values: dict[int, Any]) -> Any:
    """The value of an option from the values of its components."""
    control = option.by_method.get(method)
    if control is None:
        return None
    if option.checkbox is not None and values[id(option.checkbox)] and control.word is not None:
        return control.word
    number = float(values[id(option.slider)])
    if control.logarithmic:
        own = _number(control.value)
        unmoved = own is not None and abs(math.log10(own) - number) < 1e-6
        return own if unmoved else float(f"{10**number:.3g}")
    return int(number) if isinstance(control.step, int) else round(number, _DIGITS)
