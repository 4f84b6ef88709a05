"""From the keys `tokenizer` and `chat_template` of a recipe to models whose rows mean the same tokens."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.compat.tied_weights import tied_to
from ...checkpoints.open import HUB_ID, fetch_from_hub
from ...checkpoints.tokenizer.chat_template import (
    DEFAULT,
    TEMPLATE_FILES,
    Templates,
    alike,
    chat_templates,
    parsed,
    template_in_file,
)
from ...checkpoints.tokenizer.embedding_rows import (
    ELSEWHERE,
    PADDING,
    Defaults,
    Index,
    VocabularyCheckpoint,
    VocabularyRows,
    vocabulary_tensors,
)
from ...checkpoints.tokenizer.output_tokenizer import CONFIG, GENERATION, ResultFiles
from ...checkpoints.tokenizer.result_tokenizer import ResultTokenizer, result_tokenizer
from ...checkpoints.tokenizer.vocabulary import TOKENIZER_FILES, Vocabulary, vocabulary_of
from ...checkpoints.views import folders_of
from ...errors import InputError
from ...io.reader import local_path
from ...io.small_files import read_json
from ...recipe import ZERO, ModelToken, Recipe, TokenRule
from ...text import counted, listed, nearest, some
from .inputs import CurvatureInput

BASE, UNION, AUTO, COMMON = "base", "union", "auto", "common"


def follow_rows(curvature: CurvatureInput | None, model: Checkpoint) -> None:
    """Have the curvature of a model follow its rows."""
    if curvature is None or curvature.constant is not None or not isinstance(model, VocabularyCheckpoint):
        return
    wide = [name for name in curvature.tokens or () if name in model.rows.names]
    if wide:
        raise InputError(
            f"{curvature.label}: {wide[0]} has Kronecker factors, which cannot follow its rows to another vocabulary. "
            "Exclude it, or estimate the curvature anew with a diagonal for it"
        )
    curvature.rows = model.rows


def with_one_vocabulary(
    recipe: Recipe, base: Checkpoint | None, tuned: Sequence[tuple[str, Checkpoint]]
) -> tuple[dict[Checkpoint, Checkpoint], ResultFiles | None]:
    """What stands for each model in the merge, and what its vocabulary changes beside the weights.

    ``tuned`` are the models with what the recipe calls them. Without the key `tokenizer` they are as they were.
    """
    named = [*([(recipe.base.model, base)] if recipe.base is not None and base is not None else []), *tuned]
    models = _Models(recipe, named, base)
    views: dict[Checkpoint, Checkpoint] = {checkpoint: checkpoint for checkpoint in models.all}
    if recipe.tokenizer is None and recipe.chat_template == AUTO:
        return views, None
    files = ResultFiles()
    folder = next((folder for folder in folders_of(models.template) if chat_templates(folder) is not None), None)
    label = models.template.label
    if recipe.tokenizer is not None:
        alignment = _Alignment(recipe, models)
        views |= alignment.views()
        if recipe.output.format == "adapter" and views[models.template] is not models.template:
            raise InputError(
                "tokenizer: an adapter goes on top of the base with the rows that it has, and the result would have "
                "others. Write a model (`output.format: model`)"
            )
        files = alignment.files()
        folder, label = alignment.source.folder, alignment.source.label
    _choose_template(recipe, models, files, folder, label)
    return views, files


class _Models:
    """The models of a recipe, found by what users call them."""

    def __init__(self, recipe: Recipe, named: Sequence[tuple[str, Checkpoint]], base: Checkpoint | None) -> None:
        self.recipe = recipe
        self.named = list(named)
        self.base = base
        self.all = list(dict.fromkeys(checkpoint for _, checkpoint in named))
        self.template = self.all[0]

    def find(self, name: str) -> Checkpoint | None:
        """The model that the recipe names so: by the same text, the same place, or the last part of its place."""
        if name == BASE:
            return self.template
        place = self.place(name)
        same = (
            lambda text: text == name,
            lambda text: place is not None and self.place(text) == place,
            lambda text: Path(text).name == name,
        )
        for fits in same:
            found = list(dict.fromkeys(checkpoint for text, checkpoint in self.named if fits(text)))
            if found:
                return found[0]
        return None

    def place(self, name: str) -> Path | None:
        """The folder or file of a name, if there is one."""
        with contextlib.suppress(OSError, ValueError):  # a text that can be no path
            found = local_path(name, self.recipe.folder).resolve()
            return found if found.exists() else None
        return None

    def of_rule(self, name: str, where: str) -> Checkpoint:
        found = self.find(name)
        if found is None:
            known = [text for text, _ in self.named]
            raise InputError(f"{where}: {name!r} is no model of the recipe{nearest(name, known)}\n{listed(known)}")
        return found


class _Alignment:
    """The vocabulary of the result, and where each model's rows for it come from."""

    def __init__(self, recipe: Recipe, models: _Models) -> None:
        assert recipe.tokenizer is not None
        self.choice, self.models = recipe.tokenizer, models
        self.vocabularies = {checkpoint: vocabulary_of(checkpoint) for checkpoint in models.all}
        self.tensors = {checkpoint: vocabulary_tensors(checkpoint) for checkpoint in models.all}
        self.notes: list[str] = []
        own = self.vocabularies[models.template]
        self.source = own if self.choice.source in (BASE, UNION) else self._named_source(self.choice.source)
        others = [vocabulary for vocabulary in self.vocabularies.values() if vocabulary is not self.source]
        union = self.choice.source == UNION
        self.tokenizer: ResultTokenizer = result_tokenizer(
            self.source, others, union=union, named=list(self.choice.tokens)
        )
        multiple = self.choice.pad_to_multiple_of or 1
        self.rows = -(-self.tokenizer.size // multiple) * multiple
        self.own = {checkpoint: self._own_rows(checkpoint) for checkpoint in models.all}
        self.defaults = self._default_rows()
        self.notes += self.tokenizer.notes
        self.notes += self._notes()

    def _named_source(self, name: str) -> Vocabulary:
        """The vocabulary of a model of the recipe, or of another place that has a tokenizer."""
        checkpoint = self.models.find(name)
        if checkpoint is not None:
            return self.vocabularies[checkpoint]
        place = self.models.place(name)
        if place is None and HUB_ID.fullmatch(name):
            place = fetch_from_hub(name, patterns=[*TOKENIZER_FILES.split(), CONFIG, GENERATION, *TEMPLATE_FILES])
        if place is not None and place.is_dir():
            return vocabulary_of(Checkpoint(name, folder=place))
        known = [BASE, UNION, *(text for text, _ in self.models.named)]
        raise InputError(
            f"tokenizer: {name!r} is neither base nor union, nor a model of the recipe, nor a folder with a tokenizer"
            f"{nearest(name, known)}"
        )

    def _own_rows(self, checkpoint: Checkpoint) -> Index:
        """For each row of the result, the model's row for the same token."""
        ids, rows = self.vocabularies[checkpoint].ids, self.tensors[checkpoint][0]
        own = np.full(self.rows, PADDING, dtype=np.int64)
        for token, place in self.tokenizer.ids.items():
            number = ids.get(token, ELSEWHERE)
            own[place] = number if number < rows else ELSEWHERE
        return own

    def _default_rows(self) -> Defaults:
        """The rule for tokens that a model lacks: the base's row; where it has none either, the mean of those that do.

        The key `tokens` says otherwise for single tokens, or for all models alike.
        """
        base, every = self.models.base, self.models.all
        given = {checkpoint: np.maximum(own, -1) for checkpoint, own in self.own.items()}
        if base is not None:
            there = given[base] >= 0
            given |= {c: np.where(there, -1, rows) for c, rows in given.items() if c is not base}
        seen: dict[tuple[str, Path | None], Checkpoint] = {}
        for checkpoint in every:  # a model that the recipe names twice counts once
            if seen.setdefault((checkpoint.label, checkpoint.folder), checkpoint) is not checkpoint:
                given[checkpoint] = np.full(self.rows, ELSEWHERE, dtype=np.int64)
        zero = np.zeros(self.rows, dtype=bool)
        for token, rule in self.choice.tokens.items():
            self._apply(token, rule, given, zero)
        counts = np.sum([rows >= 0 for rows in given.values()], axis=0).astype(np.int64)
        lost = np.flatnonzero((counts == 0) & ~zero & (self.own[every[0]] != PADDING))
        if lost.size:
            by_row = {place: token for token, place in self.tokenizer.ids.items()}
            names = [repr(by_row[int(place)]) for place in lost]
            raise InputError(
                f"tokenizer: no model has a row for {counted(names, 'token')} of the result's vocabulary: "
                f"{some(names)}. Say where their rows come from, as in `tokenizer: {{source: "
                f"{self.choice.source}, tokens: {{{names[0]}: zero}}}}`: a model, zero, or {{model: MODEL, token: "
                "TOKEN}"
            )
        return Defaults(every, [given[checkpoint] for checkpoint in every], counts)

    def _apply(self, token: str, rule: TokenRule, given: Mapping[Checkpoint, Index], zero: Index) -> None:
        where, place = f"tokenizer.tokens[{token!r}]", self.tokenizer.ids[token]
        if rule.source is None:
            if rule.force:
                raise InputError(f"{where}: force: true needs a source, from which all models take the row")
            return
        donor, row = None, ELSEWHERE
        if isinstance(rule.source, ModelToken):
            donor = self.models.of_rule(rule.source.model, f"{where}.source.model")
            row = self._row_of(donor, rule.source, where)
        elif rule.source != ZERO:
            donor = self.models.of_rule(rule.source, f"{where}.source")
            row = self._row_of(donor, ModelToken(model=rule.source, token=token), where)
        for checkpoint, rows in given.items():
            rows[place] = row if checkpoint is donor else ELSEWHERE
            if rule.force:
                self.own[checkpoint][place] = ELSEWHERE
        zero[place] = donor is None

    def _row_of(self, donor: Checkpoint, source: ModelToken, where: str) -> int:
        vocabulary, rows = self.vocabularies[donor], self.tensors[donor][0]
        row = source.token_id
        if source.token is not None:
            row = vocabulary.ids.get(source.token)
            if row is None:
                raise InputError(
                    f"{where}: {donor.label} has no token {source.token!r}{nearest(source.token, vocabulary.ids)}"
                )
        assert row is not None
        if row >= rows:
            raise InputError(f"{where}: row {row} is beyond the {rows} rows of {donor.label}")
        return row

    def _notes(self) -> Iterator[str]:
        by_row = {place: token for token, place in self.tokenizer.ids.items()}
        size, tokens = self.tokenizer.size, len(self.tokenizer.ids)
        for checkpoint, own in self.own.items():
            vocabulary, (rows, _) = self.vocabularies[checkpoint], self.tensors[checkpoint]
            beyond = [repr(token) for token, number in vocabulary.ids.items() if number >= rows]
            if beyond:
                yield f"{checkpoint.label}: {counted(beyond, 'token')} with ids beyond its {rows} rows: {some(beyond)}"
            unused = rows - sum(number < rows for number in vocabulary.ids.values())
            if unused:
                yield f"{checkpoint.label}: {unused} of its {rows} rows mean no token and are left out"
            absent = [repr(token) for token in vocabulary.ids if token not in self.tokenizer.ids]
            if absent:
                yield f"{checkpoint.label}: {counted(absent, 'token')} that the result does not have: {some(absent)}"
            lacking = [repr(by_row[int(place)]) for place in np.flatnonzero(own == ELSEWHERE)]
            if lacking:
                rule = self._rule(checkpoint)
                yield f"{checkpoint.label}: lacks {counted(lacking, 'token')} of the result ({some(lacking)}); {rule}"
        if self.rows > tokens:
            between = f", {size - tokens} of them between tokens" if size > tokens else ""
            yield (
                f"tokenizer: {self.rows - tokens} of the result's {self.rows} rows mean no token{between}; they are "
                "the mean of the others"
            )

    def _rule(self, model: Checkpoint) -> str:
        listed_tokens = " or as `tokens` says" if self.choice.tokens else ""
        if self.models.base in (None, model):
            return f"their rows are the mean of those of the models that have them{listed_tokens}"
        assert self.models.base is not None
        return (
            f"their rows are those of {self.models.base.label}, or where it has none the mean of those of the models "
            f"that do{listed_tokens}"
        )

    def views(self) -> dict[Checkpoint, Checkpoint]:
        """Each model in the order of the result's tokens; a model that is so already as it is."""
        found: dict[Checkpoint, Checkpoint] = {}
        expected = self.tensors[self.models.template][1]
        for checkpoint, own in self.own.items():
            rows, names = self.tensors[checkpoint]
            if rows == self.rows and np.array_equal(own, np.arange(rows)):
                continue
            ties = {name: tied_to(name, checkpoint) for name in expected if name not in checkpoint.tensors}
            heads = {name: tied for name, tied in ties.items() if tied in names}
            lines = VocabularyRows(own, rows, frozenset(names))
            found[checkpoint] = VocabularyCheckpoint(checkpoint, lines, self.defaults, heads)
        return found

    def files(self) -> ResultFiles:
        template = self.vocabularies[self.models.template]
        tokens = {number: token for token, number in template.ids.items()}
        from_template = self.source is template

        def number(before: int) -> int | None:
            if before in tokens:
                return self.tokenizer.ids.get(tokens[before])
            return before if from_template and before < self.rows else None

        names = () if from_template else (CONFIG, GENERATION)
        configs = {name: _json(self.source.folder / name) for name in names}
        reads = [path for vocabulary in self.vocabularies.values() for path in vocabulary.files]
        reads += [*self.source.files, *(self.source.folder / name for name in configs)]
        return ResultFiles(
            self.tokenizer,
            self.rows,
            from_template,
            number,
            configs,
            reads=[path for path in dict.fromkeys(reads) if path.is_file()],
            notes=self.notes,
        )


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _choose_template(recipe: Recipe, models: _Models, files: ResultFiles, folder: Path | None, label: str) -> None:
    """The chat template that the recipe asks for; ``folder`` is where that of the result's tokenizer lies."""
    value = recipe.chat_template
    ours = None if folder is None else chat_templates(folder)
    chosen: Templates | None = ours
    if value == AUTO:
        pass
    elif value == COMMON:
        found = [(model.label, chat_templates(inside)) for model in models.all for inside in folders_of(model)]
        texts = [(owner, one[DEFAULT].strip()) for owner, one in found if one and one.get(DEFAULT, "").strip()]
        if texts:  # of several that are as common, that of the first model
            (text, _), *_ = Counter(text for _, text in texts).most_common(1)
            label = next(owner for owner, own in texts if own == text)
            chosen = {DEFAULT: text}
        inside = [folder for model in models.all for folder in folders_of(model)]
        files.reads += [path for folder in inside for path in _template_files(folder)]
    elif "{" in value or "\n" in value:
        label, chosen = "the recipe", {DEFAULT: parsed(value, "chat_template")}
    elif (model := models.find(value)) is not None:
        label = model.label
        chosen = next((found for found in map(chat_templates, folders_of(model)) if found), {})
        if not chosen and value != BASE:
            raise InputError(f"chat_template: {label} has none")
        files.reads += [path for inside in folders_of(model) for path in _template_files(inside)]
    elif (place := models.place(value)) is not None and place.is_file():
        label, chosen = value, template_in_file(place)
        files.reads.append(place)
    else:
        known = [AUTO, BASE, COMMON, *(text for text, _ in models.named)]
        raise InputError(f"chat_template: {value!r} is neither a model of the recipe nor a file{nearest(value, known)}")
    if chosen is not None and (ours is None or not alike(chosen, ours)):
        files.templates = chosen
    for checkpoint in models.all:
        theirs = next((found for found in map(chat_templates, folders_of(checkpoint)) if found is not None), None)
        if theirs is not None and not alike(theirs, chosen or {}):
            what = "has a chat template, unlike" if not chosen else "its chat template is not that of"
            what = what if theirs else "has no chat template, unlike"
            files.notes.append(
                f"{checkpoint.label}: {what} {label}; the result has that of {label}{'' if chosen else ': none'}"
            )


def _template_files(folder: Path) -> list[Path]:
    patterns = (*TEMPLATE_FILES, "tokenizer_config.json")
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
