"""Text to text: every token of a target from its source and the target's tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..curvature.losses import LOSSES, ExampleLoss
from .tokens import Prompt, Tokens


class PairExamples(Tokens):
    """Sources and targets. Both are cut to the same length."""

    output: ExampleLoss = LOSSES["tokens"]

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        sources, targets = [], []
        for index in indices:
            sources.append(self.encode(index, self.rows.text(index, self.fields["source"]))["input_ids"])
            target = self.rows.text(index, self.fields["target"])
            targets.append(self.encode(index, text_target=target)["input_ids"])
            self.check(index, [*sources[-1], *targets[-1]])
        return self.batch_of(sources, targets)

    def prompt(self, index: int, room: int | None = None) -> Prompt:
        """The source of a row, cut to ``max_length``, and its target; what is written takes no room from it."""
        source = self.rows.text(index, self.fields["source"])
        ids = self.encode(index, source)["input_ids"]
        self.check(index, ids)
        return Prompt(source, ids, self.rows.text(index, self.fields["target"]))
