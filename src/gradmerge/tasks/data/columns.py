"""Which column of the data has which role: as the user says, otherwise by common names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ...errors import InputError
from ...text import nearest
from .read import Rows

#: The roles that each task reads, which are the keys of ``columns``.
ROLES: Mapping[str, tuple[str, ...]] = {
    "classify": ("text", "text2", "label", "labels"),
    "causal-lm": ("text", "prompt", "completion", "messages"),
    "seq2seq": ("source", "target"),
    "image": ("image", "label", "labels"),
    "embedding": ("anchor", "positive", "negative", "score"),
}
LABEL_ROLES = ("label", "labels", "score")

# Common names. The first one that the data has is used.
TEXT = (
    *("text", "sentence", "review", "content", "comment", "document", "tweet", "message", "utterance", "query"),
    *("question", "title", "body", "input"),
)
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("sentence_1", "sentence_2"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_1", "text_2"),
    ("text", "text_pair"),
    ("text", "text2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question", "context"),
    ("query", "passage"),
)
LABEL = (
    *("label", "labels", "target", "class", "stars", "score", "rating", "sentiment", "category", "topic", "intent"),
    *("emotion", "y"),
)
PROMPT = ("prompt", "instruction", "input", "question")
COMPLETION = ("completion", "response", "output", "answer")
SOURCE = (
    *("source", "input", "inputs", "text", "document", "article", "dialogue", "question", "prompt", "instruction"),
    "history",
)
TARGET = (
    *("target", "targets", "output", "outputs", "summary", "highlights", "response", "answer", "completion"),
    *("labels", "label"),
)
IMAGE = ("image", "img", "picture", "pixels", "image_path", "file", "path", "filename", "file_name")
#: Anchor and positive. PAIRS are tried next.
ANCHORS = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("query", "document"),
    ("query", "answer"),
    ("question", "answer"),
)
SCORE = ("score", "similarity", "similarity_score", "label", "labels")

Columns = tuple[str, ...]
"""The columns of a role, in order. Several are joined."""
Fields = dict[str, Columns]
"""Role → its columns."""


def parse_columns(text: str | None) -> dict[str, str]:
    """Parse `text=review,label=stars` from the command line."""
    result: dict[str, str] = {}
    for part in text.split(",") if text else ():
        role, equals, column = (word.strip() for word in part.partition("="))
        if not equals or not role or not column:
            raise InputError(f"--columns {text}: write KEY=COLUMN, such as --columns text=review,label=stars")
        if role in result:
            raise InputError(f"--columns {text}: {role} is repeated. Join several columns by +, such as {role}=a+b")
        result[role] = column
    return result


def choose_columns(task: str, rows: Rows, columns: Mapping[str, str] | None, *, labeled: bool = True) -> Fields:
    """Return the columns of each role that the task reads. Without ``labeled``, the roles of its inputs only."""
    chooser = _Chooser(task, rows, columns or {}, labeled)
    fields = _CHOOSERS[task](chooser)
    return {role: names for role, names in fields.items() if names and (labeled or role not in LABEL_ROLES)}


class _Chooser:
    def __init__(self, task: str, rows: Rows, columns: Mapping[str, str], labeled: bool) -> None:
        self.task, self.rows, self.labeled = task, rows, labeled
        self.by_name = {name.lower(): name for name in reversed(rows.columns)}
        self.given = {role: self._parse(role, value) for role, value in columns.items()}

    def _parse(self, role: str, value: str) -> Columns:
        """Check the user's choice for a role: a column, or several joined by +."""
        roles = ROLES[self.task]
        if role not in roles:
            known = f"{nearest(role, roles)}\n  The keys for task {self.task} are {', '.join(roles)}."
            raise InputError(f"columns: unknown key {role!r}{known}")
        names = (value,) if value in self.rows.columns else tuple(name.strip() for name in value.split("+"))
        for name in names:
            if name not in self.rows.columns:
                hint = f"{nearest(name, self.rows.columns)}\n  {self._known()}"
                raise InputError(f"{self.rows.label}: there is no column {name!r} for {role}{hint}")
        return names

    def _known(self) -> str:
        return f"The data has the columns {', '.join(map(str, self.rows.columns))[:2000] or 'none'}."

    def find(self, role: str, names: Sequence[str], taken: Sequence[str] = (), *, only_text: bool = False) -> Columns:
        """The user's choice, else the first common name that is not taken, else with ``only_text`` the only text."""
        if role in self.given:
            return self.given[role]
        known = [self.by_name[name] for name in names if name in self.by_name]
        free = [column for column in known if column not in taken]
        if only_text and not free:
            texts = [c for c in self.rows.columns if c not in taken and isinstance(self.rows.rows[0].get(c), str)]
            free = texts if len(texts) == 1 else []
        return tuple(free[:1])

    def find_pair(self, pairs: Sequence[tuple[str, str]], taken: Sequence[str] = ()) -> Columns:
        """The columns of the first pair that the data has."""
        found = [tuple(self.by_name[name] for name in pair if name in self.by_name) for pair in pairs]
        return next((pair for pair in found if len(pair) == 2 and not set(pair) & set(taken)), ())

    def require(self, columns: Columns, what: str, example: str) -> Columns:
        """Return the columns, or raise an error with an example of how to name them."""
        if not columns:
            hint = f"{self._known()} Name the columns in `columns`, such as {example}."
            raise InputError(f"{self.rows.label}: task {self.task} needs {what}.\n  {hint}")
        return columns

    def find_label(self, names: Sequence[str], taken: Sequence[str], example: str) -> Fields:
        if {"label", "labels"} <= self.given.keys():
            raise InputError("columns: give either label (one column) or labels (several, joined by +)")
        role = "labels" if "labels" in self.given else "label"
        columns = self.find(role, names, taken)
        return {role: self.require(columns, "labels", example) if self.labeled else columns}


def _classify(chooser: _Chooser) -> Fields:
    texts = {role: chooser.given[role] for role in ("text", "text2") if role in chooser.given}
    example = f"text={(*chooser.rows.columns, 'COLUMN')[0]},label=COLUMN"
    labels = chooser.find_label(LABEL, [name for names in texts.values() for name in names], example)
    [label] = labels.values()
    if not texts and (pair := chooser.find_pair(PAIRS, label)):
        texts = {"text": pair[:1], "text2": pair[1:]}
    if "text" not in texts:
        text = chooser.find("text", TEXT, (*label, *texts.get("text2", ())), only_text=True)
        texts["text"] = chooser.require(text, "a text", f"text=COLUMN,label={'+'.join(label)}")
    return texts | labels


def _causal_lm(chooser: _Chooser) -> Fields:
    given = chooser.given
    if "messages" in given or "text" in given:
        if len(given) > 1:
            both = " and ".join(given)
            raise InputError(f"columns: {both} exclude each other. Give text, messages, or prompt and completion")
        return dict(given)
    for role in () if given else ("messages", "text"):
        if columns := chooser.find(role, [role]):
            return {role: columns}
    completion = chooser.find("completion", COMPLETION, given.get("prompt", ()))
    prompt = chooser.find("prompt", PROMPT, completion)
    if given or (prompt and completion):
        example = "prompt=COLUMN,completion=COLUMN"
        chooser.require(completion, "a completion as well", example)
        return {"prompt": chooser.require(prompt, "a prompt as well", example), "completion": completion}
    text = chooser.find("text", TEXT, only_text=True)
    return {"text": chooser.require(text, "a text, or a prompt and its completion", "text=COLUMN")}


def _seq2seq(chooser: _Chooser) -> Fields:
    target = chooser.find("target", TARGET, chooser.given.get("source", ()))
    chooser.require(target, "a target", "source=COLUMN,target=COLUMN")
    source = chooser.find("source", SOURCE, target, only_text=True)
    return {"source": chooser.require(source, "a source", f"source=COLUMN,target={'+'.join(target)}"), "target": target}


def _image(chooser: _Chooser) -> Fields:
    image = chooser.require(chooser.find("image", IMAGE), "images", "image=COLUMN,label=COLUMN")
    labels = chooser.find_label(("label", "labels", "fine_label", *LABEL), image, f"image={image[0]},label=COLUMN")
    return {"image": image, **labels}


def _embedding(chooser: _Chooser) -> Fields:
    given = chooser.given
    if not chooser.labeled:
        text = chooser.find("anchor", [*(anchor for anchor, _ in ANCHORS), *TEXT], only_text=True)
        return {"text": chooser.require(text, "a text", "anchor=COLUMN")}
    if {"score", "negative"} <= given.keys():
        raise InputError("columns: give either score (a number for the pair) or negative (texts to tell apart)")
    pair = chooser.find_pair((*ANCHORS, *PAIRS))
    fields = {"anchor": given.get("anchor", pair[:1]), "positive": given.get("positive", pair[1:])}
    for columns in fields.values():
        chooser.require(columns, "two texts", "anchor=COLUMN,positive=COLUMN,score=COLUMN")
    taken = [column for columns in fields.values() for column in columns]
    if "score" not in given:
        pattern = re.compile(r"negatives?(_?\d+)?", re.IGNORECASE)
        negatives = [name for name in chooser.rows.columns if pattern.fullmatch(name) and name not in taken]
        fields["negative"] = given.get("negative", tuple(negatives))
    if not fields.get("negative"):
        fields["score"] = chooser.find("score", SCORE, taken)
    return fields


_CHOOSERS: Mapping[str, Callable[[_Chooser], Fields]] = {
    "classify": _classify,
    "causal-lm": _causal_lm,
    "seq2seq": _seq2seq,
    "image": _image,
    "embedding": _embedding,
}
