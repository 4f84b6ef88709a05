"""Model cards: README.md with metadata for the Hub, code that loads the result, and evaluation results.

The same inputs give the same text. Names from untrusted sources stay text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .. import __version__
from ..checkpoints.sidecars import library_of
from ..errors import InputError
from ..io.small_files import readable_json
from ..recipe import Recipe
from ..text import first_line, one_line
from ..urls import is_url
from ..yaml import to_yaml
from .metadata import CARD, ModelMetadata, license_notes, name_of, short_names

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

#: How the name of an architecture ends → its `pipeline_tag`.
TASKS = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "ForImageTextToText": "image-text-to-text",
    "ForImageClassification": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSemanticSegmentation": "image-segmentation",
    "ForAudioClassification": "audio-classification",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
    "ForCTC": "automatic-speech-recognition",
    "ForSeq2SeqLM": "text-generation",
}
#: Other libraries than transformers → their `pipeline_tag`, imports, and code that loads a model. None: only tensors.
LIBRARIES = {
    None: (None, "from gradmerge import open_checkpoint", "print(list(open_checkpoint(name).tensors))"),
    "timm": ("image-classification", "import timm", "model = timm.create_model(name, pretrained=True)"),
    "sentence-transformers": (
        "sentence-similarity",
        "from sentence_transformers import SentenceTransformer",
        "model = SentenceTransformer(name)",
    ),
}
_BEGIN, _END = "<!-- gradmerge: evaluations -->", "<!-- end of evaluations -->"
_SECTION = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.S)
#: Metrics that have another name on the Hub.
METRICS = {"macro_f1": "f1", "micro_f1": "f1", "pearson_r": "pearsonr", "spearman_r": "spearmanr", "r2": "r_squared"}


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

    licenses = {model.license for model in models}
    terms: dict[str, Any] = {"license": license} if license else dict(licenses.pop()) if len(licenses) == 1 else {}
    ids = list(dict.fromkeys(id for model in (models if base is None else [base]) for id in model.ids))
    task = pipeline_tag(folder if base is None else base_folder)
    data = ModelCardData(
        base_model=ids or None,
        base_model_relation=("adapter" if base else relation) if ids else None,
        library_name=library_of(folder) if base is None else "peft",
        pipeline_tag=next((model.pipeline_tag for model in models if model.pipeline_tag), task),
        tags=["gradmerge", *tags, *(["lora"] if base else [])],
        **terms,
    )
    code = usage(folder, name) if base is None else adapter_usage(name, next(iter(base.ids), base.name), base_folder)
    card = render_card(
        data,
        as_text(name),
        text,
        license="".join(map(as_text, license_notes(models, license))),
        usage=as_block("python", code),
        evaluations=f"{_BEGIN}\n{_END}",
        recipe=as_block("yaml", recipe) if recipe else "",
    )
    (folder / CARD).write_text(card, "utf-8")


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


# What a recipe says


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
    texts = [text for part in parts for text in (part.model, part.adapter, part.curvature) if isinstance(text, str)]
    names = short_names(texts, recipe.folder)
    return lambda text: names[text] if text in names else name_of(text, recipe.folder)


def _without_paths(value: Any, shorten: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(item, shorten) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item, shorten) for item in value]
    is_path = isinstance(value, str) and (value.startswith(("/", "~")) or (is_url(value) and value[:5] != "hf://"))
    return shorten(value) if is_path else value


# The task of a model, and code that loads it


def pipeline_tag(folder: Path | None) -> str | None:
    """Return the Hub's name of a model's task, or None if the files do not say."""
    if folder is None:
        return None
    library = library_of(folder)
    return LIBRARIES[library][0] if library in LIBRARIES else TASKS.get(_head(folder))


def usage(folder: Path, name: str) -> str:
    """Return Python code that loads the model of a folder. `gradmerge push` replaces ``name`` by the Hub id."""
    library = library_of(folder)
    if library in LIBRARIES:
        return _code(f"local-dir:{name}" if library == "timm" else name, *LIBRARIES[library][1:])
    loader = f"AutoModel{_head(folder)}"
    return _code(name, f"from transformers import {loader}", f"model = {loader}.from_pretrained(name)")


def adapter_usage(name: str, base: str, base_folder: Path | None) -> str:
    """Return Python code that loads a LoRA adapter on top of ``base``, a Hub id or folder."""
    loader = f"AutoModel{'' if base_folder is None else _head(base_folder)}"
    imports = f"from peft import PeftModel\nfrom transformers import {loader}"
    load = f"base = {loader}.from_pretrained({json.dumps(base)})\nmodel = PeftModel.from_pretrained(base, name)"
    return _code(name, imports, load)


def _code(name: str, imports: str | None, load: str | None) -> str:
    return f"{imports}\n\nname = {json.dumps(name)}\n{load}"


def _head(folder: Path) -> str:
    """Return the suffix of the `AutoModel` class for an architecture; empty for a model without a known head."""
    config = readable_json(folder / "config.json") or {}
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if name.endswith("ForConditionalGeneration"):
        speech = config.get("model_type") in ("whisper", "speech_to_text")
        return "ForImageTextToText" if "vision_config" in config else "ForSpeechSeq2Seq" if speech else "ForSeq2SeqLM"
    name = name.replace("LMHeadModel", "ForCausalLM")
    return next((head for head in TASKS if name.endswith(head)), "")


# Evaluation results: `model-index` in the metadata, and a table with standard errors and number of rows


def evaluation(data: str, dataset: Mapping[str, str], numbers: Mapping[str, Any], how: str = "") -> dict[str, Any]:
    """Return an entry of `evaluations` in a record.

    Args:
        data: The data, without the path.
        dataset: `type` (Hub id or name), `name`, and `split` and `config` if there are any.
        numbers: The result of `gradmerge evaluate`.
        how: What else a reader should know about the rows.
    """
    metrics = {name: x for name, x in numbers.items() if name not in ("tokens", "examples") and _is_finite(x)}
    errors = numbers.get("standard_errors") or {}
    return {
        "data": data,
        "dataset": dict(dataset),
        "task": str(numbers.get("task", "")),
        "rows": numbers.get("examples"),
        "metrics": metrics,
        "standard_errors": {name: x for name, x in errors.items() if name in metrics and _is_finite(x)},
        **({"how": how} if how else {}),
    }


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def with_evaluations(card: str, name: str, evaluations: Sequence[Mapping[str, Any]], where: str = "README.md") -> str:
    """Return a card with these evaluations. Its other text, and results on other data, stay."""
    from huggingface_hub import ModelCard

    try:
        parsed = ModelCard(card if card.startswith("---") else f"---\n\n---\n\n{card}")
        data: Any = parsed.data
        earlier: list[EvalResult] = data.eval_results or []
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{where}: its front matter cannot be read: {first_line(error)}") from error
    new = [result for item in evaluations for result in _eval_results(item, data.pipeline_tag)]
    replaced = {(result.dataset_type, result.dataset_config, result.dataset_split) for result in new}
    kept = [x for x in earlier if (x.dataset_type, x.dataset_config, x.dataset_split) not in replaced]
    if kept or new:
        data.eval_results = kept + new
        data.model_name = data.model_name or one_line(name)
    section = f"{_BEGIN}\n\n## Evaluation\n\n{_table(evaluations)}\n\n{_END}"
    if _SECTION.search(parsed.text):
        parsed.text = _SECTION.sub(lambda _: section, parsed.text, count=1)
    else:
        parsed.text = f"{parsed.text.rstrip()}\n\n{section}\n"
    return str(parsed)


def _eval_results(evaluation: Mapping[str, Any], pipeline_tag: str | None) -> list[EvalResult]:
    from huggingface_hub import EvalResult

    dataset = evaluation["dataset"]
    return [
        EvalResult(
            task_type=pipeline_tag or "other",
            dataset_type=dataset["type"],
            dataset_name=one_line(dataset["name"]),
            dataset_config=dataset.get("config"),
            dataset_split=dataset.get("split"),
            metric_type=METRICS.get(metric, metric),
            metric_name=metric,
            metric_value=float(f"{value:.6g}"),
        )
        for metric, value in evaluation["metrics"].items()
    ]


def _table(evaluations: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            as_code(item["data"]),
            "" if item["rows"] is None else f"{item['rows']:,}",
            as_code(metric),
            f"{value:.5g}",
            f"{item['standard_errors'][metric]:.2g}" if metric in item["standard_errors"] else "",
        ]
        for item in evaluations
        for metric, value in item["metrics"].items()
    ]
    table = markdown_table(["data", "rows", "metric", "value", "standard error"], rows)
    notes = [f"\n\n{as_code(item['data'])}: {one_line(item['how'])}." for item in evaluations if item.get("how")]
    return table + "".join(notes)


# Markdown


def as_code(text: str) -> str:
    """Return a name as inline code that fits a cell of a table."""
    text = one_line(text).replace("|", "\\|")
    if "`" not in text:
        return f"`{text}`"
    fence = "`" * (_longest_run(text) + 1)
    return f"{fence} {text} {fence}"


def as_text(text: str) -> str:
    """Return a name as plain text: no character in it is markup."""
    return re.sub(r"([\\`*\[\]<>&!|~$])", r"\\\1", one_line(text))


def as_block(language: str, text: str) -> str:
    """Return a block of code whose fence is longer than any in the text."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; its cells are Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
