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
    slider: gr.Slider | None = None
    dropdown: gr.Dropdown | None = None
    checkbox: gr.Checkbox | None = None
    """Ticked, the option has a word (auto, none) instead of a number."""

    @property
    def components(self) -> list[Any]:
        return [one for one in (self.dropdown, self.checkbox, self.slider) if one is not None]


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
        every: dict[tuple[str, bool], dict[str, Control]] = {}
        for method in methods:
            for control in self._choices.controls(method):
                every.setdefault((control.key, control.low is not None), {})[method] = control
        main = sorted((k for k in every if k[0] in _MAIN_OPTIONS and k[1]), key=lambda k: _MAIN_OPTIONS.index(k[0]))
        self.options = [self._option(key, every[key]) for key in main]
        with gr.Accordion("More options", open=False, visible=self._has_more(own.method)) as self.more:
            rest = sorted((key for key in every if key not in main), key=lambda key: not key[1])
            self.options += [self._option(key, every[key]) for key in rest]

    @property
    def inputs(self) -> list[Any]:
        """All components in the order of the values that :meth:`read` takes."""
        return [self.method, *self.weights, *(one for option in self.options for one in option.components)]

    @property
    def outputs(self) -> list[Any]:
        """The components that :meth:`show` and :meth:`change_method` update."""
        return [*self.inputs, self.without_weights, self.more]

    @property
    def weight_inputs(self) -> list[Any]:
        """The components whose values :meth:`change_method` takes."""
        return self.inputs[: 1 + len(self.weights)]

    def _has_more(self, method: str) -> bool:
        controls = self._choices.controls(method)
        return any(control.key not in _MAIN_OPTIONS or control.low is None for control in controls)

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
        low, high = (control.low or 0.0, control.high or 0.0) if control is not None else (0.0, 1.5)
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

    def _option(self, key: tuple[str, bool], controls: dict[str, Control]) -> OptionControl:
        method = self._explorer.own.method
        option = OptionControl(key[0], controls)
        control, visible = controls.get(method, next(iter(controls.values()))), method in controls
        if not key[1]:
            option.dropdown = gr.Dropdown(**_dropdown(control, control.value, visible))
            return option
        if any(_word(one) for one in controls.values()):
            option.checkbox = gr.Checkbox(**_checkbox(control, control.value, visible))
        option.slider = gr.Slider(**_slider(control, control.value, visible), buttons=[])
        return option

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
        return self._updates(setting.method, weights, dict(setting.changes))

    def change_method(self, method: str, *weights: Any) -> list[Any]:
        """Updates of ``outputs`` for another method; weights stay if they are in its range."""
        return self._updates(method, weights, {})

    def _updates(self, method: str, weights: Sequence[Any], changes: dict[str, Any]) -> list[Any]:
        control = self._choices.weight_control(method)

        def slider(value: float) -> Any:
            if control is None or control.low is None or control.high is None:
                return gr.update(visible=False)
            value = value if control.low <= value <= control.high else control.value
            return gr.update(minimum=control.low, maximum=control.high, step=control.step, value=value, visible=True)

        updates = [gr.update(value=method), *map(slider, weights)]
        for option in self.options:
            updates += _option_updates(option, method, changes)
        return [*updates, gr.update(visible=control is None), gr.update(visible=self._has_more(method))]


def _word(control: Control) -> str | None:
    """The word that may replace the number: `auto`, `none`."""
    if isinstance(control.value, str) and control.low is not None:
        return control.value
    return str(control.choices[0]) if control.choices and control.low is not None else None


def _dropdown(control: Control, value: Any, visible: bool) -> dict[str, Any]:
    words = {True: "yes", False: "no"}
    choices = [(words[one] if isinstance(one, bool) else str(one), str(one)) for one in control.choices or ()]
    return {
        "choices": choices,
        "value": str(value),
        "label": control.label,
        "info": control.meaning,
        "visible": visible,
    }


def _slider(control: Control, value: Any, visible: bool) -> dict[str, Any]:
    """A slider; for a logarithmic scale, it shows the power of ten."""
    assert control.low is not None and control.high is not None
    low, high, step, label, number = control.low, control.high, control.step, control.label, _number(value)
    if control.logarithmic:
        low, high, step, label = math.log10(low), math.log10(high), 0.1, f"{label} (power of ten)"
        number = math.log10(number) if number is not None and number > 0 else None
    if number is None:
        number = round((low + high) / 2, 1) if control.logarithmic else min(high, max(low, 1.0))
    return {
        "minimum": min(low, number),
        "maximum": max(high, number),
        "step": step or (high - low) / 100,
        "value": number,
        "label": label,
        "info": control.meaning,
        "visible": visible and not isinstance(value, str),
    }


def _checkbox(control: Control, value: Any, visible: bool) -> dict[str, Any]:
    word = _word(control)
    return {
        "value": isinstance(value, str),
        "label": f"{control.label}: {word}",
        "visible": visible and word is not None,
    }


def _option_updates(option: OptionControl, method: str, changes: dict[str, Any]) -> Iterator[Any]:
    control = option.by_method.get(method)
    for component in option.components:
        if control is None:
            yield gr.update(visible=False)
            continue
        look = {id(option.dropdown): _dropdown, id(option.checkbox): _checkbox, id(option.slider): _slider}
        yield gr.update(**look[id(component)](control, changes.get(option.key, control.value), True))


def _read_option(option: OptionControl, method: str, values: dict[int, Any]) -> Any:
    """The value of an option from the values of its components."""
    control = option.by_method.get(method)
    if control is None:
        return None
    if option.dropdown is not None:
        chosen = values[id(option.dropdown)]
        return next((one for one in control.choices or () if str(one) == chosen), control.value)
    if option.checkbox is not None and values[id(option.checkbox)] and (word := _word(control)) is not None:
        return word
    number = float(values[id(option.slider)])
    if control.logarithmic:
        own = _number(control.value)
        unmoved = own is not None and abs(math.log10(own) - number) < 1e-6
        return own if unmoved else float(f"{10**number:.3g}")
    return int(number) if isinstance(control.step, int) else round(number, _DIGITS)
