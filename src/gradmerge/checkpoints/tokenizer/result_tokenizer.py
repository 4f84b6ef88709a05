"""The tokenizer of a merged model: one model's files, or those of one extended by the tokens of others."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...quiet import quiet_transformers
from ...text import some, to_json
from .vocabulary import PLAIN, SPECIAL, VOCABULARY_FILES, Vocabulary, told_as

#: How words of another vocabulary are found in text that a WordPiece model cuts: as words of their own.
WHOLE = {**PLAIN, "single_word": True, "normalized": True}
#: How far below a Unigram model's least likely token those of others are put: no text is cut with them that can be cut
#: without.
UNLIKELY = 1e4


@dataclass(eq=False)
class ResultTokenizer:
    """The vocabulary of a merge, and the files that go with it."""

    source: Vocabulary
    ids: dict[str, int]
    """Token → row of the result."""
    copied: list[Path]
    """Files of the source, taken as they are."""
    written: dict[str, str] = field(default_factory=dict)
    """Names and contents of files that are made anew."""
    special: dict[str, int] = field(default_factory=dict)
    """`pad_token` and the like, where another model had to give it → its row."""
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Rows that mean something, and those between them."""
        return 1 + max(self.ids.values())


def result_tokenizer(
    source: Vocabulary, others: Sequence[Vocabulary], *, union: bool, named: Sequence[str] = ()
) -> ResultTokenizer:
    """The tokenizer of ``source``; as a ``union`` with the tokens of the others; and with the tokens ``named``.

    The tokens of the source keep their ids. After them come words of the other vocabularies, model by model and in the
    order of their ids, then added tokens, then those named that nobody has.
    """
    words: dict[str, dict[str, Any] | None] = {}
    added: dict[str, dict[str, Any] | None] = {}
    notes: list[str] = []
    for other in others if union else ():
        for token in sorted(other.ids, key=other.ids.__getitem__):
            if token not in source.ids:
                settings = other.added.get(token)
                (words if settings is None else added).setdefault(token, settings)
        notes += _other_settings(source, added, other)
    own_words = [token for token in words if token not in added]
    # Among the words of a WordPiece model they would also be found as parts of others.
    plain = WHOLE if source.tokenizer["model"].get("type") == "WordPiece" else None
    every = dict.fromkeys(own_words, plain) | added
    every |= {token: {**PLAIN, "normalized": True} for token in named if token not in source.ids and token not in every}
    special, more = _special_tokens(source, others, union)
    notes += more
    ids = dict(source.ids) | {token: source.size + place for place, token in enumerate(every)}
    result = ResultTokenizer(source, ids, source.files, notes=notes)
    extra = [token for other in others if union for token in other.extra if token not in source.extra]
    if not every and not special and not extra:
        return result
    result.special = {kind: ids[token] for kind, token in special.items()}
    result.notes += list(_notes_on_words(source, own_words, others))
    result.written = _extended_files(source, ids, every, special, list(dict.fromkeys(extra)))
    legacy = [p for p in source.files if any(fnmatch(p.name, pattern) for pattern in VOCABULARY_FILES.split())]
    result.copied = [p for p in source.files if p not in legacy and p.name not in result.written]
    if legacy:
        names = ", ".join(path.name for path in legacy)
        result.notes.append(f"tokenizer: not copied, since they lack the tokens of other models: {names}")
    _check_loads(result)
    return result


def _other_settings(source: Vocabulary, added: Mapping[str, Any], other: Vocabulary) -> Iterator[str]:
    """Added tokens that are found in text in another way than in the source, or in a model before."""
    known = {**added, **source.added}
    differ = [token for token, settings in other.added.items() if known.get(token, settings) != settings]
    if differ:
        yield f"{other.label}: added tokens with other settings, of which the first model's count: {_tokens(differ)}"


def _special_tokens(source: Vocabulary, others: Sequence[Vocabulary], union: bool) -> tuple[dict[str, str], list[str]]:
    """Special tokens that a union takes from other models, and a note of each that differs."""
    taken: dict[str, str] = {}
    notes: list[str] = []
    for other in others:
        for kind in (kind for kind in SPECIAL if kind in other.special):
            theirs, ours = other.special[kind], source.special.get(kind) or taken.get(kind)
            if ours is None and union:
                taken[kind] = theirs
                notes.append(f"{kind}: {source.label} has none; the result has that of {other.label}, {theirs!r}")
            elif ours is None:
                notes.append(f"{kind}: {theirs!r} in {other.label}, none in {source.label}; the result has none")
            elif ours != theirs:
                whose = source.label if kind in source.special else "another model"
                notes.append(f"{kind}: {ours!r} in {whose}, {theirs!r} in {other.label}; the result has {ours!r}")
    return taken, notes


def _notes_on_words(source: Vocabulary, words: Sequence[str], others: Sequence[Vocabulary]) -> Iterator[str]:
    if not words:
        return
    kind = source.tokenizer["model"].get("type")
    whose = [other.label for other in others if any(word in other.ids for word in words)]
    used = (
        f"where they are whole words of a text they are used, other text is encoded as {source.label} does"
        if kind == "WordPiece" or source.tokenizer["model"].get("ignore_merges")
        else f"text that {source.label} knows is encoded without them, as before"
    )
    yield (
        f"tokenizer: {len(words)} words of other vocabularies than that of {source.label} have rows in the result "
        f"({_tokens(words)}); {used}. To encode text as another model does, name it: `tokenizer: {whose[0]}`"
    )


def _tokens(tokens: Sequence[str]) -> str:
    return some([repr(token) for token in tokens])


def _extended_files(
    source: Vocabulary,
    ids: Mapping[str, int],
    more: Mapping[str, dict[str, Any] | None],
    special: Mapping[str, str],
    extra: Sequence[str],
) -> dict[str, str]:
    """tokenizer.json and the files that name special tokens, with further tokens."""
    added = source.added | {token: settings for token, settings in more.items() if settings is not None}
    # A special token that another model gives is found as a whole, also where this vocabulary has it as a word.
    added |= {token: {**PLAIN, "special": True} for token in (*special.values(), *extra) if token not in added}
    entries = [{"id": ids[token], "content": token, **settings} for token, settings in added.items()]
    tokenizer = {**source.tokenizer, "added_tokens": sorted(entries, key=lambda entry: int(entry["id"]))}
    if any(settings is None for settings in more.values()) or _ids_of(tokenizer) != ids:
        # Ids of added tokens follow from the number of words, unless the words have them too.
        tokenizer["model"] = {**tokenizer["model"], "vocab": _vocabulary(tokenizer["model"], ids, source)}
    if _ids_of(tokenizer) != ids:
        raise InputError(
            f"{source.label}: its tokenizer cannot be extended by the tokens of other models: the tokenizers library "
            "gives them other ids. Name one model as `tokenizer` instead of union"
        )
    config: dict[str, Any] = {**source.config, **special}
    if "added_tokens_decoder" in config:
        config["added_tokens_decoder"] = {
            str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in tokenizer["added_tokens"]
        }
    files = {"tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=2) + "\n"}
    config |= _with_extra(config, extra)
    files["tokenizer_config.json"] = to_json(config) + "\n"
    special_map = source.folder / "special_tokens_map.json"
    if special_map.is_file():
        stated = json.loads(special_map.read_bytes())
        files[special_map.name] = to_json({**stated, **special, **_with_extra(stated, extra)}) + "\n"
    return files


def _with_extra(stated: Mapping[str, Any], extra: Sequence[str]) -> dict[str, Any]:
    """Further special tokens, under the key that has them so far."""
    key = "additional_special_tokens" if "additional_special_tokens" in stated else "extra_special_tokens"
    before = stated.get(key) or []
    if not extra:
        return {}
    if isinstance(before, Mapping):  # by name, as processors have them
        return {key: {**before, **{f"extra_{place}": token for place, token in enumerate(extra)}}}
    return {key: [*before, *extra]}


def _vocabulary(model: Mapping[str, Any], ids: Mapping[str, int], source: Vocabulary) -> Any:
    """The words of a tokenizer's model with every token among them."""
    if isinstance(model["vocab"], Mapping):
        return dict(sorted(ids.items(), key=lambda item: item[1]))
    tokens = sorted(ids, key=ids.__getitem__)
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        raise InputError(
            f"{source.label}: its tokenizer has gaps between its ids, and a Unigram model cannot be extended by the "
            "tokens of other models then. Name one model as `tokenizer` instead of union"
        )
    before = model["vocab"]
    least = min(float(score) for _, score in before) - UNLIKELY
    return [*before, *([token, least] for token in tokens[len(before) :])]


def _ids_of(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token → id as the tokenizers library reads them."""
    from tokenizers import Tokenizer

    with told_as("the tokenizer cannot be read"):
        return dict(Tokenizer.from_str(json.dumps(tokenizer)).get_vocab(with_added_tokens=True))


def _check_loads(result: ResultTokenizer) -> None:
    """Refuse a tokenizer that transformers does not load with the ids that the rows will have."""
    from transformers import AutoTokenizer

    label = result.source.label
    with tempfile.TemporaryDirectory() as place:
        for path in result.copied:
            (Path(place) / path.name).write_bytes(path.read_bytes())
        for name, text in result.written.items():
            (Path(place) / name).write_text(text, "utf-8")
        problem = f"{label}: its tokenizer, extended by the tokens of other models, cannot be loaded by transformers"
        with told_as(f"{problem}. Name one model as `tokenizer` instead of union"), quiet_transformers():
            found = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
            loaded = found.get_vocab()
    # Some classes add tokens that no file has, after all others, as they do for the source.
    wrong = [token for token, number in result.ids.items() if loaded.get(token) != number]
    if wrong:
        raise InputError(
            f"{label}: its tokenizer, extended by the tokens of other models, gets other ids when transformers loads "
            f"it: {_tokens(wrong)}. Name one model as `tokenizer` instead of union"
        )
