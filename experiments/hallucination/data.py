"""Turns of Wizard of Wikipedia: knowledge, history and response; their knowledge swapped; and as tokens."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gradmerge as gm

from ..common.data import folder_in

USER, SYSTEM, KNOWLEDGE = "<user>", "<system>", "<knowledge>"
TAGS = [KNOWLEDGE, USER, SYSTEM]
#: Turns of one dialogue lie next to each other, and a dialogue has fewer of them than this.
DIALOGUE = 20
_PARLAI = {"train": "train.json", "valid": "valid_random_split.json", "test": "test_random_split.json"}


@dataclass(frozen=True)
class Turn:
    knowledge: str
    history: tuple[str, ...]
    """Utterances so far; the last is the user's."""
    response: str


@dataclass(frozen=True)
class Turns:
    train: list[Turn]
    validation: list[Turn]
    test: list[Turn]


def read_turns(folder: Path, *, train: int | None, validation: int, test: int | None) -> Turns:
    """The first turns of every split; where there is no split for validation, it is the end of the training turns.

    The end and no sample, because turns of one dialogue contain each other.
    """
    folder = folder_in(folder, "wizard_of_wikipedia")
    read = _read_parlai if (folder / _PARLAI["train"]).is_file() else _read_lines
    trained, tested = read(folder, "train"), read(folder, "test")
    if trained is None or tested is None:
        raise gm.InputError(
            f"{folder}: there is neither train.jsonl(.gz) and test.jsonl(.gz) nor {_PARLAI['train']} and "
            f"{_PARLAI['test']} of ParlAI's archive"
        )
    trained = trained[: None if train is None else train + validation]
    held = read(folder, "valid")
    if held is None:
        number = min(validation, max(1, len(trained) // 10))
        trained, held = trained[:-number], trained[-number:]
    return Turns(trained[:train], held[:validation], tested[:test])


def _read_lines(folder: Path, split: str) -> list[Turn] | None:
    for path in (folder / f"{split}.jsonl.gz", folder / f"{split}.jsonl"):
        if path.is_file():
            return [_turn(row, path, number) for number, row in enumerate(gm.read_rows(str(path)).rows, start=1)]
    return None


def _turn(row: Mapping[str, Any], path: Path, number: int) -> Turn:
    try:
        return Turn(row["knowledge"], tuple(row["history"]), row["response"])
    except KeyError as error:
        raise gm.InputError(
            f"{path}: row {number} has no {error}; rows are {{knowledge: text, history: [texts], response: text}}"
        ) from None


def _read_parlai(folder: Path, split: str) -> list[Turn] | None:
    """Every turn of the wizard, with the one sentence that was checked as its knowledge."""
    path = folder / _PARLAI[split]
    if not path.is_file():
        return None
    turns = []
    for dialogue in json.loads(path.read_text()):
        history: list[str] = []
        for said in dialogue["dialog"]:
            if "checked_sentence" in said:
                knowledge = next(iter(said["checked_sentence"].values()), "")
                turns.append(Turn(knowledge, tuple(history), said["text"]))
            history.append(said["text"])
    return turns


def swap_knowledge(turns: Sequence[Turn], number: int, seed: int) -> list[Turn]:
    """So many of the turns, each once, with the knowledge of a turn from another dialogue in place of its own."""
    chance = random.Random(seed)
    far = min(DIALOGUE, len(turns) // 4)
    swapped = []
    for place in sorted(chance.sample(range(len(turns)), number)):
        own = turns[place]
        others = [
            other
            for other in (chance.randrange(len(turns)) for _ in range(50))
            if abs(other - place) > far and turns[other].knowledge != own.knowledge
        ]
        if not others:
            raise gm.InputError(f"the turns are too much alike: found no other knowledge for turn {place + 1}")
        swapped.append(Turn(turns[others[0]].knowledge, own.history, own.response))
    return swapped


def digest(turns: Sequence[Turn]) -> str:
    """Stands for the turns in what a stage depends on."""
    return hashlib.sha256(json.dumps([asdict(turn) for turn in turns]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Lengths:
    """Tokens at most."""

    knowledge: int
    history: int
    response: int


def encode(turns: Sequence[Turn], tokenizer: Any, lengths: Lengths) -> list[dict[str, list[int]]]:
    """<knowledge> k <user> u … <system> s <user> u </s> → response </s>.

    Where there are too many utterances, the oldest are left out.
    """
    words = _tokens(tokenizer, [t for turn in turns for t in (turn.knowledge, *turn.history, turn.response)])
    user, system, tag = (tokenizer.convert_tokens_to_ids(name) for name in (USER, SYSTEM, KNOWLEDGE))
    end = tokenizer.eos_token_id
    rows = []
    for turn in turns:
        history: list[int] = []
        for back, text in enumerate(reversed(turn.history)):
            said = [system if back % 2 else user, *words[text]]
            if not history:
                said = said[: lengths.history]
            if len(history) + len(said) > lengths.history:
                break
            history = said + history
        source = [tag, *words[turn.knowledge][: lengths.knowledge], *history, end]
        rows.append({"input_ids": source, "labels": [*words[turn.response][: lengths.response - 1], end]})
    return rows


def _tokens(tokenizer: Any, texts: Sequence[str]) -> dict[str, list[int]]:
    unique = list(dict.fromkeys(texts))
    return dict(zip(unique, tokenizer(unique, add_special_tokens=False)["input_ids"], strict=True))
