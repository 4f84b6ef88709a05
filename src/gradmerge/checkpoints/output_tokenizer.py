"""The tokenizer of the result: that of one model, or one extended by the tokens of others. Its files and token ids."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..io.small_files import read_json
from ..text import first_line, some, to_json
from .chat_template import TEMPLATE_PATTERNS, write_template
from .config_diff import parts
from .vocabulary import EXTRA, PLAIN, TOKENIZER_FILES, VOCABULARY_FILES, Vocabulary

WORD = {**PLAIN, "single_word": True, "normalized": True}
"""Settings of added words in a WordPiece tokenizer, so that it does not find them inside other words."""
UNLIKELY = 1e4
"""Added tokens of a Unigram model score so much lower that text without them is encoded as before."""
INSTEAD = "Name one model as `tokenizer` instead of union"
CONFIGS = ("config.json", "generation_config.json")
#: Keys of configs with token ids: `eos_token_id`, `image_token_index`, `bad_words_ids`, ….
TOKEN_KEYS = re.compile(r".*_token_(id|ids|index)|bad_words_ids|(begin_)?suppress_tokens|force_words_ids")


Settings = Mapping[str, dict[str, Any] | None]
"""Added token → its settings; None for a token that goes into the tokenizer's model."""


@dataclass(eq=False)
class OutputTokenizer:
    """The tokens of the result, and its tokenizer files."""

    source: Vocabulary
    ids: dict[str, int]
    """Token → row of the result."""
    copied: list[Path]
    """Files of the source to copy."""
    written: dict[str, str] = field(default_factory=dict)
    """File name → new contents."""
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of rows that the tokens need."""
        return 1 + max(self.ids.values())


def make_tokenizer(
    source: Vocabulary, others: Sequence[Vocabulary], *, union: bool, named: Sequence[str] = ()
) -> OutputTokenizer:
    """Return the tokenizer of ``source``, extended by the tokens ``named``, and with ``union`` by those of ``others``.

    Tokens of the source keep their ids. Then come the words of the other vocabularies, in the order of the models and
    their ids. The other models' added tokens follow, and last the named tokens that no model has.
    """
    words: list[str] = []
    added: dict[str, dict[str, Any] | None] = {}
    notes: list[str] = []
    for other in others:
        for kind, token in other.special.items():
            if source.special.get(kind) != token:
                notes.append(f"{kind}: {token!r} in {other.label}; the result has {source.special.get(kind)!r}")
        new = [token for token in other.by_row if token not in source.ids] if union else []
        added |= {token: other.added[token] for token in new if token in other.added and token not in added}
        words += [token for token in new if token not in other.added]
    words = [token for token in dict.fromkeys(words) if token not in added]
    is_wordpiece = source.tokenizer["model"].get("type") == "WordPiece"
    more: dict[str, dict[str, Any] | None] = dict.fromkeys(words, WORD if is_wordpiece else None)
    more |= added
    more |= {token: {**PLAIN, "normalized": True} for token in named if token not in source.ids and token not in more}
    ids = dict(source.ids) | {token: source.size + number for number, token in enumerate(more)}
    result = OutputTokenizer(source, ids, source.files, notes=notes)
    if not more:
        return result
    if words:
        notes.append(
            f"tokenizer: {len(words)} words of other vocabularies than that of {source.label} have rows in the result "
            f"({_list(words)}), but text that {source.label} can encode is encoded as before. To encode text as another"
            " model does, name that model as `tokenizer`"
        )
    result.written = _extended_files(source, ids, more)
    patterns = ["special_tokens_map.json", *VOCABULARY_FILES.split()]  # these would repeat or lack tokens
    result.copied = [
        path
        for path in source.files
        if path.name not in result.written and not any(fnmatch(path.name, pattern) for pattern in patterns)
    ]
    return result


def _list(tokens: Sequence[str]) -> str:
    return some([repr(token) for token in tokens])


def _extended_files(source: Vocabulary, ids: Mapping[str, int], more: Settings) -> dict[str, str]:
    """Return the contents of tokenizer.json and tokenizer_config.json with the further tokens."""
    added = source.added | {token: settings for token, settings in more.items() if settings is not None}
    entries = sorted(({"id": ids[token], "content": token, **added[token]} for token in added), key=lambda e: e["id"])
    tokenizer = {**source.tokenizer, "added_tokens": entries}
    if any(settings is None for settings in more.values()) or _loaded_ids(tokenizer) != ids:
        # The library numbers added tokens after the words of the model, unless they are words of the model.
        tokenizer["model"] = {**tokenizer["model"], "vocab": _extended_model(tokenizer["model"], ids, source)}
    if _loaded_ids(tokenizer) != ids:
        raise InputError(
            f"{source.label}: its tokenizer cannot be extended by the tokens of other models, because the tokenizers "
            f"library gives them other ids. {INSTEAD}"
        )
    # tokenizer.json has all added tokens, so the config does not repeat them.
    config = {key: value for key, value in source.config.items() if key != "added_tokens_decoder"}
    config = {**source.special, **config}
    if source.extra and not any(key in config for key in EXTRA):  # they were in special_tokens_map.json
        config["extra_special_tokens"] = source.extra
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=2) + "\n",
        "tokenizer_config.json": to_json(config) + "\n",
    }


def _extended_model(model: Mapping[str, Any], ids: Mapping[str, int], source: Vocabulary) -> Any:
    """Return the `vocab` of a tokenizer's model with every token."""
    tokens = sorted(ids, key=ids.__getitem__)
    if isinstance(model["vocab"], Mapping):
        return {token: ids[token] for token in tokens}
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        raise InputError(
            f"{source.label}: its tokenizer has gaps between its ids, and a Unigram model with gaps cannot be extended "
            f"by the tokens of other models. {INSTEAD}"
        )
    score = min(float(score) for _, score in model["vocab"]) - UNLIKELY
    return [*model["vocab"], *([token, score] for token in tokens[len(model["vocab"]) :])]


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
            self._write_tokenizer(folder, self.tokenizer)
            for path in (folder / name for name in CONFIGS):
                if path.is_file():
                    before = read_json(path)
                    after = self._config(before, path.name, self.tokenizer)
                    if after != before:
                        path.write_text(json.dumps(after, indent=2) + "\n", "utf-8")
        if self.chat_template is not None:
            write_template(folder, self.chat_template)

    def _write_tokenizer(self, folder: Path, tokenizer: OutputTokenizer) -> None:
        source = tokenizer.source.folder
        copied = {path.name: path for path in tokenizer.copied}
        removed = TOKENIZER_FILES.split()
        if not self.from_template:
            removed += TEMPLATE_PATTERNS
            paths = (path for pattern in TEMPLATE_PATTERNS for path in source.glob(pattern))
            copied |= {str(path.relative_to(source)): path for path in paths}
        for path in [path for pattern in removed for path in folder.glob(pattern)]:
            path.unlink(missing_ok=True)
        for name, path in copied.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        for name, text in tokenizer.written.items():
            (folder / name).write_text(text, "utf-8")

    def _config(self, config: dict[str, Any], name: str, tokenizer: OutputTokenizer) -> dict[str, Any]:
        """Return a config with the number of rows and the token ids of the result."""
        config = json.loads(json.dumps(config))
        text = config.get("text_config")
        size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
        source = dict(parts(self.configs.get(name, {})))
        named = {f"{kind}_id": tokenizer.ids[token] for kind, token in tokenizer.source.special.items()}
        for path, section in list(parts(config)):
            assert isinstance(section, dict)
            if size is not None and section.get("vocab_size") == size:
                section["vocab_size"] = self.rows
            if self.from_template:
                continue
            for key in [key for key in section if TOKEN_KEYS.fullmatch(key)]:
                value = section.pop(key)
                if name not in self.configs and key in named:
                    section[key] = value if value is None else named[key]
            section.update((key, ids) for key, ids in source.get(path, {}).items() if TOKEN_KEYS.fullmatch(key))
        return dict(config)
