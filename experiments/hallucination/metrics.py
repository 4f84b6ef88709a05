"""How fluent and how faithful responses are, from their text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from sacrebleu.metrics.bleu import BLEU
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from .data import Turn

_WORDS = """
a about above after again against all also am an and any are aren as at be because been before being below between
both but by can could couldn d did didn do does doesn doing don down during each even ever few for from further had
hadn has hasn have haven having he her here hers herself him himself his how i if in into is isn it its itself just
let like ll m ma may me might more most much my myself no nor not now o of off oh ok on once only or other our ours
ourselves out over own re really s same she should so some such t than that the their theirs them themselves then
there these they this those through to too under until up us ve very was wasn we well were weren what when where which
while who whom why will with won would wouldn y yeah yes you your yours yourself yourselves
"""
#: Words that say nothing about a topic.
STOP_WORDS = frozenset(_WORDS.split())


def content_words(text: str) -> list[str]:
    """Lower-case words of a text that are no stop words."""
    return [word for word in re.findall(r"\w+", text.lower()) if word not in STOP_WORDS]


def text_metrics(turns: Sequence[Turn], responses: Sequence[str]) -> dict[str, float]:
    """BLEU, and how much of the responses is in the knowledge.

    ``hallucination`` = 100 · (1 − found / all), over the content words of all responses together: found are those that
    the knowledge of their turn has. ``knowledge_f1`` is the mean over turns of 100 · F1 between the content words of
    response and knowledge. ``words`` is the mean number of words in a response.
    """
    found = total = 0
    f1 = 0.0
    for turn, response in zip(turns, responses, strict=True):
        said, known = content_words(response), content_words(turn.knowledge)
        known_words = set(known)
        found += sum(word in known_words for word in said)
        total += len(said)
        shared = sum((Counter(said) & Counter(known)).values())
        f1 += 2 * shared / (len(said) + len(known)) if shared else 0.0
    return {
        "bleu": BLEU().corpus_score(list(responses), [[turn.response for turn in turns]]).score,
        "hallucination": 100 * (1 - found / total) if total else 100.0,
        "knowledge_f1": 100 * f1 / len(turns),
        "words": sum(len(response.split()) for response in responses) / len(turns),
    }


class Critic:
    """A classifier of (knowledge, response) that tells responses which the knowledge does not support."""

    def __init__(self, name: str, device: str, batch: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(name)
        self._model = AutoModelForSequenceClassification.from_pretrained(name).to(device).eval()
        self._batch = batch
        self._unfaithful = unfaithful_label(self._model.config.id2label)

    @torch.inference_mode()
    def __call__(self, turns: Sequence[Turn], responses: Sequence[str]) -> float:
        """The share of the responses that are not faithful, in per cent."""
        found = 0
        longest = min(512, self._tokenizer.model_max_length)
        for start in range(0, len(turns), self._batch):
            known = [turn.knowledge for turn in turns[start : start + self._batch]]
            said = list(responses[start : start + self._batch])
            how = {"padding": True, "truncation": True, "max_length": longest}
            inputs = self._tokenizer(known, said, return_tensors="pt", **how)
            logits = self._model(**inputs.to(self._model.device)).logits
            found += int((logits.argmax(-1) == self._unfaithful).sum())
        return 100 * found / len(turns)


def unfaithful_label(names: dict[int, Any]) -> int:
    """The class that means hallucination: by its name, or 1, as the FaithDial critic is used."""
    for label, name in names.items():
        if re.search("hallucin|unfaithful|not.?entail|non.?entail", str(name).lower()):
            return label
    for label, name in names.items():
        if re.search("entail|faithful", str(name).lower()) and len(names) == 2:
            return 1 - label
    return 1
