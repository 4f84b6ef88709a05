"""Read the vocabulary of a model from its tokenizer files, and compare the vocabularies of two models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..io.small_files import MAX_TOKENIZER, lies_within, parse_json_object, read_bounded, read_json
from ..text import counted, first_line, some
from .checkpoint import Checkpoint, folders_of

#: Files with tokens. Next to a tokenizer.json they repeat it for older software.
VOCABULARY_FILES = (
    "added_tokens.json tekken.json vocab.json vocab.txt vocab.bpe merges.txt bpe.codes dict.txt *.spm *.tiktoken "
    "spiece.model spm.model *tokenizer*.model sentencepiece*.model"
)
#: All files of a tokenizer, in the formats that transformers reads.
TOKENIZER_FILES = f"tokenizer.json tokenizer_config.json special_tokens_map.json normalizer.json {VOCABULARY_FILES}"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: The list of further special tokens, under its older and its newer name.
EXTRA = ("additional_special_tokens", "extra_special_tokens")
#: Settings of an added token without settings.
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
MATCH = "Set `tokenizer: union` (or base, or a model) in the recipe to match rows by token"


@dataclass(eq=False)
class Vocabulary:
    """The tokens of a tokenizer, and its files."""

    label: str
    folder: Path
    ids: dict[str, int]
    """Token → row, as transformers loads it."""
    added: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Added token → its settings, such as `lstrip`. The tokenizer finds these tokens as a whole."""
    special: dict[str, str] = field(default_factory=dict)
    """`bos_token` and the like → token."""
    extra: list[str] = field(default_factory=list)
    """Further special tokens."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Contents of tokenizer.json."""
    config: dict[str, Any] = field(default_factory=dict)
    """Contents of tokenizer_config.json."""
    files: list[Path] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of rows that the tokens need: the largest id plus one."""
        return 1 + max(self.ids.values(), default=-1)

    @property
    def by_row(self) -> list[str]:
        """The tokens in the order of their rows."""
        return sorted(self.ids, key=self.ids.__getitem__)

    def add(self, token: str, number: int, settings: Mapping[str, Any]) -> None:
        """Add a token; if the tokenizer's model has it as well, its id there counts, as in transformers."""
        self.ids.setdefault(token, number)
        self.added.setdefault(token, {key: bool(settings.get(key, value)) for key, value in PLAIN.items()})


def vocabulary_of(checkpoint: Checkpoint) -> Vocabulary:
    """Read the vocabulary of a model; for an adapter without a tokenizer, that of its base."""
    folder = _tokenizer_folder(checkpoint)
    if folder is None:
        raise InputError(
            f"{checkpoint.label}: no tokenizer.json, so the tokens of its rows are unknown. Save the tokenizer there: "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER). If all models have the same tokens in the "
            "same order, remove `tokenizer` from the recipe"
        )
    return read_vocabulary(folder, checkpoint.label)


def _tokenizer_folder(checkpoint: Checkpoint) -> Path | None:
    return next((folder for folder in folders_of(checkpoint) if (folder / "tokenizer.json").is_file()), None)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer files in a folder."""
    paths = (path for pattern in TOKENIZER_FILES.split() for path in sorted(folder.glob(pattern)))
    return [path for path in dict.fromkeys(paths) if path.is_file() and lies_within(path, folder)]


def read_vocabulary(folder: Path, label: str) -> Vocabulary:
    """Read the vocabulary from the tokenizer files in a folder."""
    main, config_path, special_path = (
        folder / name for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    )
    config = read_json(config_path) if config_path.is_file() else {}
    tokenizer = parse_json_object(read_bounded(main, MAX_TOKENIZER), lambda why: InputError(f"{main}: {why}"))
    broken = f"{main}: not a valid file of the tokenizers library"
    try:
        vocabulary = Vocabulary(label, folder, _ids_of_model(tokenizer["model"]["vocab"]))
        vocabulary.tokenizer, vocabulary.config, vocabulary.files = tokenizer, config, tokenizer_files(folder)
        for entry in tokenizer.get("added_tokens") or []:
            vocabulary.add(str(entry["content"]), int(entry["id"]), entry)
        decoder = config.get("added_tokens_decoder") or {}
        for number, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
            vocabulary.add(str(entry["content"]), int(number), entry)
        for settings in (read_json(special_path) if special_path.is_file() else {}, config):
            _add_special(vocabulary, settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{broken} ({first_line(error)[:120]}). Save the tokenizer again.") from error
    if not vocabulary.ids:
        raise InputError(f"{broken}: it has no tokens")
    if len(set(vocabulary.ids.values())) < len(vocabulary.ids):
        number, count = Counter(vocabulary.ids.values()).most_common(1)[0]
        tokens = some([repr(token) for token, other in vocabulary.ids.items() if other == number])
        raise InputError(f"{main}: {count} tokens have the id {number}: {tokens}. Give them different ids")
    return vocabulary


def _ids_of_model(vocabulary: Any) -> dict[str, int]:
    """Return token → id. BPE, WordPiece and WordLevel store a mapping; Unigram stores a list in order."""
    if isinstance(vocabulary, Mapping):
        ids = {str(token): number for token, number in vocabulary.items()}
    else:
        ids = {str(token): number for number, (token, _) in reversed(list(enumerate(vocabulary)))}
    for token, number in ids.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"the id of {token!r} is {number!r}")
    return ids


def _add_special(vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None:
    """Add the special tokens of a file. transformers gives the next ids to those without an id."""

    def text(value: Any) -> str | None:
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) and value else None

    for kind in SPECIAL:
        if token := text(settings.get(kind)):
            vocabulary.special[kind] = token
    for key in EXTRA:
        extra = settings.get(key)
        for value in extra.values() if isinstance(extra, Mapping) else extra if isinstance(extra, list) else ():
            if (token := text(value)) and token not in vocabulary.extra:
                vocabulary.extra.append(token)
    for token in (*vocabulary.special.values(), *vocabulary.extra):
        if token not in vocabulary.ids:
            vocabulary.add(token, vocabulary.size, {"special": True})


@dataclass
class TokenDifference:
    """How the tokens of two vocabularies differ."""

    lines: list[str]
    """Counts and examples for messages."""
    moved: int
    """Number of tokens of both in other rows."""
    rows: int
    """Number of tokens of the smaller vocabulary."""


def token_difference(first: Checkpoint, other: Checkpoint) -> TokenDifference | None:
    """Compare the tokens of two models; None if they are equal or cannot be read."""
    folders = [_tokenizer_folder(model) for model in (first, other)]
    if folders[0] is None or folders[1] is None or folders[0] == folders[1]:
        return None
    try:
        if _bytes(folders[0]) == _bytes(folders[1]):
            return None
        a, b = read_vocabulary(folders[0], first.label), read_vocabulary(folders[1], other.label)
    except InputError:
        return None
    moved = [token for token in a.by_row if b.ids.get(token, a.ids[token]) != a.ids[token]]
    rows = [f"{token!r} is row {a.ids[token]} and {b.ids[token]}" for token in moved]
    lines = [f"{counted(moved, 'token')} in other rows in {a.label} and {b.label}: {some(rows)}"] if moved else []
    for model, without in ((a, b), (b, a)):
        if alone := [repr(token) for token in model.by_row if token not in without.ids]:
            lines.append(f"{counted(alone, 'token')} of {len(model.ids)} only in {model.label}: {some(alone)}")
    return TokenDifference(lines, len(moved), min(len(a.ids), len(b.ids))) if lines else None


def _bytes(folder: Path) -> list[bytes]:
    files = (folder / name for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"))
    return [read_bounded(path, MAX_TOKENIZER) if path.is_file() else b"" for path in files]
