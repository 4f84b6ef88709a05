"""Metrics of generated texts against references.

- `exact_match`: 1 if answer and reference are the same, except for case, white space, how characters are composed
  (Unicode NFKC), and stops, commas, quotation marks and brackets at both ends. A minus or % counts.
- `rouge1`, `rouge2`, `rougeL`: F-measures of ROUGE, without stemming (rouge-score), from 0 to 1.
- `bleu`, `chrf`: of the corpus, by sacrebleu with its defaults, from 0 to 100. They are not means over rows. Each row
  gets the corpus' score plus (n − 1) times what the score falls without the row, so that the standard error is the
  jackknife's.
"""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import SINGLE, Processes
from ..errors import InputError
from ..text import nearest
from .generation import Advance, generate, prompts
from .loading import LoadedTask

#: Characters that do not count at the ends of a text.
_PUNCTUATION = " .,;:!?…\"'`“”„‘’«»()[]{}"
#: Metric → the package that computes it.
_PACKAGES = {"rouge": "rouge_score", "bleu": "sacrebleu", "chrf": "sacrebleu"}


@dataclass(frozen=True)
class Generation:
    """Generate answers, greedily, and score them.

    Args:
        metrics: Some of `exact-match`, `rouge`, `bleu` and `chrf`; by default the first. The others need
            ``pip install 'gradmerge[metrics]'``.
        max_new_tokens: The maximum number of new tokens; by default 64, or what the model has positions for.

    >>> Generation(metrics=["exact-match", "rouge"])
    Generation(metrics=('exact-match', 'rouge'), max_new_tokens=None)
    """

    metrics: Sequence[str] = ()
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        metrics = [self.metrics] if isinstance(self.metrics, str) else self.metrics
        names = [part.strip() for text in metrics for part in text.replace("_", "-").split(",")]
        for name in names:
            if name not in TEXT_METRICS:
                hint = f"{nearest(name, TEXT_METRICS)}\n  Known are {', '.join(TEXT_METRICS)}."
                raise InputError(f"metrics={name}: not known for generated text{hint}")
            package = _PACKAGES.get(name, "torch")
            if importlib.util.find_spec(package) is None:
                raise InputError(f"metrics={name}: {package} is not installed: pip install 'gradmerge[metrics]'")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        object.__setattr__(self, "metrics", tuple(dict.fromkeys(names)) or ("exact-match",))


def generation_rows(
    loaded: LoadedTask,
    model: nn.Module,
    generation: Generation,
    advance: Advance | None = None,
    processes: Processes = SINGLE,
) -> dict[str, Tensor]:
    """Generate an answer to every row of the data, and score it. Return metric → one number per row.

    The mean over rows is the metric. Each process generates the answers to its share of the rows; the first scores all.
    """
    row_prompts = prompts(loaded, range(loaded.examples))
    for row, prompt in enumerate(row_prompts):
        if prompt.reference is None:
            data: Any = loaded.data
            raise data.rows.error(
                row,
                "has no answer. Generated text is compared with the completion of a prompt, the assistant's last "
                "message, or a target",
            )
    own_rows = processes.share(loaded.examples)
    own_answers = generate(loaded, model, own_rows, generation.max_new_tokens, advance=advance)
    answers = [answer for part in processes.all_gather(own_answers) for answer in part]
    scores: dict[str, list[float]] = {}
    if processes.is_first:
        references = [prompt.reference or "" for prompt in row_prompts]
        scores = {name: rows.tolist() for name, rows in score_texts(answers, references, generation).items()}
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in processes.all_gather(scores)[0].items()}


def score_texts(answers: Sequence[str], references: Sequence[str], generation: Generation) -> dict[str, Tensor]:
    """Return metric → one number per answer, whose mean is the metric."""
    scores: dict[str, Sequence[float]] = {}
    for name in generation.metrics:
        scores |= TEXT_METRICS[name](answers, references)
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in scores.items()}


def normalize(text: str) -> str:
    """Return a text as exact match compares it."""
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return words.strip(_PUNCTUATION) or words


def _exact_match(answers: Sequence[str], references: Sequence[str]) -> dict[str, Sequence[float]]:
    pairs = zip(answers, references, strict=True)
    return {"exact_match": [float(normalize(answer) == normalize(reference)) for answer, reference in pairs]}


def _rouge(answers: Sequence[str], references: Sequence[str]) -> dict[str, Sequence[float]]:
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names)
    scores = [scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True)]
    return {name: [score[name].fmeasure for score in scores] for name in names}


def _corpus_rows(metric: Any, answers: Sequence[str], references: Sequence[str]) -> Sequence[float]:
    """Score a corpus with sacrebleu, as one number per row whose standard error is the jackknife's."""
    # Counts of every row, which add up: the corpus without a row is scored without counting again.
    counts = torch.tensor(metric._extract_corpus_statistics(list(answers), [list(references)]), dtype=torch.float64)

    def score(statistics: Tensor) -> float:
        value = float(metric._compute_score_from_stats(statistics.long().tolist()).score)
        return round(value, 10)  # 100, not 100.00000000000004

    total = counts.sum(0)
    without = torch.tensor([score(total - row) for row in counts], dtype=torch.float64)
    rows: list[float] = (score(total) + (len(without) - 1) * (without.mean() - without)).tolist()
    return rows


def _bleu(answers: Sequence[str], references: Sequence[str]) -> dict[str, Sequence[float]]:
    from sacrebleu import BLEU

    return {"bleu": _corpus_rows(BLEU(force=True), answers, references)}


def _chrf(answers: Sequence[str], references: Sequence[str]) -> dict[str, Sequence[float]]:
    from sacrebleu import CHRF

    return {"chrf": _corpus_rows(CHRF(), answers, references)}


#: The names of `--metrics`.
TEXT_METRICS: Mapping[str, Callable[[Sequence[str], Sequence[str]], dict[str, Sequence[float]]]] = {
    "exact-match": _exact_match,
    "rouge": _rouge,
    "bleu": _bleu,
    "chrf": _chrf,
}
