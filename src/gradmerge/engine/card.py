"""The model card of a merged model, with Hugging Face front matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._version import __version__
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.hub_metadata import Published, all_published, name_of, published, short_names
from ..checkpoints.sidecars import library_of
from ..markdown import as_block, as_card, as_code, as_text, to_yaml
from ..recipe import NONE, Base, Identity, Model, Recipe, in_words
from ..urls import is_url
from .eval_results import PLACE
from .front_matter import front_matter_of, licence_text
from .plan.inputs import CurvatureInput, Inputs
from .plan.penalties import used
from .plan.plan import Plan
from .plan.slices import layer_table, shown_layers
from .usage import pipeline_tag, usage

Shown = Callable[[str], str]
"""What text calls a model or a curvature folder: never by the path to it."""


def merge_card(
    recipe: Recipe, plan: Plan, folder: Path, name: str, adapter_of: Checkpoint | None = None, more: str = ""
) -> str:
    """The card of a merge whose folder is finished but for it; ``adapter_of`` is the base of one that is an adapter."""
    parts = all_published(plan.inputs.checkpoints)
    base = published(adapter_of) if adapter_of is not None else None
    library = "peft" if base is not None else library_of(folder)
    tag = next((part.pipeline_tag for part in parts if part.pipeline_tag), None)
    tag = tag or pipeline_tag(folder if adapter_of is None else adapter_of.folder)
    front = front_matter_of(
        parts,
        bases=None if base is None else [base],
        relation="merge" if base is None else "adapter",
        library=library,
        tags=["merge", "gradmerge", *(["lora"] if base is not None else [])],
        pipeline=tag,
        license=recipe.output.license,
    )
    on = None
    if adapter_of is not None and base is not None:
        on = next(iter(base.ids), base.name), adapter_of.config
    more += licence_text(parts, recipe.output.license) + usage(folder, name, on)
    return model_card(recipe, name, front, plan.inputs, used(recipe, plan), more)


def model_card(
    recipe: Recipe,
    name: str,
    front: Mapping[str, Any],
    inputs: Inputs | None = None,
    facts: Mapping[str, Any] | None = None,
    more: str = "",
) -> str:
    """README.md: what was merged, by which method, with what, and the recipe. The same inputs give the same text.

    ``inputs`` are what was opened, ``facts`` what the record says of damping and penalty, and ``more`` is
    text of its own on the result.
    """
    rule = recipe.rule
    known = {checkpoint.label: published(checkpoint) for checkpoint in inputs.checkpoints} if inputs else {}
    shown = _names(recipe, known)
    every: list[tuple[Base | Model, CurvatureInput | None]] = []
    every += [(recipe.base, inputs.prior if inputs else None)] if recipe.base else []
    found = (inputs.curvature or inputs.grams) if inputs else []
    every += [(model, found[i] if i < len(found) else None) for i, model in enumerate(recipe.models)]
    rows = [
        f"| {'base' if part is recipe.base else 'tuned'} | {_row(part, read, shown, known)} |" for part, read in every
    ]
    table = "\n".join(["| | model | weight | curvature |", "|---|---|---|---|", *rows])
    table = _slices(recipe, shown) if recipe.slices else table
    made = "Made from" if rule.name == "removal" else "A merge of"
    if len(recipe.models) == 1 and recipe.output.format == "adapter":
        made = "A LoRA adapter from"
    models = f"{len(recipe.models)} fine-tuned {'model' if len(recipe.models) == 1 else 'models'}"
    if recipe.slices:
        number = len(dict.fromkeys(model.model for model in recipe.sources))
        made, models = "Layers of", f"{number} {'model' if number == 1 else 'models'}, stacked and merged"
    recipes = [*recipe.merges.values(), recipe]
    written = "---\n".join(to_yaml(_without_paths(recipe_as_written(one), shown)) for one in recipes)
    return as_card(
        front,
        f"""# {as_text(name)}

{made} {models} by **{rule.name}** with gradmerge {__version__}.

{rule.summary}
({rule.reference})

{table}
{_used(facts or {}, shown)}{more}
{PLACE}
## Recipe

{as_block("yaml", written)}

`gradmerge.json` in this repository holds the full recipe with defaults, the inputs and versions.
""",
    )


def _names(recipe: Recipe, known: Mapping[str, Published]) -> Shown:
    recipes = [*recipe.merges.values(), recipe]
    every = [m for one in recipes for m in (one.base, *one.sources) if m is not None]
    models = [text for m in every for text in (m.model, m.adapter) if text is not None]
    ids = {text: known[text].hub_id for text in models if text in known and "@" not in text}
    names = short_names([m.curvature for m in every if isinstance(m.curvature, str)], recipe.folder)
    names |= short_names(models, recipe.folder, ids)

    def shown(text: str) -> str:
        if text in names:
            return names[text]
        model = next((label for label in names if text.startswith(f"{label}/")), None)  # a folder inside a model's
        return name_of(text, recipe.folder) if model is None else names[model] + text[len(model) :]

    return shown


def _without_paths(value: Any, shown: Shown) -> Any:
    """A recipe for others to read: a path from the root of this machine's disk, or in a store, is told by its end."""
    if isinstance(value, Mapping):
        return {key: _without_paths(item, shown) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, shown) for item in value]
    private = isinstance(value, str) and (value.startswith(("/", "~")) or (is_url(value) and value[:5] != "hf://"))
    return shown(value) if private else value


def _slices(recipe: Recipe, shown: Shown) -> str:
    """Which layer of the result came from where."""
    table = layer_table(recipe)
    based = "base" in table[0]
    weighted = "weights" in recipe.rule.inputs
    columns = ["layers of the result", *(["layers of the base"] * based), "made from", *(["weight"] * weighted)]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row, part in zip(table, recipe.slices, strict=True):
        sources = "<br>".join(f"{as_code(shown(model.model))} {shown_layers(model.layers)}" for model in part.models)
        weights = "<br>".join(as_text(in_words(model.weight)) for model in part.models)
        base = f"{shown_layers(row['base']['layers'])} | " if based else ""
        rows.append(f"| {shown_layers(row['layers'])} | {base}{sources} |" + (f" {weights} |" if weighted else ""))
    first, last = (", ".join(as_code(shown(model.model)) for model in recipe.slices[i].models) for i in (0, -1))
    outside = f"What comes before the layers (embeddings) is made from {first}, what comes after (head) from {last}."
    below = f"Base: {as_code(shown(recipe.base.model))}.\n\n" if recipe.base is not None else ""
    return below + "\n".join(rows) + f"\n\nLayers are counted from 0. {outside}"


def _used(facts: Mapping[str, Any], shown: Shown) -> str:
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
            value = as_code(shown(value))
        lines.append(f"P of {as_code(shown(one['model']))}: {value}, {origins[one['from']]}")
    return "".join(f"\n{line}\n" for line in lines)


def recipe_as_written(recipe: Recipe) -> dict[str, Any]:
    """The recipe without what is at its default."""
    written = recipe.to_dict(exclude_defaults=True)
    if recipe.tokenizer is not None and written["tokenizer"].keys() <= {"source"}:
        written["tokenizer"] = recipe.tokenizer.source
    return written


def _row(part: Base | Model, read: CurvatureInput | None, shown: Shown, known: Mapping[str, Published]) -> str:
    weight = "" if part.weight is None else as_text(in_words(part.weight))
    model = as_code(shown(part.model))
    if part.adapter is not None:
        model += f" with {as_code(shown(part.adapter))}"
    elif (found := known.get(part.model)) is not None and found.hub_id is None and found.origins:
        model += f", made from {', '.join(map(as_code, found.origins))}"
    return f"{model} | {weight} | {_curvature(part, read, shown)}"


def _curvature(part: Base | Model, read: CurvatureInput | None, shown: Shown) -> str:
    """The curvature that a model went in with, also where the recipe names none and its folder has some."""
    named = part.curvature
    if isinstance(named, Identity):
        return f"{named.identity:g} · I"
    facts = ""
    if read is not None and read.file is not None:
        likelihood = f", {as_text(read.likelihood)}" if read.likelihood else ""
        facts = f" ({read.kind}{likelihood}, {read.examples:,} examples)"
    if named is not None:
        return as_code(shown(named)) + facts
    return f"its own `curvature`{facts}" if facts else ""
