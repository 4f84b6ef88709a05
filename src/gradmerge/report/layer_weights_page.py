"""What weights that differ between layers gain, in words, a figure and a table."""

from __future__ import annotations

from collections.abc import Mapping

from ..diagnostics.preview import Outcome, Preview
from ..diagnostics.suggest import OverLayers
from ..recipe import in_words, value_at
from ..tasks.uncertainty import TIE
from ..text import plus_minus
from .figures import Series, curves
from .numbers import number
from .page import Figure, Section, Table, Value

MEANING = "A list is spread over the layers from first to last; what is outside them takes its first number."


def layers_words(found: Preview, over: OverLayers) -> str:
    """What they gain over the best weights that are the same in all layers, and what was made of that."""
    beside = f"beside the best that are the same in all layers ({over.plain.setting.name})"
    if over.layered is over.plain:
        return f"**Weights that differ between layers** gain nothing {beside}; {over.looked} lists were tried."
    criterion = found.criterion.name
    if over.judged is None:
        times = f"{number(found.relative_to(over.layered, over.plain))} times the {criterion}"
        stay = "" if over.taken else ": within 1 %, so that the weights stay the same in all layers"
        return f"**Weights that differ between layers** have {times}, {beside}{stay}."
    gain, error = over.judged.gain, over.judged.error
    more = plus_minus(number(abs(gain)), over.judged)
    what = f"{'lower' if gain > 0 else 'raise'} the {criterion} by {more} (standard error)"
    held = "On a third of each task's rows, held back from the choice of both, "
    judged = f"{held}**weights that differ between layers** {what} beside weights that are the same in all layers"
    if over.taken:
        return f"{judged}; those suggested were then chosen on all rows."
    if gain > TIE * error:
        return f"{judged}. On all rows they are tied with others, which are simpler, or worse, and are not taken."
    why = "within two standard errors" if gain > 0 else "no better"
    return f"{judged}: {why}, so that the weights stay the same in all layers."


def layers_section(found: Preview, over: OverLayers) -> Section:
    """The weight of every task at every layer, and both settings side by side."""
    places = range(over.layers)
    series = [
        Series(task, [*places], [value_at(weight, "", place / (over.layers - 1)) for place in places])
        for task, weight in found.weights(over.layered).items()
    ]
    title = "Weights over the layers" + ("" if over.taken else ", not taken")
    chart = Figure(title, "layers", curves(series, "layer", "weight"))
    lists, plain = found.weights(over.layered), found.weights(over.plain)

    def cost(row: Outcome, task: str) -> float | None:
        return row.costs.get(task) if found.measured else found.relative(row, task)

    unit = "share lost on all rows" if found.measured else "× reference"
    columns = ["task", "over the layers", "in all layers", f"{unit}, over the layers", f"{unit}, in all layers"]
    rows: list[list[Value]] = [
        [task, _words(lists, task), _words(plain, task), cost(over.layered, task), cost(over.plain, task)]
        for task in found.tasks
    ]
    table = Table("Weights over the layers and without", "over-layers", columns, rows)
    text = f"The weight of each task at each layer; {over.looked} settings with such weights were tried. {MEANING}"
    return Section("Weights over the layers", text, [chart], [table])


def _words(weights: Mapping[str, object], task: str) -> str | None:
    return in_words(weights[task]).removesuffix(" over the layers") if task in weights else None
