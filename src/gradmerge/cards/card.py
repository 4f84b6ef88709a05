"""Write the model card of a result: README.md with metadata for the Hub. The same inputs give the same text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..checkpoints.sidecars import library_of
from ..markdown import as_block, as_code, as_text, markdown_table, to_yaml
from ..recipe import Base, Model, Recipe, in_words
from ..urls import is_url
from .eval_results import PLACEHOLDER
from .metadata import CARD, ModelMetadata, license_notes, name_of, short_names
from .usage import adapter_usage, pipeline_tag, usage

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

TEMPLATE = Path(__file__).with_name("card.md")


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
        code = adapter_usage(name, base.ids[0] if base.ids else base.name, base_folder)
    licenses = {model.license for model in models}
    terms: dict[str, Any] = {"license": license} if license else dict(licenses.pop()) if len(licenses) == 1 else {}
    ids = _unique(model.ids for model in (models if base is None else [base]))
    data = ModelCardData(
        base_model=ids,
        base_model_relation=("adapter" if base else relation) if ids else None,
        language=_unique(model.language for model in models),
        datasets=_unique(model.datasets for model in models),
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


def render_card(data: ModelCardData, title: str, text: str, **sections: str) -> str:
    """Return a card from the template; title, text and sections are Markdown."""
    from huggingface_hub import ModelCard

    return str(ModelCard.from_template(data, template_path=str(TEMPLATE), title=title, text=text, **sections))


def recipe_as_written(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe without defaults."""
    written = recipe.to_dict(exclude_defaults=True)
    if recipe.tokenizer is not None and written["tokenizer"].keys() <= {"source"}:
        written["tokenizer"] = recipe.tokenizer.source
    return written


class MergeText:
    """The text and the recipe in a merge's card, with short names instead of the paths of this machine."""

    def __init__(self, recipe: Recipe, metadata: Mapping[str, ModelMetadata]) -> None:
        """``metadata``: model as the recipe names it → what it states about itself."""
        self._recipe, self._metadata = recipe, metadata
        self._documents = [*recipe.merges.values(), recipe]
        parts = [part for document in self._documents for part in (document.base, *document.sources) if part]
        models = [text for part in parts for text in (part.model, part.adapter) if text is not None]
        ids = {text: metadata[text].hub_id for text in models if text in metadata and "@" not in text}
        self._names = short_names([part.curvature for part in parts if isinstance(part.curvature, str)], recipe.folder)
        self._names |= short_names(models, recipe.folder, ids)

    def text(self, curvature: Sequence[str], settings: Mapping[str, Any]) -> str:
        """Return what was merged, and how.

        Args:
            curvature: What is known about the curvature of the base, if there is one, and of each model.
            settings: `damping` and `penalty` as in the record.
        """
        recipe = self._recipe
        number = len({model.model for model in recipe.sources})
        result = "A LoRA adapter" if recipe.output.format == "adapter" else "A model"
        source = f"{number} fine-tuned {'model' if number == 1 else 'models'}"
        by = f"with **{recipe.rule.name}** by gradmerge {__version__}"
        parts = [f"{result} made from {source} {by}.", f"{recipe.rule.summary}\n({recipe.rule.reference})"]
        if not recipe.slices:
            parts.append(self._table(curvature))
        if settings:
            parts += ["Values that the merge used:", as_block("yaml", to_yaml(self._without_paths(settings)))]
        return "\n\n".join(parts)

    def recipe_yaml(self) -> str:
        """Return the recipe without defaults."""
        documents = [self._without_paths(recipe_as_written(document)) for document in self._documents]
        return "---\n".join(map(to_yaml, documents))

    def _table(self, curvature: Sequence[str]) -> str:
        recipe, rows = self._recipe, []
        parts: list[Base | Model] = [*([recipe.base] if recipe.base else []), *recipe.models]
        for part, facts in zip(parts, curvature, strict=True):
            model = as_code(self._short(part.model))
            known = self._metadata.get(part.model)
            if part.adapter is not None:
                model += f" with {as_code(self._short(part.adapter))}"
            elif known is not None and known.hub_id is None and known.base_models:
                model += f", made from {', '.join(map(as_code, known.base_models))}"
            source = as_code(self._short(part.curvature)) if isinstance(part.curvature, str) else ""
            weight = "" if part.weight is None else as_text(in_words(part.weight))
            role = "base" if part is recipe.base else "fine-tuned"
            rows.append([role, model, weight, f"{source} {as_text(facts)}".strip()])
        return markdown_table(["", "model", "weight", "curvature"], rows)

    def _short(self, reference: str) -> str:
        if reference in self._names:
            return self._names[reference]
        model = next((model for model in self._names if reference.startswith(f"{model}/")), None)
        if model is not None:  # a folder inside a model's folder
            return self._names[model] + reference[len(model) :]
        return name_of(reference, self._recipe.folder)

    def _without_paths(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: self._without_paths(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._without_paths(item) for item in value]
        is_path = isinstance(value, str) and (value.startswith(("/", "~")) or (is_url(value) and value[:5] != "hf://"))
        return self._short(value) if is_path else value
