"""Write the model card of a result: README.md with metadata for the Hub. The same inputs give the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..checkpoints.sidecars import library_of
from ..recipe import Recipe
from ..urls import is_url
from ..yaml import to_yaml
from .eval_results import PLACEHOLDER
from .markdown import as_block, as_code, as_text
from .metadata import CARD, ModelMetadata, license_notes, name_of, short_names
from .usage import adapter_usage, pipeline_tag, usage

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData


def write_card(
    folder: Path,
    name: str,
    text: str,
    models: Sequence[ModelMetadata],
    *,
    relation: str,
    tags: Sequence[str],
    base: ModelMetadata | None = None,
    base_folder: Path | None = None,
    license: str | None = None,
    recipe: str = "",
) -> None:
    """Write the card of a finished model or adapter.

    Args:
        folder: The result, with all files but this one.
        name: What the result is called.
        text: What it is, in Markdown.
        models: The models that it was made from.
        relation: How it relates to them: `merge` or `finetune`.
        tags: Tags for the Hub, besides `gradmerge`.
        base: For an adapter, the model that it applies to.
        base_folder: The folder of this model, if there is one.
        license: The license that the user chose; by default the one that all models state.
        recipe: The recipe as YAML.
    """
    from huggingface_hub import ModelCardData

    if base is None:
        task, library, code = pipeline_tag(folder), library_of(folder), usage(folder, name)
    else:
        task, library = pipeline_tag(base_folder), "peft"
        code = adapter_usage(name, next(iter(base.ids), base.name), base_folder)
    licenses = {model.license for model in models}
    terms: dict[str, Any] = {"license": license} if license else dict(licenses.pop()) if len(licenses) == 1 else {}
    ids = _unique(model.ids for model in (models if base is None else [base]))
    data = ModelCardData(
        base_model=ids,
        base_model_relation=("adapter" if base else relation) if ids else None,
        library_name=library,
        pipeline_tag=next((model.pipeline_tag for model in models if model.pipeline_tag), task),
        tags=["gradmerge", *tags, *(["lora"] if base else [])],
        **terms,
    )
    card = render_card(
        data,
        as_text(name),
        text,
        license="".join(map(as_text, license_notes(models, license))),
        usage=as_block("python", code),
        evaluations=PLACEHOLDER,
        recipe=as_block("yaml", recipe) if recipe else "",
    )
    (folder / CARD).write_text(card, "utf-8")


def _unique(values: Iterable[Iterable[str]]) -> list[str] | None:
    return list(dict.fromkeys(value for part in values for value in part)) or None


def render_card(
    data: ModelCardData,
    title: str,
    text: str,
    *,
    license: str = "",
    usage: str = "",
    evaluations: str = "",
    recipe: str = "",
) -> str:
    """Return a card with these sections; all texts are Markdown."""
    more = "`gradmerge.json` in this repository has the full recipe with defaults, the inputs and the versions."
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {title}",
        text,
        license,
        usage and f"## Usage\n\n{usage}",
        evaluations,
        recipe and f"## Recipe\n\n{recipe}\n\n{more}",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def recipe_as_written(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe without defaults."""
    written = recipe.to_dict(exclude_defaults=True)
    if recipe.tokenizer is not None and written["tokenizer"].keys() <= {"source"}:
        written["tokenizer"] = recipe.tokenizer.source
    return written


def merge_text(recipe: Recipe) -> str:
    """Return what a merge's card says about the method and the models."""
    shorten = _shortener(recipe)
    models = ", ".join(as_code(shorten(name)) for name in dict.fromkeys(x.adapter or x.model for x in recipe.sources))
    base = f" and the base {as_code(shorten(recipe.base.model))}" if recipe.base is not None else ""
    return f"""Made from {models}{base} with **{recipe.rule.name}** by gradmerge {__version__}.

{recipe.rule.summary}
({recipe.rule.reference})"""


def recipe_text(recipe: Recipe) -> str:
    """Return the recipe as YAML, without defaults and without the paths of this machine."""
    shorten = _shortener(recipe)
    documents = [recipe_as_written(document) for document in (*recipe.merges.values(), recipe)]
    return "---\n".join(to_yaml(_without_paths(document, shorten)) for document in documents)


def _shortener(recipe: Recipe) -> Callable[[str], str]:
    """Return a function that gives a model or curvature of the recipe its short name, without the path."""
    parts = [part for item in (*recipe.merges.values(), recipe) for part in (item.base, *item.sources) if part]
    names = short_names([part.curvature for part in parts if isinstance(part.curvature, str)], recipe.folder)
    names |= short_names([text for part in parts for text in (part.model, part.adapter) if text], recipe.folder)

    def shorten(text: str) -> str:
        if text in names:
            return names[text]
        model = next((model for model in names if text.startswith(f"{model}/")), None)  # a folder inside a model's
        return name_of(text, recipe.folder) if model is None else names[model] + text[len(model) :]

    return shorten


def _without_paths(value: Any, shorten: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(item, shorten) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, shorten) for item in value]
    is_path = isinstance(value, str) and (value.startswith(("/", "~")) or (is_url(value) and value[:5] != "hf://"))
    return shorten(value) if is_path else value
