"""Which column of the data has which role: as the user says, otherwise by common names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
#: Roles of which the user may name one.
EXCLUSIVE = (
    ("label", "labels"),
    ("text", "prompt"),
    ("text", "completion"),
    ("messages", "text"),
    ("messages", "prompt"),
    ("messages", "completion"),
    ("score", "negative"),
)

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

Fields = dict[str, tuple[str, ...]]
"""Role → its columns. Several columns are joined."""


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
    chooser = _Chooser(task, rows, columns or {})
    fields, find = chooser.fields, chooser.find
    label = "labels" if "labels" in fields else "label"
    if task == "classify":
        required = ["text", label]
        find(label, LABEL)
        if "text" not in fields and "text2" not in fields:
            chooser.find_pair(("text", "text2"), PAIRS)
        find("text", TEXT, only_text=True)
    elif task == "causal-lm":
        required = chooser.find_language()
    elif task == "seq2seq":
        required = ["source", "target"]
        find("target", TARGET)
        find("source", SOURCE, only_text=True)
    elif task == "image":
        required = ["image", label]
        find("image", IMAGE)
        find(label, ("label", "labels", "fine_label", *LABEL))
    elif not labeled:
        required = ["anchor"]
        find("anchor", [*(anchor for anchor, _ in ANCHORS), *TEXT], only_text=True)
    else:
        required = ["anchor", "positive"]
        chooser.find_pair(("anchor", "positive"), (*ANCHORS, *PAIRS))
        negatives = [name for name in chooser.free() if re.fullmatch(r"negatives?(_?\d+)?", name, re.IGNORECASE)]
        if negatives and "score" not in fields:
            fields.setdefault("negative", tuple(negatives))
        if "negative" not in fields:
            find("score", SCORE)
    chooser.require([role for role in required if labeled or role not in LABEL_ROLES])
    if task == "embedding" and not labeled:
        return {"text": fields["anchor"]}
    return {role: names for role, names in fields.items() if labeled or role not in LABEL_ROLES}


class _Chooser:
    """The columns that the user has chosen, and those that are found for other roles."""

    def __init__(self, task: str, rows: Rows, columns: Mapping[str, str]) -> None:
        self.task, self.rows = task, rows
        self.by_name = {name.lower(): name for name in reversed(rows.columns)}
        self.fields: Fields = {role: self._parse(role, value) for role, value in columns.items()}
        for pair in EXCLUSIVE:
            if len(self.fields.keys() & set(pair)) > 1:
                raise InputError(f"columns: {' and '.join(pair)} exclude each other. Give one of them")

    def _parse(self, role: str, value: str) -> tuple[str, ...]:
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

    def free(self) -> list[str]:
        """Return the columns without a role."""
        taken = [column for columns in self.fields.values() for column in columns]
        return [column for column in self.rows.columns if column not in taken]

    def find(self, role: str, names: Sequence[str], *, only_text: bool = False) -> None:
        """Choose the first common name, or with ``only_text`` the only column with text."""
        free = self.free()
        known = [self.by_name[name] for name in names if self.by_name.get(name) in free]
        if only_text and not known:
            known = [column for column in free if isinstance(self.rows.rows[0].get(column), str)]
            known = known if len(known) == 1 else []
        if known:
            self.fields.setdefault(role, (known[0],))

    def find_pair(self, roles: tuple[str, str], pairs: Sequence[tuple[str, str]]) -> None:
        """Choose the first pair of common names that the data has."""
        possible = [*self.free(), *(column for role in roles for column in self.fields.get(role, ()))]
        for pair in pairs:
            if all(self.by_name.get(name) in possible for name in pair):
                for role, name in zip(roles, pair, strict=True):
                    self.fields.setdefault(role, (self.by_name[name],))
                return

    def find_language(self) -> list[str]:
        """Choose a text, messages, or a prompt with its completion. Return the roles that are required."""
        user_chose = bool(self.fields)
        if not user_chose:
            self.find("messages", ["messages"])
        if not self.fields:
            self.find("text", ["text"])
        if self.fields.keys() & {"text", "messages"}:
            return []
        self.find("completion", COMPLETION)
        self.find("prompt", PROMPT)
        if user_chose or len(self.fields) == 2:
            return ["prompt", "completion"]
        self.fields.clear()
        self.find("text", TEXT, only_text=True)
        return ["text"]

    def require(self, roles: Sequence[str]) -> None:
        """Raise if a role has no column, with an example of how to name it."""
        if all(role in self.fields for role in roles):
            return
        example = ",".join(f"{role}={'+'.join(self.fields.get(role, ['COLUMN']))}" for role in roles)
        raise InputError(
            f"{self.rows.label}: task {self.task} needs columns for {' and '.join(roles)}.\n  {self._known()} "
            f"Name them in `columns`, such as {example[:500]}."
        )
