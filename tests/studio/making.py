"""A recipe so small that a page of it answers at once, with names that would run if they were not shown as text."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ..tasks.making import sentences, tiny_bert_checkpoint, write_jsonl

#: The name of a model's folder.
HOSTILE = "<img src=x onerror=alert(1)>"
LABELS = {0: "<b onmouseover=alert(1)>good</b>", 1: "{{bad}} ${alert(1)}"}
TEXT = "<script>alert(1)</script> good"


def predicted(model: Path, texts: list[str]) -> list[int]:
    """What a saved model says, by transformers alone."""
    loaded, tokenizer = AutoModelForSequenceClassification.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        return [int(loaded(**tokenizer(text, return_tensors="pt")).logits.argmax()) for text in texts]


def tiny_recipe(folder: Path, *models: str, count: int = 40) -> Path:
    """A base and some models, merged with weight 0; rows of a model are labelled as it labels them itself."""
    config = {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}
    for seed, name in enumerate(("base", *models)):
        place = tiny_bert_checkpoint(folder / name, seed=seed, **config)
        texts = [TEXT, *sentences(count - 1, seed)]
        rows = [{"text": text, "label": label} for text, label in zip(texts, predicted(place, texts), strict=True)]
        if name.isalpha():
            write_jsonl(folder / f"{name}.jsonl", rows)
    recipe = {
        "method": "task-arithmetic",
        "base": "./base",
        "models": [{"model": f"./{name}", "weight": 0.0} for name in models],
    }
    (folder / "recipe.yml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yml"
