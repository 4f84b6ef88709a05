"""What a model is for, as the Hub names it, and the lines that load it: both from the files of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.open import PIPELINE
from ..checkpoints.sidecars import library_of
from ..io.small_files import readable_json
from ..markdown import as_block

#: Ends of the names of architectures → `pipeline_tag` of the Hub, and the class of transformers that opens them.
TASKS = {
    "ForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
    "ForTokenClassification": ("token-classification", "AutoModelForTokenClassification"),
    "ForQuestionAnswering": ("question-answering", "AutoModelForQuestionAnswering"),
    "ForMultipleChoice": ("multiple-choice", "AutoModelForMultipleChoice"),
    "ForMaskedLM": ("fill-mask", "AutoModelForMaskedLM"),
    "ForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "LMHeadModel": ("text-generation", "AutoModelForCausalLM"),
    "ForImageClassification": ("image-classification", "AutoModelForImageClassification"),
    "ForObjectDetection": ("object-detection", "AutoModelForObjectDetection"),
    "ForSemanticSegmentation": ("image-segmentation", "AutoModelForSemanticSegmentation"),
    "ForAudioClassification": ("audio-classification", "AutoModelForAudioClassification"),
    "ForSpeechSeq2Seq": ("automatic-speech-recognition", "AutoModelForSpeechSeq2Seq"),
    "ForCTC": ("automatic-speech-recognition", "AutoModelForCTC"),
    # The Hub counts text to text among text generation.
    "ForConditionalGeneration": ("text-generation", "AutoModelForSeq2SeqLM"),
}
#: The same for diffusers, by parts of the pipeline's name; the first that fits.
DIFFUSION = {
    "Img2Img": "image-to-image",
    "Inpaint": "image-to-image",
    "Upscale": "image-to-image",
    "Video": "text-to-video",
    "DDPM": "unconditional-image-generation",
    "DDIM": "unconditional-image-generation",
    "": "text-to-image",
}
#: An input for a pipeline of transformers.
INPUTS = {
    "text-classification": '"A sentence."',
    "token-classification": '"A sentence."',
    "text-generation": '"A sentence", max_new_tokens=20',
}


def pipeline_tag(folder: Path | None) -> str | None:
    """What a model is for, by its architecture; None where that does not tell."""
    if folder is None:
        return None
    library = library_of(folder)
    if library == "diffusers":
        name = str((readable_json(folder / PIPELINE) or {}).get("_class_name", ""))
        return next(tag for part, tag in DIFFUSION.items() if part in name) if name else None
    if library in ("sentence-transformers", "timm"):
        return "sentence-similarity" if library == "sentence-transformers" else "image-classification"
    return _transformers(readable_json(folder / "config.json") or {})[0]


def usage(folder: Path, name: str, base: tuple[str, Mapping[str, Any]] | None = None) -> str:
    """The section of a card that says how to load the model of a folder; empty where that cannot be told.

    Args:
        folder: The finished model, or the finished adapter.
        name: What it is called; `gradmerge push` puts its id there.
        base: Of an adapter: its base's Hub id, or else the name of its folder, and its config.
    """
    lines = _adapter(base) if base is not None else _model(folder)
    if not lines:
        return ""
    # timm opens folders, and repositories of the Hub, by prefixes.
    where = f"name = {json.dumps(f'local-dir:{name}' if 'import timm' in lines else name)}"
    imports = [line for line in lines if line.startswith(("from ", "import "))]
    rest = [line for line in lines if line not in imports]
    return "\n## Usage\n\n" + as_block("python", "\n".join([*imports, "", where, *rest])) + "\n"


def _model(folder: Path) -> list[str]:
    library = library_of(folder)
    if library == "diffusers":
        whole = (folder / PIPELINE).is_file()
        kind = "DiffusionPipeline" if whole else "AutoModel"
        return [f"from diffusers import {kind}", f"{'pipe' if whole else 'model'} = {kind}.from_pretrained(name)"]
    if library == "sentence-transformers":
        return [
            "from sentence_transformers import SentenceTransformer",
            "model = SentenceTransformer(name)",
            'print(model.encode(["A sentence.", "Another one."]).shape)',
        ]
    if library == "timm":
        return ["import timm", "model = timm.create_model(name, pretrained=True)"]
    if library is None:
        return ["from gradmerge import open_checkpoint", "model = open_checkpoint(name)", "print(list(model.tensors))"]
    config = readable_json(folder / "config.json") or {}
    tag, kind = _transformers(config)
    text = any((folder / file).is_file() for file in ("tokenizer_config.json", "tokenizer.json"))
    if tag in INPUTS and text and kind != "AutoModelForSeq2SeqLM":
        return [
            "from transformers import pipeline",
            f'pipe = pipeline("{tag}", model=name)',
            f"print(pipe({INPUTS[tag]}))",
        ]
    beside = [("tokenizer", "AutoTokenizer")] * text
    beside += [("processor", "AutoImageProcessor")] * (folder / "preprocessor_config.json").is_file()
    classes = ", ".join(sorted([kind, *(one for _, one in beside)]))
    loads = [f"{what} = {one}.from_pretrained(name)" for what, one in [("model", kind), *beside]]
    if kind == "AutoModelForSeq2SeqLM" and text:
        loads += [
            'tokens = model.generate(**tokenizer("A sentence.", return_tensors="pt"), max_new_tokens=20)',
            "print(tokenizer.decode(tokens[0], skip_special_tokens=True))",
        ]
    return [f"from transformers import {classes}", *loads]


def _adapter(base: tuple[str, Mapping[str, Any]]) -> list[str]:
    kind = _transformers(base[1])[1]
    return [
        "from peft import PeftModel",
        f"from transformers import {kind}",
        f"base = {kind}.from_pretrained({json.dumps(base[0])})",
        "model = PeftModel.from_pretrained(base, name)",
    ]


def _transformers(config: Mapping[str, Any]) -> tuple[str | None, str]:
    """The tag of an architecture, and the class that opens it."""
    stated = config.get("architectures")
    name = str(stated[0]) if isinstance(stated, list) and stated else ""
    found = next((what for end, what in TASKS.items() if name.endswith(end)), (None, "AutoModel"))
    if name.endswith("ForConditionalGeneration") and "vision_config" in config:
        return "image-text-to-text", "AutoModelForImageTextToText"
    if name.endswith("ForConditionalGeneration") and config.get("model_type") in ("whisper", "speech_to_text"):
        return TASKS["ForSpeechSeq2Seq"]
    return found
