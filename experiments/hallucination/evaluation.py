"""A model on turns: the likelihood of the true responses, and responses of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..common.data import IGNORED, Collate
from ..common.training import half_precision


class Likelihood:
    """The true responses of some turns under a model, given their own knowledge and given a swapped one.

    All are means over tokens, in nats, and None where not finite: ``nll`` of −ln p(token | own knowledge);
    ``grounding``, what the model takes from the knowledge, of ln p(token | own knowledge) − ln p(token | swapped
    knowledge); ``divergence`` of KL(target ‖ model) given their own knowledge.
    """

    def __init__(
        self, own: Sequence[Any], swapped: Sequence[Any], collate: Collate, batch: int, target: PreTrainedModel | None
    ) -> None:
        self._own, self._swapped = (_batches(rows, collate, batch) for rows in (own, swapped))
        self._target = target

    @torch.inference_mode()
    def __call__(self, model: PreTrainedModel) -> dict[str, float | None]:
        nll, tokens, divergence = self._sums(model, self._own, self._target)
        other, _, _ = self._sums(model, self._swapped, None)
        found: dict[str, float | None] = {"nll": _finite(nll / tokens), "grounding": _finite((other - nll) / tokens)}
        return found if self._target is None else {**found, "divergence": _finite(divergence / tokens)}

    @torch.inference_mode()
    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """Nats per token: the loss given their own knowledge (`kept`) and a swapped one (`forget`), and of both KL."""
        found: dict[str, float] = {}
        for name, batches in (("kept", self._own), ("forget", self._swapped)):
            nll, tokens, divergence = self._sums(model, batches, self._target)
            found[name] = nll / tokens
            if self._target is not None:
                found[f"kl_{name}"] = divergence / tokens
        return found

    @staticmethod
    def _sums(
        model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], target: PreTrainedModel | None
    ) -> tuple[float, int, float]:
        nll, divergence = (torch.zeros((), dtype=torch.float64, device=model.device) for _ in range(2))
        tokens = 0
        for batch in batches:
            batch = {name: value.to(model.device) for name, value in batch.items()}
            kept = batch["labels"] != IGNORED
            with half_precision(model.device):
                scores = model(**batch).logits[kept].float().log_softmax(-1)
                theirs = None if target is None else target(**batch).logits[kept].float().log_softmax(-1)
            nll -= scores.gather(1, batch["labels"][kept][:, None]).sum(dtype=torch.float64)
            if theirs is not None:
                divergence += (theirs.exp() * (theirs - scores)).sum(dtype=torch.float64)
            tokens += int(kept.sum())
        return float(nll), tokens, float(divergence)


def perplexity(nll: float | None) -> float:
    """exp of the mean negative log-likelihood of a token; infinite where there is none or it is beyond all numbers."""
    return math.exp(nll) if nll is not None and nll < 700 else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _batches(rows: Sequence[Any], collate: Collate, size: int) -> list[dict[str, Tensor]]:
    """Rows of like length together, so that there is little padding; sums do not depend on the order."""
    ordered = sorted(rows, key=lambda row: len(row["input_ids"]) + len(row["labels"]))
    return [collate(ordered[start : start + size]) for start in range(0, len(ordered), size)]


@torch.inference_mode()
def respond(
    model: PreTrainedModel, rows: Sequence[Any], tokenizer: Any, collate: Collate, *, batch: int, **how: Any
) -> list[str]:
    """A response to every row, in their order, by greedy or beam search (``how`` is for transformers' generate)."""
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]["input_ids"]))
    responses = [""] * len(rows)
    for start in range(0, len(order), batch):
        places = order[start : start + batch]
        inputs = collate([rows[place] for place in places])
        with half_precision(model.device):
            tokens = model.generate(
                input_ids=inputs["input_ids"].to(model.device),
                attention_mask=inputs["attention_mask"].to(model.device),
                do_sample=False,
                **how,
            )
        for place, text in zip(places, tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True):
            responses[place] = text.strip()
    return responses
