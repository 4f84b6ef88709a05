"""Generate answers to rows of the data, and score them against references.

Answers are generated greedily and in batches. Of a model's generation config only the special tokens are used, so that
the same weights always give the same text: no sampling, no beams, no penalties.

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

from ..arguments import check_known
from ..curvature.offload import input_device
from ..distributed import SINGLE, Processes
from ..errors import InputError, library_errors
from ..quiet import quiet_transformers
from .loading import LoadedTask
from .text import Prompt, TokenizedData, num_positions, pad

#: Default of the maximum number of new tokens, if the model has positions for them.
NEW_TOKENS = 64
#: Keys of a model's generation config that are used.
SPECIAL_TOKENS = (
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
#: Characters that do not count at the ends of a text.
_PUNCTUATION = " .,;:!?…\"'`“”„‘’«»()[]{}"

Advance = Callable[[int], None]
"""Called with the number of rows that are done."""
Scores = dict[str, Sequence[float]]
"""Metric → one number per row, whose mean is the metric."""


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
            check_known(f"metrics={name}", name, TEXT_METRICS)
            package, _ = TEXT_METRICS[name]
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
    own_answers = generate(loaded, model, own_rows, generation.max_new_tokens, advance)
    answers = [answer for part in processes.all_gather(own_answers) for answer in part]
    references = [prompt.reference or "" for prompt in row_prompts]
    scores = score_texts(answers, references, generation) if processes.is_first else {}
    rows: dict[str, Tensor] = processes.all_gather(scores)[0]
    return rows


def prompts(loaded: LoadedTask, rows: Sequence[int], max_length: int | None = None) -> list[Prompt]:
    """Return the prompts of some rows, with at most ``max_length`` tokens."""
    data: Any = loaded.data
    if not isinstance(data, TokenizedData) or not hasattr(data, "prompt"):
        raise InputError(f"a model for {loaded.task} does not generate text; causal-lm and seq2seq models do")
    with quiet_transformers():
        return [data.prompt(row, max_length) for row in rows]


def generate(
    loaded: LoadedTask,
    model: Any,
    rows: Sequence[int],
    max_new_tokens: int | None = None,
    advance: Advance | None = None,
) -> list[str]:
    """Generate a text for some rows of the data of a `causal-lm` or `seq2seq` task, in batches as of ``loaded``.

    Args:
        loaded: The data, its tokenizer, and the model whose special tokens are used.
        model: The model that generates: that of ``loaded``, or one like it with other weights.
        rows: Rows by number, from 0.
        max_new_tokens: The maximum number of new tokens; by default 64, or what the model has positions for.
        advance: Called with the number of rows of every batch that is done.

    Returns:
        A text for each row, without special tokens.
    """
    data: Any = loaded.data
    decoder_only = loaded.task != "seq2seq"
    max_new_tokens, max_prompt = _lengths(num_positions(loaded.model), max_new_tokens, decoder_only)
    ids = [prompt.ids for prompt in prompts(loaded, rows, max_prompt)]
    for row, prompt_ids in zip(rows, ids, strict=True):
        if not prompt_ids:
            raise data.rows.error(row, "its prompt is empty")
    config = _generation_config(loaded, max_new_tokens)
    texts = [""] * len(rows)
    training, own_config = model.training, getattr(model, "generation_config", None)
    model.eval()
    model.generation_config = config  # generate() would take the keys that are None from the model's own
    side = "left" if decoder_only else "right"
    order = sorted(range(len(rows)), key=lambda index: -len(ids[index]))  # similar lengths in a batch
    try:
        with library_errors("the model cannot generate"), torch.no_grad(), quiet_transformers():
            for start in range(0, len(order), loaded.batch_size):
                batch = order[start : start + loaded.batch_size]
                input_ids = pad([ids[index] for index in batch], data.pad_token, side).to(input_device(model))
                mask = pad([[1] * len(ids[index]) for index in batch], 0, side).to(input_ids.device)
                output = model.generate(input_ids=input_ids, attention_mask=mask, generation_config=config)
                new_tokens = output[:, input_ids.shape[1] if decoder_only else 1 :].tolist()
                for index, tokens in zip(batch, new_tokens, strict=True):
                    end = next((n for n, token in enumerate(tokens) if token in (config.eos_token_id or ())), None)
                    texts[index] = str(data.tokenizer.decode(tokens[:end], skip_special_tokens=True))
                if advance is not None:
                    advance(len(batch))
    finally:
        model.generation_config = own_config
        model.train(training)
    return texts


def _generation_config(loaded: LoadedTask, max_new_tokens: int) -> Any:
    import transformers

    data: Any = loaded.data
    own_config = getattr(loaded.model, "generation_config", None)
    tokens = {name: getattr(own_config, name, None) for name in SPECIAL_TOKENS}
    ends = tokens["eos_token_id"]
    ends = {*(ends if isinstance(ends, list | tuple) else [ends]), data.tokenizer.eos_token_id} - {None}
    tokens["eos_token_id"] = sorted(ends) or None
    config_class: Any = transformers.GenerationConfig
    return config_class(
        max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, pad_token_id=data.pad_token, **tokens
    )


def _lengths(positions: int | None, max_new_tokens: int | None, decoder_only: bool) -> tuple[int, int | None]:
    """Return the numbers of new tokens and of prompt tokens. In a decoder-only model both share the positions."""
    if positions is None:
        return max_new_tokens or NEW_TOKENS, None
    if max_new_tokens is None:
        max_new_tokens = min(NEW_TOKENS, positions // 2 if decoder_only else positions - 1)
    if not 1 <= max_new_tokens < positions:
        raise InputError(
            f"max_new_tokens={max_new_tokens}: the model has positions for {positions} tokens, including the prompt"
        )
    return max_new_tokens, positions - max_new_tokens if decoder_only else None


def score_texts(answers: Sequence[str], references: Sequence[str], generation: Generation) -> dict[str, Tensor]:
    """Return metric → one number per answer, whose mean is the metric."""
    scores: Scores = {}
    for name in generation.metrics:
        scores |= TEXT_METRICS[name][1](list(answers), list(references))
    return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in scores.items()}


def normalize(text: str) -> str:
    """Return a text as exact match compares it."""
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return words.strip(_PUNCTUATION) or words


def _exact_match(answers: list[str], references: list[str]) -> Scores:
    pairs = zip(answers, references, strict=True)
    return {"exact_match": [float(normalize(answer) == normalize(reference)) for answer, reference in pairs]}


def _rouge(answers: list[str], references: list[str]) -> Scores:
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    scores = [scorer.score(*pair) for pair in zip(references, answers, strict=True)]
    return {name: [score[name].fmeasure for score in scores] for name in scorer.rouge_types}


def _bleu(answers: list[str], references: list[str]) -> Scores:
    from sacrebleu import BLEU

    metric = BLEU(effective_order=True)  # of which only the counts are used
    pairs = zip(answers, references, strict=True)
    sentences = [metric.sentence_score(answer, [reference]) for answer, reference in pairs]
    counts = torch.tensor([[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in sentences])

    def score(corpus: Tensor) -> Tensor:
        *ngrams, sys_len, ref_len = corpus.tolist()
        orders = len(ngrams) // 2
        found = BLEU.compute_bleu(ngrams[:orders], ngrams[orders:], sys_len, ref_len, smooth_method="exp")
        return torch.tensor(found.score, dtype=torch.float64)

    return {"bleu": _corpus_rows(score, counts)}


def _chrf(answers: list[str], references: list[str]) -> Scores:
    from sacrebleu import CHRF
    from sacrebleu.metrics.helpers import extract_all_char_ngrams

    texts = [[extract_all_char_ngrams(text, CHRF.CHAR_ORDER) for text in column] for column in (answers, references)]
    counts = torch.tensor(
        [
            [[a.total() if r else 0, r.total(), (a & r).total()] for a, r in zip(*orders, strict=True)]
            for orders in zip(*texts, strict=True)
        ],
        dtype=torch.float64,
    )

    def score(corpus: Tensor) -> Tensor:
        answered, expected, shared = corpus[(corpus[:, :2] > 0).all(1)].T
        precision, recall = (shared / answered).mean(), (shared / expected).mean()
        f_score = (1 + CHRF.BETA**2) * precision * recall / (CHRF.BETA**2 * precision + recall)
        value: Tensor = 100 * f_score.nan_to_num()
        return value

    return {"chrf": _corpus_rows(score, counts)}


def _corpus_rows(score: Callable[[Tensor], Tensor], counts: Tensor) -> list[float]:
    """Write the score of a corpus as a mean over rows, whose standard error is the jackknife's.

    The counts of a corpus are the sums of those of its rows. So the score without a row needs no counting.
    """
    total = counts.sum(0)
    without = torch.stack([score(total - row) for row in counts])
    rows: list[float] = (score(total) + (len(without) - 1) * (without.mean() - without)).tolist()
    return rows


#: The names of `--metrics` → the package that each needs, and its function.
TEXT_METRICS: Mapping[str, tuple[str, Callable[[list[str], list[str]], Scores]]] = {
    "exact-match": ("torch", _exact_match),
    "rouge": ("rouge_score", _rouge),
    "bleu": ("sacrebleu", _bleu),
    "chrf": ("sacrebleu", _chrf),
}
