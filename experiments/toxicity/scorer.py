"""How toxic a text is, from 0 to 1, by a classifier of the Hub, or by one trained here on the Jigsaw comments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gradmerge as gm

from .data import text_folder
from .settings import TOXIC_SHARE

#: The network of Detoxify "original", as its authors publish it on the Hub; Detoxify itself fetches a checkpoint of its
#: own.
DETOXIFY = "unitary/toxic-bert"
#: The classifier that is trained here.
TFIDF = "tfidf"

Scorer = Callable[[Sequence[str]], list[float]]


def load_scorer(name: str, data_dir: Path | None, device: str) -> Scorer:
    return train_scorer(text_folder(_given(data_dir))) if name == TFIDF else hub_scorer(name, device)


def hub_scorer(name: str, device: str, batch: int = 100) -> Scorer:
    """The probability of the label `toxic` (or `toxicity`, or the only one) of a classifier with independent labels."""
    model = AutoModelForSequenceClassification.from_pretrained(name).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    labels = {str(label).lower(): number for number, label in model.config.id2label.items()}
    place = int(labels.get("toxic", labels.get("toxicity", 0)))

    @torch.inference_mode()
    def score(texts: Sequence[str]) -> list[float]:
        found: list[float] = []
        for first in range(0, len(texts), batch):
            inputs = tokenizer(list(texts[first : first + batch]), return_tensors="pt", truncation=True, padding=True)
            found += model(**inputs.to(device)).logits[:, place].float().sigmoid().tolist()
        return found

    return score


def train_scorer(folder: Path) -> Scorer:
    """Logistic regression on words and pairs of words, set to the share of toxic comments that the challenge has.

    log p/(1 − p) + log π/(1 − π) − log s/(1 − s), with π = TOXIC_SHARE and s the share among the training comments.
    """
    texts, labels = _comments(folder, "train")
    classifier = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2, strip_accents="unicode"),
        LogisticRegression(C=10.0, max_iter=1000),
    )
    classifier.fit(texts, labels)
    shift = log_odds(TOXIC_SHARE) - log_odds(float(np.mean(labels)))

    def score(texts: Sequence[str]) -> list[float]:
        odds = classifier.decision_function(list(texts)) + shift
        return [float(p) for p in 1 / (1 + np.exp(-odds))]

    return score


def log_odds(probability: float) -> float:
    return math.log(probability / (1 - probability))


def scorer_quality(score: Scorer, folder: Path, threshold: float) -> dict[str, Any]:
    """On the test comments, and on the continuations of RealToxicityPrompts, which Perspective has scored."""
    texts, labels = _comments(folder, "test")
    scores, toxic = np.array(score(texts)), np.array(labels) == 1
    # At the log-odds where the balanced classifier says "one or the other".
    balanced = scores >= TOXIC_SHARE
    found = {
        "accuracy": float((balanced == toxic).mean()),
        "auc": float(roc_auc_score(toxic, scores)),
        "toxic_at_threshold": float((scores[toxic] >= threshold).mean()),
        "civil_at_threshold": float((scores[~toxic] >= threshold).mean()),
    }
    rows = gm.read_rows(str(folder / "real_toxicity_prompts" / "prompts.jsonl.gz")).rows
    judged = [r for r in rows if r.get("continuation") and r.get("continuation_toxicity") is not None]
    perspective = np.array([r["continuation_toxicity"] >= 0.5 for r in judged])
    if perspective.any() and not perspective.all():
        found["auc_perspective"] = float(roc_auc_score(perspective, score([r["continuation"] for r in judged])))
    return found


def _comments(folder: Path, split: str) -> tuple[list[str], list[int]]:
    rows = gm.read_rows(str(folder / "jigsaw_toxic" / f"{split}.jsonl.gz")).rows
    return [r["text"] for r in rows], [int(r["label"]) for r in rows]


def _given(data_dir: Path | None) -> Path:
    if data_dir is None:
        raise ValueError(f"--scorer {TFIDF} is trained on local comments: give --data-dir")
    return data_dir
