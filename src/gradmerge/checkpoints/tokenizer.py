"""Tokenizers and chat templates: read them, compare those of two models, and write those of the result."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import InputError
from ..io.small_files import MAX_CONFIG, MAX_TOKENIZER, lies_within, read_bounded, read_json, readable_json
from ..text import counted, first_line, some, to_json
from .checkpoint import Checkpoint, folders_of
from .config_diff import parts

#: Files with tokens. Next to a tokenizer.json they repeat it for older software.
VOCABULARY_FILES = (
    "added_tokens.json tekken.json *vocab*.json *vocab*.txt vocab.bpe merges.txt bpe.codes dict.txt *.spm *.tiktoken "
    "spiece.model spm.model *tokenizer*.model sentencepiece*.model"
)
#: All files of a tokenizer, in the formats that transformers reads.
TOKENIZER_FILES = f"tokenizer.json tokenizer_config.json special_tokens_map.json normalizer.json {VOCABULARY_FILES}"
TEMPLATE_FILE = "chat_template.jinja"
#: Files that hold only chat templates. Processors of older versions have the second; the first replaces it.
TEMPLATE_FILES = f"{TEMPLATE_FILE} chat_template.json additional_chat_templates/*.jinja"
#: Settings of an added token without settings.
PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
#: Settings of words that are added to a WordPiece tokenizer, so that it does not find them inside other words.
WORD = {**PLAIN, "single_word": True, "normalized": True}
#: Words that are added to a Unigram model score so much lower that text without them is encoded as before.
UNLIKELY = 1e4
CONFIGS = ("config.json", "generation_config.json")
#: Keys of configs with token ids: `eos_token_id`, `image_token_index`, `bad_words_ids`, ….
TOKEN_KEYS = re.compile(r".*_token_(id|ids|index)|bad_words_ids|(begin_)?suppress_tokens|force_words_ids")
MATCH = "Set `tokenizer: union` (or base, or a model) in the recipe to match rows by token"


def files_of(folder: Path, patterns: str) -> list[Path]:
    """Return the files of a folder that match one of some patterns. Links that leave the folder are left out."""
    paths = (path for pattern in patterns.split() for path in sorted(folder.glob(pattern)))
    return [path for path in dict.fromkeys(paths) if path.is_file() and lies_within(path, folder)]


# Vocabularies


@dataclass(eq=False)
class Vocabulary:
    """The tokens of a tokenizer."""

    label: str
    folder: Path
    tokenizer: dict[str, Any]
    """Contents of tokenizer.json."""
    ids: dict[str, int]
    """Token → row."""
    added: dict[str, dict[str, Any]]
    """Added token → its settings, such as `lstrip`. The tokenizer finds these tokens as a whole."""

    @property
    def files(self) -> list[Path]:
        return files_of(self.folder, TOKENIZER_FILES)

    @property
    def size(self) -> int:
        """Number of rows that the tokens need: the largest id plus one."""
        return 1 + max(self.ids.values())

    @property
    def by_row(self) -> list[str]:
        """The tokens in the order of their rows."""
        return sorted(self.ids, key=self.ids.__getitem__)


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


def read_vocabulary(folder: Path, label: str) -> Vocabulary:
    """Read the vocabulary from the tokenizer.json in a folder."""
    path = folder / "tokenizer.json"
    tokenizer = read_json(path, MAX_TOKENIZER)
    added = {}
    try:
        words = tokenizer["model"]["vocab"]
        if not isinstance(words, Mapping):  # Unigram models have a list of words and their scores
            words = {token: number for number, (token, _) in reversed(list(enumerate(words)))}
        ids = {str(token): number for token, number in words.items()}
        for entry in tokenizer.get("added_tokens") or []:
            token = str(entry["content"])
            ids.setdefault(token, entry["id"])
            added[token] = {key: bool(entry.get(key, default)) for key, default in PLAIN.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _broken(path, first_line(error)[:120]) from error
    if not ids:
        raise _broken(path, "it has no tokens")
    for token, number in ids.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise _broken(path, f"the id of {token!r} is {number!r}"[:120])
    if len(set(ids.values())) < len(ids):
        number, count = Counter(ids.values()).most_common(1)[0]
        raise _broken(path, f"{count} tokens have the id {number}")
    return Vocabulary(label, folder, tokenizer, ids, added)


def _broken(path: Path, why: str) -> InputError:
    return InputError(f"{path}: not a valid file of the tokenizers library ({why}). Save the tokenizer again.")


class TokenDifference(NamedTuple):
    """How the tokens of two vocabularies differ."""

    lines: list[str]
    """Counts and examples for messages."""
    moved: int
    """Number of tokens of both in other rows."""
    rows: int
    """Number of tokens of the smaller vocabulary."""


def token_difference(first: Checkpoint, other: Checkpoint) -> TokenDifference | None:
    """Compare the tokens of two models; None if they are equal or cannot be read."""
    folders = [folder for model in (first, other) if (folder := _tokenizer_folder(model)) is not None]
    if len(set(folders)) < 2:
        return None
    try:
        ours, theirs = (read_bounded(folder / "tokenizer.json", MAX_TOKENIZER) for folder in folders)
        if ours == theirs:
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


# The tokenizer of the result


@dataclass(eq=False)
class OutputTokenizer:
    """The tokenizer of one model, or the same with more tokens."""

    source: Vocabulary
    ids: dict[str, int]
    """Token → row of the result."""
    text: str | None = None
    """New contents of tokenizer.json."""
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of rows that the tokens need."""
        return 1 + max(self.ids.values())

    def write(self, folder: Path, *, with_templates: bool) -> None:
        """Replace the tokenizer files in a folder, and the chat templates as well on request."""
        patterns = f"{TOKENIZER_FILES} {TEMPLATE_FILES}" if with_templates else TOKENIZER_FILES
        for path in [path for pattern in patterns.split() for path in folder.glob(pattern)]:
            path.unlink()
        for path in files_of(self.source.folder, patterns):
            if self.text is None or not any(fnmatch(path.name, pattern) for pattern in VOCABULARY_FILES.split()):
                copy = folder / path.relative_to(self.source.folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
        if self.text is not None:
            (folder / "tokenizer.json").write_text(self.text, "utf-8")


def make_tokenizer(
    source: Vocabulary, others: Sequence[Vocabulary], *, union: bool, named: Sequence[str] = ()
) -> OutputTokenizer:
    """Return the tokenizer of ``source``, extended by the tokens ``named``, and with ``union`` by those of ``others``.

    Tokens of the source keep their ids. Then come the words of the other vocabularies, in the order of the models and
    their ids. The other models' added tokens follow, and last the named tokens that no model has.
    """
    pairs = [(other, token) for other in others for token in other.by_row if union and token not in source.ids]
    added = {token: other.added[token] for other, token in reversed(pairs) if token in other.added}
    words = dict.fromkeys(token for _, token in pairs if token not in added)
    is_wordpiece = source.tokenizer["model"].get("type") == "WordPiece"
    #: Token → its settings as an added token; None for a word of the tokenizer's model.
    more: dict[str, dict[str, Any] | None] = dict.fromkeys(words, WORD if is_wordpiece else None)
    more |= {token: added[token] for _, token in pairs if token in added}
    more |= {token: {**PLAIN, "normalized": True} for token in named if token not in source.ids and token not in more}
    ids = source.ids | {token: source.size + number for number, token in enumerate(more)}
    notes = [note for other in others for note in _special_token_notes(source, other)]
    if words:
        notes.append(
            f"tokenizer: {len(words)} words of other vocabularies than that of {source.label} have rows in the result "
            f"({some([repr(word) for word in words])}), but text that {source.label} can encode is encoded as before. "
            "To encode text as another model does, name that model as `tokenizer`"
        )
    return OutputTokenizer(source, ids, _extended(source, ids, more) if more else None, notes)


def _special_token_notes(source: Vocabulary, other: Vocabulary) -> list[str]:
    """Return notes about special tokens that differ, such as `eos_token`."""
    ours, theirs = (
        {
            key: value.get("content") if isinstance(value, dict) else value
            for key, value in (readable_json(model.folder / "tokenizer_config.json") or {}).items()
            if key.endswith("_token") and isinstance(value, dict | str)
        }
        for model in (source, other)
    )
    different = [key for key in theirs if theirs[key] != ours.get(key)]
    return [f"{key}: {theirs[key]!r} in {other.label}; the result has {ours.get(key)!r}" for key in different]


def _extended(source: Vocabulary, ids: Mapping[str, int], more: Mapping[str, dict[str, Any] | None]) -> str:
    """Return the contents of tokenizer.json with further tokens."""
    added = source.added | {token: settings for token, settings in more.items() if settings is not None}
    entries = [{"id": ids[token], "content": token, **added[token]} for token in sorted(added, key=ids.__getitem__)]
    tokenizer = {**source.tokenizer, "added_tokens": entries}
    if None in more.values() or _loaded_ids(tokenizer) != ids:
        # The library numbers added tokens after the words of the model, unless they are words of the model.
        model, tokens = tokenizer["model"], sorted(ids, key=ids.__getitem__)
        if isinstance(model["vocab"], Mapping):
            vocabulary: Any = {token: ids[token] for token in tokens}
        else:
            score = min(float(score) for _, score in model["vocab"]) - UNLIKELY
            vocabulary = [*model["vocab"], *([token, score] for token in tokens[len(model["vocab"]) :])]
        tokenizer["model"] = {**model, "vocab": vocabulary}
    if _loaded_ids(tokenizer) != ids:
        raise InputError(
            f"{source.label}: its tokenizer cannot be extended by the tokens of other models, because the tokenizers "
            "library gives them other ids. Name one model as `tokenizer` instead of union"
        )
    return json.dumps(tokenizer, ensure_ascii=False, indent=2) + "\n"


def _loaded_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return token → id as the tokenizers library reads them."""
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_str(json.dumps(tokenizer)).get_vocab(with_added_tokens=True))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # also panics of Rust code
        raise InputError(f"the tokenizers library cannot read the tokenizer: {first_line(error)[:200]}") from error


@dataclass
class ResultFiles:
    """Changes to the tokenizer files and configs that are copied from the template model."""

    tokenizer: OutputTokenizer | None = None
    rows: int = 0
    """Rows of the embeddings, including rows without a token."""
    from_template: bool = True
    """The tokenizer is that of the template model, possibly extended."""
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The configs beside a tokenizer of another model. Their token ids replace those of the template model."""
    chat_template: str | None = None
    """Replaces that of the tokenizer."""
    reads: list[Path] = field(default_factory=list)
    """Files that the result depends on."""
    notes: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Change the files that were copied to a folder."""
        if self.tokenizer is not None:
            self.tokenizer.write(folder, with_templates=not self.from_template)
            for path in files_of(folder, " ".join(CONFIGS)):
                before = read_json(path)
                after = self._config(before, path.name)
                if after != before:
                    path.write_text(json.dumps(after, indent=2) + "\n", "utf-8")
        if self.chat_template is not None:
            write_template(folder, self.chat_template)

    def _config(self, config: dict[str, Any], name: str) -> dict[str, Any]:
        """Return a config with the number of rows and the token ids of the result."""
        result: dict[str, Any] = json.loads(json.dumps(config))
        text = config.get("text_config")
        size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
        # Without a generation config, transformers takes the token ids of the config.
        source = dict(parts(self.configs.get(name) or self.configs.get("config.json", {})))
        for path, section in list(parts(result)):
            assert isinstance(section, dict)
            if size is not None and section.get("vocab_size") == size:
                section["vocab_size"] = self.rows
            if not self.from_template:
                for key in [key for key in section if TOKEN_KEYS.fullmatch(key)]:
                    del section[key]
                section |= {key: ids for key, ids in source.get(path, {}).items() if TOKEN_KEYS.fullmatch(key)}
        return result


# Chat templates


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template of a folder: "" if its tokenizer has none, None if it has no tokenizer.

    As in transformers, the template file comes before tokenizer_config.json. Of several templates it is the default.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file() and lies_within(path, folder):
        return read_bounded(path, MAX_CONFIG).decode(errors="replace")
    config = readable_json(folder / "tokenizer_config.json")
    if config is None:
        return None
    stored = config.get("chat_template")
    for entry in stored if isinstance(stored, list) else ():
        if isinstance(entry, Mapping) and entry.get("name") == "default":
            stored = entry.get("template")
    return stored if isinstance(stored, str) and stored.strip() else ""


def chat_template_of(checkpoint: Checkpoint) -> str | None:
    """Return the chat template of a model; for an adapter without one, that of its base."""
    stored = [text for folder in folders_of(checkpoint) if (text := read_chat_template(folder)) is not None]
    return next(filter(None, stored), stored[0] if stored else None)


def template_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files that :func:`chat_template_of` depends on."""
    paths = (folder / name for folder in folders_of(checkpoint) for name in (TEMPLATE_FILE, "tokenizer_config.json"))
    return [path for path in paths if path.is_file()]


def template_notes(first: Checkpoint, other: Checkpoint) -> list[str]:
    """Return a note if the chat templates of two models differ."""
    ours, theirs = chat_template_of(first), chat_template_of(other)
    if ours is None or theirs is None or ours.strip() == theirs.strip():
        return []
    difference = "differs from" if theirs else "is missing, unlike"
    return [
        f"{other.label}: its chat template {difference} that of {first.label}. The result has the base's, unless "
        "`chat_template` or `tokenizer` in the recipe selects another"
    ]


def write_template(folder: Path, text: str) -> None:
    """Replace the templates in a folder. The new one goes to a .jinja file, as in transformers, not to the config."""
    for path in files_of(folder, TEMPLATE_FILES):
        path.unlink()
    if text:
        (folder / TEMPLATE_FILE).write_text(text, "utf-8")
    config_path = folder / "tokenizer_config.json"
    if config_path.is_file():
        config = read_json(config_path)
        if config.pop("chat_template", None) is not None:
            config_path.write_text(to_json(config) + "\n", "utf-8")
