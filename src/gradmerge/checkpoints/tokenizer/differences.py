"""How the vocabularies of two models differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import InputError
from ...io.small_files import MAX_TOKENIZER, read_bounded
from ...text import counted, some
from ..checkpoint import Checkpoint
from ..views import folders_of
from .vocabulary import Vocabulary, read_vocabulary

MATCH = "Set `tokenizer: union` (or base, or a model) in the recipe to match rows by token"


@dataclass
class TokenDifference:
    """Tokens of two models that are not alike, each list in the order of rows."""

    labels: tuple[str, str]
    sizes: tuple[int, int]
    """Tokens of each."""
    moved: list[tuple[str, int, int]]
    """Tokens that both have, with the row in each."""
    alone: tuple[list[str], list[str]]
    """Tokens that only one of them has."""

    @property
    def lines(self) -> list[str]:
        """The counts, and the first tokens of each kind."""
        (first, other), found = self.labels, []
        if self.moved:
            rows = [f"{token!r} is row {here} and {there}" for token, here, there in self.moved]
            found.append(f"{counted(rows, 'token')} in other rows in {first} and {other}: {some(rows)}")
        for label, tokens, size in zip(self.labels, self.alone, self.sizes, strict=True):
            if tokens:
                found.append(
                    f"{counted(tokens, 'token')} of {size} only in {label}: {some([repr(token) for token in tokens])}"
                )
        return found


def token_difference(first: Checkpoint, other: Checkpoint) -> TokenDifference | None:
    """How two models' tokens differ; None where they do not, or the files do not tell."""
    ours, theirs = _folder(first), _folder(other)
    if ours is None or theirs is None or ours == theirs:
        return None
    try:
        if _bytes(ours) == _bytes(theirs):
            return None
        here, there = read_vocabulary(ours, first.label), read_vocabulary(theirs, other.label)
    except InputError:
        return None
    found = TokenDifference(
        (first.label, other.label),
        (len(here.ids), len(there.ids)),
        [(token, row, there.ids[token]) for token, row in _ordered(here) if there.ids.get(token, row) != row],
        ([t for t, _ in _ordered(here) if t not in there.ids], [t for t, _ in _ordered(there) if t not in here.ids]),
    )
    return found if found.moved or any(found.alone) else None


def _bytes(folder: Path) -> list[bytes]:
    files = (folder / name for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"))
    return [read_bounded(path, MAX_TOKENIZER) if path.is_file() else b"" for path in files]


def _ordered(vocabulary: Vocabulary) -> list[tuple[str, int]]:
    return sorted(vocabulary.ids.items(), key=lambda item: item[1])


def _folder(checkpoint: Checkpoint) -> Path | None:
    """Where the tokenizer.json of a model lies, or of what it goes on top of."""
    return next((folder for folder in folders_of(checkpoint) if (folder / "tokenizer.json").is_file()), None)
