"""Metrics of generated texts against references.

- `exact_match`: 1 where answer and reference are the same but for case, runs of white space, how characters are
  composed (Unicode NFKC), and stops, commas, quotation marks and brackets at both ends. A minus or % counts.
- `rouge1`, `rouge2`, `rougeL`: F-measures of ROUGE, without stemming (rouge-score), from 0 to 1.
- `bleu`, `chrf`: of the corpus, by sacrebleu with its defaults, from 0 to 100. They are no means over rows; each row
  stands for the corpus' score plus (n − 1) times what the score falls when it is left out, so that the standard error
  is the jackknife's.
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

#: What does not count at the ends of a text.
_EDGES = " .,;:!?…\"'`“”„‘’«»()[]{}"
#: The packages that metrics come from.
_NEEDS = {"rouge": "rouge_score", "bleu": "sacrebleu", "chrf": "sacrebleu"}


@dataclass(frozen=True)
class Generation:
    """Have a model generate answers, greedily, and score them.

    Args:
        metrics: Some of `exact-match`, `rouge`, `bleu` and `chrf`; by default the first. The others need
            ``pip install 'gradmerge[metrics]'``.
        max_new_tokens: Tokens that are written at most; 64 where nothing is said, or what the model has room for.

    >>> Generation(metrics=["exact-match", "rouge"])
    Generation(metrics=('exact-match', 'rouge'), max_new_tokens=None)
    """

    metrics: Sequence[str] = ()
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        given = [self.metrics] if isinstance(self.metrics, str) else self.metrics
        names = [part.strip() for text in given for part in text.replace("_", "-").split(",")]
        for name in names:
            if name not in METRICS_OF_TEXT:
                hint = f"{nearest(name, METRICS_OF_TEXT)}\n  Known are {', '.join(METRICS_OF_TEXT)}."
                raise InputError(f"--metrics {name}: not known for generated text{hint}")
            if importlib.util.find_spec(_NEEDS.get(name, "torch")) is None:
                needs = f"needs {_NEEDS[name]}, which is not installed: pip install 'gradmerge[metrics]'"
                raise InputError(f"--metrics {name}: {needs}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InputError(f"--max-new-tokens {self.max_new_tokens}: at least one token is needed")
        object.__setattr__(self, "metrics", tuple(dict.fromkeys(names)) or ("exact-match",))


def written_rows(
    loaded: LoadedTask,
    model: nn.Module,
    generation: Generation,
    advance: Advance | None = None,
    processes: Processes = SINGLE,
) -> dict[str, Tensor]:
    """Metric → one number per row of the data, whose mean is the metric, of what a model writes for it.

    Each of several ``processes`` writes the answers to its share of the rows. The first one scores all of them.
    """
    every = range(loaded.examples)
    asked = prompts(loaded, every)
    without = next((row for row, one in zip(every, asked, strict=True) if one.reference is None), None)
    if without is not None:
        rows: Any = loaded.data.rows  # type: ignore[attr-defined]
        raise rows.error(
            without,
            "says nothing of what the answer should be. Generated text is held against the completion of a prompt, "
            "the assistant's last message, or a target",
        )
    own = generate(loaded, model, processes.share(loaded.examples), generation.max_new_tokens, advance=advance)
    answers = [answer for some in processes.all_gather(own) for answer in some]
    scores: dict[str, list[float]] = {}
    if processes.is_first:
        references = [one.reference or "" for one in asked]
        found = score_texts(answers, references, generation)
        scores = {name: rows.tolist() for name, rows in found.items()}
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in processes.all_gather(scores)[0].items()}


def score_texts(answers: Sequence[str], references: Sequence[str], generation: Generation) -> dict[str, Tensor]:
    """Metric → one number per answer, whose mean is the metric."""
    found: dict[str, Tensor] = {}
    for name in generation.metrics:
        found |= METRICS_OF_TEXT[name](answers, references)
    return found


def normalised(text: str) -> str:
    """A text as exact match compares it."""
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return words.strip(_EDGES) or words


def _exact(answers: Sequence[str], references: Sequence[str]) -> dict[str, Tensor]:
    same = [normalised(one) == normalised(other) for one, other in zip(answers, references, strict=True)]
    return {"exact_match": torch.tensor(same, dtype=torch.float64)}


def _rouge(answers: Sequence[str], references: Sequence[str]) -> dict[str, Tensor]:
    names = ("rouge1", "rouge2", "rougeL")
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    scorer = RougeScorer(list(names))
    scores = [scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True)]
    return {name: torch.tensor([one[name].fmeasure for one in scores], dtype=torch.float64) for name in names}


def _bleu(answers: Sequence[str], references: Sequence[str]) -> dict[str, Tensor]:
    return {"bleu": _corpus("BLEU", answers, references)}


def _chrf(answers: Sequence[str], references: Sequence[str]) -> dict[str, Tensor]:
    return {"chrf": _corpus("CHRF", answers, references)}


def _corpus(kind: str, answers: Sequence[str], references: Sequence[str]) -> Tensor:
    """The score of a corpus as a mean over rows, whose standard error is the jackknife's."""
    from sacrebleu import metrics

    # Counts of every row, which add up: the corpus without a row is scored without counting anew.
    metric: Any = getattr(metrics, kind)(**({"force": True} if kind == "BLEU" else {}))
    counts = torch.tensor(metric._extract_corpus_statistics(list(answers), [list(references)]), dtype=torch.float64)

    def score(of: Tensor) -> float:
        return round(
            float(metric._compute_score_from_stats(of.long().tolist()).score), 10
        )  # 100, not 100.00000000000004

    whole = counts.sum(0)
    without = torch.tensor([score(whole - one) for one in counts], dtype=torch.float64)
    return score(whole) + (len(without) - 1) * (without.mean() - without)


#: What each name of `--metrics` measures.
METRICS_OF_TEXT: Mapping[str, Callable[[Sequence[str], Sequence[str]], dict[str, Tensor]]] = {
    "exact-match": _exact,
    "rouge": _rouge,
    "bleu": _bleu,
    "chrf": _chrf,
}
