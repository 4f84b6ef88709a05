"""The model card of a merged model, with Hugging Face front matter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from .._version import __version__
from ..checkpoints.opening import HUB_ID
from ..recipe import NONE, Base, Identity, Model, Recipe, in_words
from ..storage.tensorfile import local_path
from ..text import one_line, printable
from .slicing import layer_table, shown_layers


def model_card(
    recipe: Recipe,
    name: str,
    library: str | None,
    used: Mapping[str, Any] | None = None,
    more: str = "",
    base: str | None = None,
) -> str:
    """README.md: what was merged, by which method, with what, and the recipe. The same inputs give the same text.

    ``library`` opens the result; ``more`` is text of its own on it; an adapter names its ``base`` alone as base model.
    """
    rule = recipe.rule
    recipes = [*recipe.merges.values(), recipe]
    parts = [m for one in recipes for m in (one.base, *one.sources) if m is not None and m.model not in recipe.merges]
    every = [text for m in parts for text in (m.model, m.adapter) if text is not None] if base is None else [base]
    hub_ids = [text for text in every if HUB_ID.fullmatch(text) and not local_path(text, recipe.folder).exists()]
    on_the_hub = dict.fromkeys(text.partition("@")[0] for text in hub_ids)  # without their revisions
    front: dict[str, Any] = {"base_model": list(on_the_hub)} if on_the_hub else {}
    front |= {"library_name": library} if library is not None else {}
    front["tags"] = ["merge", "gradmerge", *(["lora"] if library == "peft" else [])]
    rows = [f"| base | {_row(recipe.base)} |"] if recipe.base else []
    rows += [f"| tuned | {_row(model)} |" for model in recipe.models]
    table = "\n".join(["| | model | weight | curvature |", "|---|---|---|---|", *rows])
    table = _slices(recipe) if recipe.slices else table
    made = "Made from" if rule.name == "removal" else "A merge of"
    models = f"{len(recipe.models)} fine-tuned {'model' if len(recipe.models) == 1 else 'models'}"
    if recipe.slices:
        number = len(dict.fromkeys(model.model for model in recipe.sources))
        made, models = "Layers of", f"{number} {'model' if number == 1 else 'models'}, stacked and merged"
    written = "---\n".join(to_yaml(recipe_as_written(one)) for one in recipes)
    fence = "`" * max(3, _longest_run(written) + 1)
    return f"""---
{to_yaml(front)}---

# {_plain(name)}

{made} {models} by **{rule.name}** with gradmerge {__version__}.

{rule.summary}
({rule.reference})

{table}
{_used(used or {})}{more}
## Recipe

{fence}yaml
{written}{fence}

`gradmerge.json` in this repository holds the full recipe with defaults, digests of the inputs and versions.
"""


def _slices(recipe: Recipe) -> str:
    """Which layer of the result came from where."""
    table = layer_table(recipe)
    based = "base" in table[0]
    weighted = "weights" in recipe.rule.inputs
    columns = ["layers of the result", *(["layers of the base"] * based), "made from", *(["weight"] * weighted)]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row, part in zip(table, recipe.slices, strict=True):
        sources = "<br>".join(f"{as_code(model.model)} {shown_layers(model.layers)}" for model in part.models)
        weights = "<br>".join(_plain(in_words(model.weight)) for model in part.models)
        base = f"{shown_layers(row['base']['layers'])} | " if based else ""
        rows.append(f"| {shown_layers(row['layers'])} | {base}{sources} |" + (f" {weights} |" if weighted else ""))
    first, last = (", ".join(as_code(model.model) for model in recipe.slices[i].models) for i in (0, -1))
    outside = f"What comes before the layers (embeddings) is made from {first}, what comes after (head) from {last}."
    below = f"Base: {as_code(recipe.base.model)}.\n\n" if recipe.base is not None else ""
    return below + "\n".join(rows) + f"\n\nLayers are counted from 0. {outside}"


def _used(facts: Mapping[str, Any]) -> str:
    """δ and P in words."""
    lines = [f"δ = {facts['damping']:g}"] if "damping" in facts else []
    if "damping_of_layers" in facts:
        lines = [f"{lines[0]}; in layers with Kronecker curvature {facts['damping_of_layers']}"]
    origins = {"default": "by default", "recipe": "as the recipe says", "recorded": "as recorded beside the model"}
    for one in facts.get("penalty", ()):
        value = one["penalty"]
        if isinstance(value, Mapping):
            value = f"{value['identity']:g} · I"
        elif value not in ("H_0", NONE):
            value = as_code(value)
        lines.append(f"P of {as_code(one['model'])}: {value}, {origins[one['from']]}")
    return "".join(f"\n{line}\n" for line in lines)


def recipe_as_written(recipe: Recipe) -> dict[str, Any]:
    """The recipe without what is at its default."""
    written = recipe.model_dump(mode="json", exclude_defaults=True)
    if recipe.tokenizer is not None and written["tokenizer"].keys() <= {"source"}:
        written["tokenizer"] = recipe.tokenizer.source
    return written


def to_yaml(value: Mapping[str, Any]) -> str:
    """YAML for files and people: what would act on a terminal, or cannot be encoded, is escaped."""
    text = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text if printable(text) == text else yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Lists of numbers, such as weights over the layers, are on one line."""


def _list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    numbers = bool(values) and all(isinstance(value, int | float) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=numbers or None)


_Dumper.add_representer(list, _list)


def as_code(text: str) -> str:
    """A name as code in a cell of a table: nothing in it is markup, nor does it end the cell."""
    text = one_line(text).replace("|", "\\|")
    if "`" not in text:
        return f"`{text}`"
    fence = "`" * (_longest_run(text) + 1)
    return f"{fence} {text} {fence}"


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _plain(text: str) -> str:
    """A name as text of Markdown: nothing in it is a link, an image, code or HTML."""
    return re.sub(r"([\\`*\[\]<>&!|~$])", r"\\\1", one_line(text))


def _row(part: Base | Model) -> str:
    weight, named = "" if part.weight is None else _plain(in_words(part.weight)), part.curvature
    curvature = (
        f"{named.identity:g} · I" if isinstance(named, Identity) else as_code(named) if named is not None else ""
    )
    model = as_code(part.model) if part.adapter is None else f"{as_code(part.model)} with {as_code(part.adapter)}"
    return f"{model} | {weight} | {curvature}"


def as_card(front: Mapping[str, Any], name: str, text: str) -> str:
    """A model card with this front matter, of a model of this name."""
    return f"---\n{to_yaml(front)}---\n\n# {_plain(name)}\n\n{text.rstrip()}\n"


def as_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; the first cell of a row is a name, as code."""
    lines = [columns, ["---"] * len(columns), *([as_code(row[0]), *row[1:]] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
