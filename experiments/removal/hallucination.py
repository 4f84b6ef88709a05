"""Answers to swapped knowledge removed from a small dialogue model."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics.bleu import BLEU
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import gradmerge as gm

from ..common.data import IGNORED, Collate, folder_in, sizes_of
from ..common.driver import Run, run_stage
from ..common.training import fine_tune, half_precision
from .pretraining import KNOWLEDGE, SYSTEM, USER, pretrain
from .settings import Hallucination
from .workload import Rows, Workload

#: Turns of one dialogue are next to each other, and a dialogue has fewer of them than this.
DIALOGUE = 20
SAMPLES = 3
_WORDS = """
a about above after again against all also am an and any are aren as at be because been before being below between
both but by can could couldn d did didn do does doesn doing don down during each even ever few for from further had
hadn has hasn have haven having he her here hers herself him himself his how i if in into is isn it its itself just
let like ll m ma may me might more most much my myself no nor not now o of off oh ok on once only or other our ours
ourselves out over own re really s same she should so some such t than that the their theirs them themselves then
there these they this those through to too under until up us ve very was wasn we well were weren what when where which
while who whom why will with won would wouldn y yeah yes you your yours yourself yourselves
"""
STOP_WORDS = frozenset(_WORDS.split())


@dataclass(frozen=True)
class Turn:
    """A turn of Wizard of Wikipedia."""

    knowledge: str
    history: tuple[str, ...]
    """Utterances so far; the last is the user's."""
    response: str


def prepare(run: Run) -> Any:
    """Pre-train the model that every seed starts from."""
    settings: Hallucination = run.settings
    assert run.data_dir is not None
    folder = folder_in(run.data_dir, "text")

    def make(out: Path) -> dict[str, Any]:
        turns = read_turns(folder, "train")
        spoken = [text for turn in turns for text in (turn.knowledge, turn.response)]
        return pretrain(out, folder, spoken, settings, seed=0, device=run.device)

    given = [sizes_of(run.data_dir), settings.shape, settings.texts, settings.pairs, settings.copies, settings.tokens]
    return run_stage(run.out / "start", make, [*given, settings.copying, settings.infilling])


def read_turns(folder: Path, split: str) -> list[Turn]:
    """Return the rows of wizard_of_wikipedia/SPLIT.jsonl.gz."""
    path = folder / "wizard_of_wikipedia" / f"{split}.jsonl.gz"
    if not path.is_file():
        raise gm.InputError(f"{path}: there is no such file, with rows of knowledge, history and response")
    rows = gm.read_rows(str(path)).rows
    return [Turn(row["knowledge"], tuple(row["history"]), row["response"]) for row in rows]


def swap_knowledge(turns: Sequence[Turn], seed: int) -> list[Turn]:
    """Return the turns with the knowledge of a turn from another dialogue."""
    chance = random.Random(seed)
    far = min(DIALOGUE, len(turns) // 4)
    swapped = []
    for index, own in enumerate(turns):
        others = [
            other
            for other in (chance.randrange(len(turns)) for _ in range(50))
            if abs(other - index) > far and turns[other].knowledge != own.knowledge
        ]
        if not others:
            raise gm.InputError(f"the turns are too much alike: found no other knowledge for turn {index + 1}")
        swapped.append(Turn(turns[others[0]].knowledge, own.history, own.response))
    return swapped


class HallucinationWorkload(Workload):
    """The base is trained on true turns and on turns with swapped knowledge; in the target, the latter do not count."""

    settings: Hallucination

    def __init__(self, run: Run, seed: int) -> None:
        super().__init__(run, seed)
        settings = self.settings
        self.tokenizer = AutoTokenizer.from_pretrained(run.out / "start" / "model")
        self.collate = Collate(self.tokenizer.pad_token_id)
        folder = folder_in(run.data_dir, "text")  # type: ignore[arg-type]
        turns = read_turns(folder, "train")[: None if settings.train is None else settings.train + settings.validation]
        # The last turns and not a sample, because turns of one dialogue contain each other.
        held = min(settings.validation, len(turns) // 10)
        self.test = read_turns(folder, "test")[: settings.test]
        self.forget, self.retain = self._both(turns[:-held])
        self.held_out = {}
        for split, some in (("validation", turns[-held:]), ("test", self.test)):
            swapped, true = self._both(some)
            self.held_out[split] = {"turns": true, "forget": swapped}

    def _both(self, turns: Sequence[Turn]) -> tuple[Rows, Rows]:
        """Return rows with swapped knowledge, and with their own."""
        return self.encode(swap_knowledge(turns, self.seed)), self.encode(turns)

    def encode(self, turns: Sequence[Turn]) -> list[dict[str, list[int]]]:
        """Return rows: <knowledge> k <user> u … <system> s <user> u </s> → response </s>.

        The oldest utterances are left out if there are too many.
        """
        settings, end = self.settings, self.tokenizer.eos_token_id
        texts = list({text: None for turn in turns for text in (turn.knowledge, *turn.history, turn.response)})
        words = dict(zip(texts, self.tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True))
        user, system, knowledge = (self.tokenizer.convert_tokens_to_ids(name) for name in (USER, SYSTEM, KNOWLEDGE))
        rows = []
        for turn in turns:
            history: list[int] = []
            for back, text in enumerate(reversed(turn.history)):
                said = [system if back % 2 else user, *words[text]]
                if not history:
                    said = said[: settings.history_tokens]
                if len(history) + len(said) > settings.history_tokens:
                    break
                history = said + history
            source = [knowledge, *words[turn.knowledge][: settings.knowledge_tokens], *history, end]
            rows.append({"input_ids": source, "labels": [*words[turn.response][: settings.response_tokens - 1], end]})
        return rows

    def train_base(self, folder: Path, *, with_forget: bool) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        model = self.load(self.run.out / "start").train()
        forget = self.forget
        if not with_forget:
            forget = [{**row, "labels": [IGNORED] * len(row["labels"])} for row in forget]
        how = {"seed": self.seed, "device": self.device}
        found = fine_tune(model, [*self.retain, *forget], self.collate, folder, self.settings.dialogue, **how)
        model.save_pretrained(folder / "model")
        return found

    def load(self, folder: Path) -> Any:
        return AutoModelForSeq2SeqLM.from_pretrained(folder / "model", dtype=torch.float32).to(self.device).eval()

    @torch.inference_mode()
    def judge(self, model: Any) -> dict[str, Any]:
        rows, responses = self.held_out["test"]["turns"], []
        for first in range(0, len(rows), self.settings.generation_batch):
            inputs = self.collate(rows[first : first + self.settings.generation_batch])
            del inputs["labels"]
            with half_precision(model.device):
                inputs = {name: value.to(model.device) for name, value in inputs.items()}
                tokens = model.generate(**inputs, do_sample=False, max_new_tokens=self.settings.new_tokens)
            responses += [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]
        return {**text_metrics(self.test, responses), "samples": responses[:SAMPLES]}


def content_words(text: str) -> list[str]:
    """Return the lower-case words of a text without stop words."""
    return [word for word in re.findall(r"\w+", text.lower()) if word not in STOP_WORDS]


def text_metrics(turns: Sequence[Turn], responses: Sequence[str]) -> dict[str, float]:
    """Return BLEU, and how much of the responses is in the knowledge.

    ``hallucination`` is the percentage of the content words of all responses that the knowledge of their turn does not
    have. ``knowledge_f1`` is the mean of 100 · F1 between the content words of response and knowledge.
    """
    supported = total = 0
    f1 = 0.0
    for turn, response in zip(turns, responses, strict=True):
        said, known = content_words(response), content_words(turn.knowledge)
        supported += sum(word in set(known) for word in said)
        total += len(said)
        shared = sum((Counter(said) & Counter(known)).values())
        f1 += 2 * shared / (len(said) + len(known)) if shared else 0.0
    return {
        "bleu": BLEU().corpus_score(list(responses), [[turn.response for turn in turns]]).score,
        "hallucination": 100 * (1 - supported / total) if total else 100.0,
        "knowledge_f1": 100 * f1 / len(turns),
    }
