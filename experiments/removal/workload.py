"""What both removal tasks share: losses of language models on rows of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..common.data import IGNORED, Collate
from ..common.driver import Run
from ..common.training import half_precision

Rows = Sequence[Mapping[str, Any]]


class Workload(ABC):
    """A task of one seed: its rows, its base and how a model is judged."""

    output: ClassVar[str | None] = None
    """What the model's output means, for ``gm.estimate_curvature``."""
    forget: Rows
    retain: Rows
    held_out: Mapping[str, Mapping[str, Rows]]
    """``validation`` and ``test`` → ``forget`` or a kind of text that is retained → rows."""
    collate: Collate

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.settings, self.seed, self.device = run, run.settings, seed, run.device

    @abstractmethod
    def train_base(self, folder: Path, *, with_forget: bool) -> dict[str, Any]:
        """Train and write the base to ``folder``/model, or the target, in which rows of the forget set do not count."""

    @abstractmethod
    def load(self, folder: Path) -> Any:
        """Return the model of a stage, in eval mode."""

    @abstractmethod
    def judge(self, model: Any) -> dict[str, Any]:
        """Return measures of what the model writes."""

    def measure(self, model: Any, split: str, target: Any = None) -> dict[str, float]:
        """Return nats per token: the losses ``kept`` and ``forget``, and with a target ``kl_kept`` and ``kl_forget``.

        ``kept`` is a mean over the kinds of text that are retained. KL is KL(target ‖ model).
        """
        found = {kind: self.losses(model, rows, target) for kind, rows in self.held_out[split].items()}
        forget = found.pop("forget")
        kept = [sum(values) / len(found) for values in zip(*found.values(), strict=True)]
        losses = {"kept": kept[0], "forget": forget[0]}
        return losses if target is None else losses | {"kl_kept": kept[1], "kl_forget": forget[1]}

    @torch.inference_mode()
    def losses(self, model: Any, rows: Rows, target: Any = None) -> tuple[float, float]:
        """Return the mean loss of the tokens that count, and their mean KL(target ‖ model)."""
        loss, kl, tokens = 0.0, 0.0, 0
        for batch in self.collate.batches(rows, self.settings.methods.batch):
            scores, labels = token_scores(model, batch)
            counts = labels != IGNORED
            scores, labels = scores[counts].log_softmax(-1), labels[counts]
            loss += float(F.nll_loss(scores, labels, reduction="sum").double())
            if target is not None:
                wanted = token_scores(target, batch)[0][counts].log_softmax(-1)
                kl += float(F.kl_div(scores, wanted, reduction="sum", log_target=True).double())
            tokens += len(labels)
        return loss / tokens, kl / tokens


def token_scores(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits of every token in float32, and the tokens, IGNORED where they do not count."""
    batch = {name: value.to(model.device) for name, value in batch.items()}
    with half_precision(model.device):
        logits = model(**batch).logits.float()
    labels = batch["labels"]
    # A decoder predicts the next token.
    return (logits, labels) if model.config.is_encoder_decoder else (logits[:, :-1], labels[:, 1:])


def row_losses(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return −ln p of every row, a sum over the tokens that count."""
    logits, labels = token_scores(model, batch)
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none").sum(1)
