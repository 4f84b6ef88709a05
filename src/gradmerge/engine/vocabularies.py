"""Apply the keys `tokenizer` and `chat_template` of a recipe: vocabulary rows, tokenizer files and chat templates."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..checkpoints.checkpoint import Checkpoint, is_same
from ..checkpoints.embedding_rows import (
    MISSING,
    PADDING,
    Index,
    VocabularyCheckpoint,
    VocabularyRows,
    vocabulary_tensors,
)
from ..checkpoints.tied_weights import tied_to
from ..checkpoints.tokenizer import (
    CONFIGS,
    ResultFiles,
    chat_template_of,
    make_tokenizer,
    read_chat_template,
    template_files,
    vocabulary_of,
)
from ..errors import InputError
from ..io.reader import local_path
from ..io.small_files import MAX_CONFIG, read_bounded, read_json
from ..recipe import ZERO, ModelToken, Recipe, TokenizerChoice, TokenRule
from ..text import counted, listed, nearest, some
from .settings import reads_base

BASE, UNION, AUTO, COMMON = "base", "union", "auto", "common"


def with_one_vocabulary(
    recipe: Recipe, base: Checkpoint | None, tuned: Sequence[tuple[str, Checkpoint]]
) -> tuple[dict[Checkpoint, Checkpoint], ResultFiles | None]:
    """Apply `tokenizer` and `chat_template`.

    Args:
        recipe: The recipe.
        base: The opened base.
        tuned: The opened models, each with its reference in the recipe.

    Returns:
        The checkpoint to merge in place of each model, and the changes to the tokenizer files (None: no changes).
    """
    models = _Models(recipe, base, tuned)
    views = {model: model for model in models.all}
    if recipe.tokenizer is None and recipe.chat_template == AUTO and models.template_donor is models.template:
        return views, None
    files = ResultFiles()
    current, label = chat_template_of(models.template), models.template.label
    if recipe.tokenizer is not None:
        alignment = _Alignment(recipe.tokenizer, models)
        views |= alignment.views()
        if recipe.output.format == "adapter" and views[models.template] is not models.template:
            raise InputError(
                "tokenizer: an adapter cannot change the vocabulary rows of its base. Write a model "
                "(`output.format: model`)"
            )
        files = alignment.files()
        current, label = read_chat_template(alignment.source.folder), alignment.source.label
    chosen, label = _choose_template(recipe, models, files, current, label)
    if chosen is not None and (current is None or chosen.strip() != current.strip()):
        files.chat_template = chosen
    files.reads += [path for model in models.all for path in template_files(model) if path not in files.reads]
    if label != models.template.label:
        files.notes.append(f"chat_template: the result has that of {label}" + ("" if chosen else ", which has none"))
    return views, files


class _Models:
    """The models of a recipe, which it references by path or name."""

    def __init__(self, recipe: Recipe, base: Checkpoint | None, tuned: Sequence[tuple[str, Checkpoint]]) -> None:
        self.recipe = recipe
        self.base = base
        self.named = [*([(recipe.base.model, base)] if recipe.base is not None and base is not None else []), *tuned]
        self.all = list(dict.fromkeys(model for _, model in self.named))
        self.template = self.all[0]
        """The model that config, tokenizer and other small files are copied from."""
        self.base_first = base is not None
        """Whether missing rows come from the base. A base that is not merged only gives tokens that no model has."""
        if recipe.slices and all(model is not base for _, model in tuned):
            self.base_first = self.base_first and reads_base(recipe, recipe.rule.needs(recipe.resolved_options))
        self.template_donor = self.template
        """The model whose chat template the result gets: the base, or else the first named merge that has a base."""
        if base is None:
            with_base = [text for text, merge in recipe.merges.items() if merge.base is not None]
            donors = (model for text, model in tuned if text in with_base and chat_template_of(model) is not None)
            self.template_donor = next(donors, self.template)

    @property
    def distinct(self) -> list[Checkpoint]:
        """The models, without those that read the same files as a model before them."""
        distinct: list[Checkpoint] = []
        for model in self.all:
            if not any(is_same(model, other) for other in distinct):
                distinct.append(model)
        return distinct

    def find(self, name: str) -> Checkpoint | None:
        """Find a model by its reference, its path, or the last part of its reference."""
        if name == BASE:
            return self.template
        path = self.path(name)
        matching = (
            lambda text: text == name,
            lambda text: path is not None and self.path(text) == path,
            lambda text: Path(text).name == name,
        )
        return next((model for matches in matching for text, model in self.named if matches(text)), None)

    def path(self, name: str) -> Path | None:
        """Return the absolute path of a reference if it exists."""
        with contextlib.suppress(OSError, ValueError):  # the text is not a possible path
            path = local_path(name, self.recipe.folder).resolve()
            return path if path.exists() else None
        return None

    def require(self, name: str, where: str) -> Checkpoint:
        """Find a model, or raise an error that lists the models."""
        model = self.find(name)
        if model is None:
            known = [text for text, _ in self.named]
            raise InputError(f"{where}: {name!r} is not a model of the recipe{nearest(name, known)}\n{listed(known)}")
        return model


class _Alignment:
    """The vocabulary of the result, and the row of each model for each of its rows."""

    def __init__(self, choice: TokenizerChoice, models: _Models) -> None:
        self.choice, self.models = choice, models
        self.vocabularies = {model: vocabulary_of(model) for model in models.all}
        self.tensors = {model: vocabulary_tensors(model) for model in models.all}
        union = choice.source == UNION
        source = models.template if union else models.require(choice.source, "tokenizer")
        self.source = self.vocabularies[source]
        others = [vocabulary for model, vocabulary in self.vocabularies.items() if model is not source]
        self.tokenizer = make_tokenizer(self.source, others, union=union, named=list(choice.tokens))
        multiple = choice.pad_to_multiple_of or 1
        self.rows = -(-self.tokenizer.size // multiple) * multiple
        self.rows_of = {model: self._rows_of(model) for model in models.all}
        self.donors = self._donors()

    def _rows_of(self, model: Checkpoint) -> Index:
        """Return the model's row for each row of the result."""
        ids, count = self.vocabularies[model].ids, self.tensors[model][0]
        rows = np.full(self.rows, PADDING, dtype=np.int64)
        for token, row in self.tokenizer.ids.items():
            rows[row] = ids[token] if ids.get(token, count) < count else MISSING
        return rows

    def _donors(self) -> list[tuple[Checkpoint, Index]]:
        """Return the rows that each model gives to models that lack a token.

        The base gives its row. For tokens that the base lacks, the result is the mean over the models that have a row;
        a model that the recipe names twice counts once. A base that is not merged gives its row only if no other model
        can. Rules in `tokens` replace this for single tokens.
        """
        base = self.models.base
        donors = {model: np.full(self.rows, MISSING, dtype=np.int64) for model in self.rows_of}
        for model in self.models.distinct:
            donors[model] = np.maximum(self.rows_of[model], MISSING)
        if base is not None:
            others = [rows for model, rows in donors.items() if model is not base]
            first, later = ([donors[base]], others) if self.models.base_first else (others, [donors[base]])
            taken = np.any([rows >= 0 for rows in first], axis=0)
            for rows in later:
                rows[taken] = MISSING
        for token, rule in self.choice.tokens.items():
            self._apply(token, rule, donors)
        has_row = np.any([rows >= 0 for rows in donors.values()], axis=0)
        zeros = [self.tokenizer.ids[token] for token, rule in self.choice.tokens.items() if rule.source == ZERO]
        has_row[zeros] = True
        if tokens := self._tokens((self.rows_of[self.models.template] != PADDING) & ~has_row):
            raise InputError(
                f"tokenizer: no model has a row for {counted(tokens, 'token')} of the result: {some(tokens)}. Name "
                f"sources for their rows, for example `tokenizer: {{source: {self.choice.source}, tokens: "
                f"{{{tokens[0]}: zero}}}}`. A source is a model, zero, or {{model: MODEL, token: TOKEN}}"
            )
        return list(donors.items())

    def _apply(self, token: str, rule: TokenRule, donors: dict[Checkpoint, Index]) -> None:
        """Apply the rule for the row of one token."""
        where, row, source = f"tokenizer.tokens[{token!r}]", self.tokenizer.ids[token], rule.source
        if source is None:
            if rule.force:
                raise InputError(f"{where}: force: true needs a source")
            return
        for rows in [*donors.values(), *(self.rows_of.values() if rule.force else ())]:
            rows[row] = MISSING
        if source == ZERO:
            return
        if not isinstance(source, ModelToken):
            source = ModelToken(model=source, token=token)
        donor = self.models.require(source.model, f"{where}.source")
        ids, count = self.vocabularies[donor].ids, self.tensors[donor][0]
        donor_row = source.token_id if source.token is None else ids.get(source.token)
        if donor_row is None:
            raise InputError(f"{where}: {donor.label} has no token {source.token!r}{nearest(str(source.token), ids)}")
        if donor_row >= count:
            raise InputError(f"{where}: {donor.label} has {count} rows, and so no row {donor_row}")
        donors[donor][row] = donor_row

    def _tokens(self, chosen: NDArray[np.bool_]) -> list[str]:
        """Return the tokens of some rows."""
        return [repr(token) for token, row in self.tokenizer.ids.items() if chosen[row]]

    def views(self) -> dict[Checkpoint, Checkpoint]:
        """Return the models whose rows change, with their rows in the order of the result."""
        views: dict[Checkpoint, Checkpoint] = {}
        heads = self.tensors[self.models.template][1]
        for model, rows in self.rows_of.items():
            count, names = self.tensors[model]
            if count == self.rows and np.array_equal(rows, np.arange(count)):
                continue
            ties = {name: tied_to(name, model) for name in sorted(heads) if name not in model.tensors}
            tied = {name: embedding for name, embedding in ties.items() if embedding in names}
            views[model] = VocabularyCheckpoint(model, VocabularyRows(rows, count, names), self.donors, tied)
        return views

    def files(self) -> ResultFiles:
        """Return the tokenizer files and token ids of the result."""
        from_template = self.source is self.vocabularies[self.models.template]
        configs = [] if from_template else [self.source.folder / name for name in CONFIGS]
        reads = [path for vocabulary in self.vocabularies.values() for path in vocabulary.files]
        return ResultFiles(
            self.tokenizer,
            self.rows,
            from_template,
            {path.name: read_json(path) for path in configs if path.is_file()},
            reads=[path for path in dict.fromkeys([*reads, *configs]) if path.is_file()],
            notes=[*self.tokenizer.notes, *self._notes()],
        )

    def _notes(self) -> Iterator[str]:
        base = self.models.base
        for model, rows in self.rows_of.items():
            if missing := self._tokens(rows == MISSING):
                by_base = base is not None and base is not model and self.models.base_first
                donor = f"{base.label}, else " if base is not None and by_base else ""
                rules = " or `tokens`" if self.choice.tokens else ""
                yield (
                    f"{model.label}: no rows for {counted(missing, 'token')} of the result ({some(missing)}); they "
                    f"come from {donor}the mean over the models that have them{rules}"
                )


def _choose_template(
    recipe: Recipe, models: _Models, files: ResultFiles, current: str | None, label: str
) -> tuple[str | None, str]:
    """Return the chat template that the recipe chooses, and where it comes from.

    ``current`` is that of the result's tokenizer, which comes from the model ``label``. ``files`` gets what is read.
    """
    value = recipe.chat_template
    if value == AUTO:
        from_template = recipe.tokenizer is None or recipe.tokenizer.source in (BASE, UNION)
        if models.template_donor is models.template or not from_template:
            return current, label
        return chat_template_of(models.template_donor), models.template_donor.label
    if value == COMMON:
        every = dict.fromkeys((models.template_donor, *models.distinct))
        texts = {model: text for model in every if (text := (chat_template_of(model) or "").strip())}
        if not texts:
            return current, label
        chosen = Counter(texts.values()).most_common(1)[0][0]  # the donor's is first, so it wins a tie
        return chosen, next(model.label for model, text in texts.items() if text == chosen)
    if "{" in value or "\n" in value:
        return value, "the recipe"
    if (model := models.find(value)) is not None:
        template = chat_template_of(model) or ""
        if not template and value != BASE:
            raise InputError(f"chat_template: {model.label} has none")
        return template, model.label
    if (path := models.path(value)) is not None and path.is_file():
        files.reads.append(path)
        return read_bounded(path, MAX_CONFIG).decode(errors="replace"), value
    known = [AUTO, BASE, COMMON, *(text for text, _ in models.named)]
    raise InputError(f"chat_template: {value!r} is not a model of the recipe or a file{nearest(value, known)}")
