"""The task of a model as the Hub names it (`pipeline_tag`), and Python code that loads the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.sidecars import library_of
from ..io.small_files import readable_json

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
#: Library → the lines that load a model: imports, and what follows the name. None: no library, only tensors.
LOADERS = {
    None: ("from gradmerge import open_checkpoint", "print(list(open_checkpoint(name).tensors))"),
    "timm": ("import timm", "model = timm.create_model(name, pretrained=True)"),
    "sentence-transformers": (
        "from sentence_transformers import SentenceTransformer",
        "model = SentenceTransformer(name)",
        'print(model.encode(["A sentence.", "Another one."]).shape)',
    ),
}
PREPROCESSING = ("tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")


def pipeline_tag(folder: Path | None) -> str | None:
    """Return the Hub's name of a model's task, or None if the files do not say."""
    library = None if folder is None else library_of(folder)
    if folder is None or library is None:
        return None
    by_library = {"sentence-transformers": "sentence-similarity", "timm": "image-classification"}
    return by_library.get(str(library)) or TASKS.get(_head(_config(folder)))


def usage(folder: Path, name: str) -> str:
    """Return Python code that loads the model of a folder. `gradmerge push` replaces ``name`` by the Hub id."""
    library = library_of(folder)
    if library in LOADERS:
        return _code(f"local-dir:{name}" if library == "timm" else name, *LOADERS[library])
    head, has_files = _head(_config(folder)), any((folder / file).is_file() for file in PREPROCESSING)
    if head in TASKS and has_files and head != "ForSeq2SeqLM":  # pipelines of transformers 5 lack this task
        example = ['print(pipe("A sentence."))'] if TASKS[head].startswith(("text", "token")) else []
        load = f'pipe = pipeline("{TASKS[head]}", model=name)'
        return _code(name, "from transformers import pipeline", load, *example)
    return _code(name, f"from transformers import AutoModel{head}", f"model = AutoModel{head}.from_pretrained(name)")


def adapter_usage(name: str, base: str, base_folder: Path | None) -> str:
    """Return Python code that loads a LoRA adapter on top of ``base``, a Hub id or folder."""
    loader = f"AutoModel{_head({} if base_folder is None else _config(base_folder))}"
    load = [f"base = {loader}.from_pretrained({json.dumps(base)})", "model = PeftModel.from_pretrained(base, name)"]
    return _code(name, f"from peft import PeftModel\nfrom transformers import {loader}", *load)


def _code(name: str, imports: str, *lines: str) -> str:
    return "\n".join([imports, "", f"name = {json.dumps(name)}", *lines])


def _config(folder: Path) -> dict[str, Any]:
    return readable_json(folder / "config.json") or {}


def _head(config: Mapping[str, Any]) -> str:
    """How the name of the `AutoModel` class for an architecture ends; empty for a model without a known head."""
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if name.endswith("ForConditionalGeneration"):
        speech = config.get("model_type") in ("whisper", "speech_to_text")
        return "ForImageTextToText" if "vision_config" in config else "ForSpeechSeq2Seq" if speech else "ForSeq2SeqLM"
    name = name.replace("LMHeadModel", "ForCausalLM")
    return next((head for head in TASKS if name.endswith(head)), "")
