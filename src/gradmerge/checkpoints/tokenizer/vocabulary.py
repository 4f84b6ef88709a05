"""The tokens of a model: which it has, and which row of its embeddings each one means."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...io.small_files import MAX_CONFIG, MAX_TOKENIZER, lies_within, parse_json_object, read_bounded, read_json
from ...quiet import quiet_transformers
from ...text import first_line
from ..checkpoint import Checkpoint
from ..views import folders_of

#: Files that hold tokens. Beside a tokenizer.json they say the same once more, for older software.
VOCABULARY_FILES = (
    "added_tokens.json tekken.json vocab.json vocab.txt vocab.bpe merges.txt bpe.codes dict.txt *.spm *.tiktoken "
    "spiece.model spm.model *tokenizer*.model sentencepiece*.model"
)
#: Files that make a tokenizer, in any of the formats that transformers reads.
TOKENIZER_FILES = f"tokenizer.json tokenizer_config.json special_tokens_map.json normalizer.json {VOCABULARY_FILES}"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: The list of further special tokens, by its names in older and newer files.
EXTRA = ("additional_special_tokens", "extra_special_tokens")
#: How a token is added that comes without settings.
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}


@dataclass(eq=False)
class Vocabulary:
    """The tokens of one model's tokenizer."""

    label: str
    folder: Path
    ids: dict[str, int]
    """Token → row, as the tokenizer gives it when it is loaded."""
    added: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tokens that were added to the tokenizer's own and are found in text as a whole → how they are found."""
    special: dict[str, str] = field(default_factory=dict)
    """`bos_token` and the like → token."""
    extra: list[str] = field(default_factory=list)
    """Further special tokens."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """What tokenizer.json holds, or would."""
    config: dict[str, Any] = field(default_factory=dict)
    """What tokenizer_config.json holds."""
    files: list[Path] = field(default_factory=list)
    """The files that were read."""

    @property
    def size(self) -> int:
        """Rows that these tokens need: one more than the largest id."""
        return 1 + max(self.ids.values(), default=-1)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder's tokenizer."""
    found = (path for pattern in TOKENIZER_FILES.split() for path in sorted(folder.glob(pattern)))
    return [path for path in dict.fromkeys(found) if path.is_file() and lies_within(path, folder)]


def vocabulary_of(checkpoint: Checkpoint) -> Vocabulary:
    """The vocabulary of a model; that of its base for an adapter without a tokenizer of its own."""
    folders = folders_of(checkpoint)
    for folder in folders:
        found = {path.name for path in tokenizer_files(folder)}
        if found - {"tokenizer_config.json", "special_tokens_map.json"}:
            return read_vocabulary(folder, checkpoint.label)
    where = f" in {folders[0]}" if folders else ": it is a lone file"
    raise InputError(
        f"{checkpoint.label}: no tokenizer files{where}, so that nobody knows which tokens its rows mean. Put its "
        "tokenizer.json and tokenizer_config.json there, or leave `tokenizer` out of the recipe if all models have the "
        "same tokens in the same order"
    )


def read_vocabulary(folder: Path, label: str) -> Vocabulary:
    """The vocabulary that a folder's tokenizer files describe."""
    plain, stated = folder / "tokenizer.json", folder / "tokenizer_config.json"
    config = read_json(stated) if stated.is_file() else {}
    if plain.is_file():
        raw = read_bounded(plain, MAX_TOKENIZER)
        tokenizer = parse_json_object(raw, lambda why: InputError(f"{plain}: {why}"))
    else:
        tokenizer = _converted(folder, label)
    files = tokenizer_files(folder)
    broken = f"{plain if plain.is_file() else folder}: not a tokenizer as the tokenizers library writes it"
    try:
        found = Vocabulary(label, folder, _own_tokens(tokenizer["model"]["vocab"]), tokenizer=tokenizer, config=config)
        found.files = files
        for entry in tokenizer.get("added_tokens") or []:
            _add(found, str(entry["content"]), int(entry["id"]), entry)
        for number, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
            _add(found, str(entry["content"]), int(number), entry)
        special_map = folder / "special_tokens_map.json"
        for source in (read_json(special_map) if special_map.is_file() else {}, config):
            _read_special(found, source)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{broken} ({first_line(error)[:120]}). Save it again.") from error
    if not found.ids:
        raise InputError(f"{broken}: it has no tokens")
    _refuse_doubles(found)
    return found


def _own_tokens(vocabulary: Any) -> dict[str, int]:
    """Token → id of a tokenizer's model: BPE, WordPiece and WordLevel state ids, Unigram has them in order."""
    if isinstance(vocabulary, Mapping):
        found = {str(token): number for token, number in vocabulary.items()}
    else:
        found = {str(token): number for number, (token, _) in reversed(list(enumerate(vocabulary)))}
    wrong = next((t for t, n in found.items() if isinstance(n, bool) or not isinstance(n, int) or n < 0), None)
    if wrong is not None:
        raise ValueError(f"the id of {wrong!r} is {found[wrong]!r}")
    return found


def _add(found: Vocabulary, token: str, number: int, settings: Mapping[str, Any]) -> None:
    """An added token. One that the tokenizer's model has too keeps the id that it has there, as on loading."""
    found.ids.setdefault(token, number)
    found.added.setdefault(token, {key: bool(settings.get(key, value)) for key, value in PLAIN.items()})


def _read_special(found: Vocabulary, source: Mapping[str, Any]) -> None:
    """Special tokens; those without an id get the next ones, as transformers gives them when it loads a tokenizer."""

    def text(value: Any) -> str | None:
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) and value else None

    for kind in SPECIAL:
        if token := text(source.get(kind)):
            found.special[kind] = token
    for key in EXTRA:
        listed = source.get(key)
        for value in listed.values() if isinstance(listed, Mapping) else listed if isinstance(listed, list) else ():
            if (token := text(value)) and token not in found.extra:
                found.extra.append(token)
    for token in (*found.special.values(), *found.extra):
        if token not in found.ids:
            _add(found, token, found.size, {"special": True})


def _refuse_doubles(found: Vocabulary) -> None:
    tokens: dict[int, str] = {}
    for token, number in found.ids.items():
        if number in tokens:
            raise InputError(
                f"{found.label}: its tokenizer gives the id {number} to two tokens, {tokens[number]!r} and {token!r}: "
                f"it cannot be said which of them the row means. Mend {found.folder / 'tokenizer.json'}"
            )
        tokens[number] = token


@contextlib.contextmanager
def told_as(problem: str) -> Iterator[None]:
    """Whatever a library makes of files that it does not expect, a panic of its Rust code too, as an error of ours."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise InputError(f"{problem}: {first_line(error)[:200]}") from error


def _converted(folder: Path, label: str) -> dict[str, Any]:
    """The tokenizer.json that transformers makes of the older files of a tokenizer."""
    from transformers import AutoTokenizer

    problem = (
        f"{label}: its tokenizer has no tokenizer.json, and transformers cannot make one of its other files. Where "
        "that works (sentencepiece or tiktoken may have to be installed), save it with "
        "AutoTokenizer.from_pretrained(MODEL).save_pretrained(MODEL)"
    )
    for path in tokenizer_files(folder):
        read_bounded(path, MAX_CONFIG if path.suffix == ".json" and path.name != "vocab.json" else MAX_TOKENIZER)
    with told_as(problem), quiet_transformers():
        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        tokenizer = json.loads(loaded.backend_tokenizer.to_str())
    if not isinstance(tokenizer, dict) or not tokenizer.get("model", {}).get("vocab"):
        raise InputError(problem)
    return tokenizer
