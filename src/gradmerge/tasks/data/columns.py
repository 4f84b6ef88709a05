"""Which column of the data has which role: as the user says, otherwise by common names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import InputError
from ...text import nearest
from .read import Rows

# Common names. The first one that the data has is used.
TEXT = ("text", "sentence", "review", "content", "comment", "document", "tweet", "query", "question", "title", "input")
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text", "text_pair"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
)
#: Anchor and positive. PAIRS are tried next.
ANCHORS = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("query", "document"),
    ("query", "answer"),
    ("question", "answer"),
)
LABEL = ("label", "labels", "fine_label", "target", "class", "stars", "score", "rating", "sentiment", "category", "y")
NEGATIVE = ("negative", "negative_1", "negative_2", "negative_3", "negative_4", "negative_5")
SCORE = ("score", "similarity", "similarity_score", "label", "labels")
PROMPT = ("prompt", "instruction", "input", "question")
COMPLETION = ("completion", "response", "output", "answer")
SOURCE = ("source", "input", "text", "document", "article", "dialogue", "question", "prompt", "instruction")
TARGET = ("target", "output", "summary", "highlights", "response", "answer", "completion", "labels", "label")
IMAGE = ("image", "img", "image_path", "path", "filename", "file_name")

#: Task → the sets of input roles that it can read, each with its common names. The first complete one is used.
INPUTS: Mapping[str, Sequence[Mapping[str, Sequence[str]]]] = {
    "classify": [*({"text": (a,), "text2": (b,)} for a, b in PAIRS), {"text": TEXT}],
    "causal-lm": [
        {"messages": ("messages",)},
        {"text": ("text",)},
        {"prompt": PROMPT, "completion": COMPLETION},
        {"text": TEXT},
    ],
    "seq2seq": [{"source": SOURCE, "target": TARGET}],
    "image": [{"image": IMAGE}],
    "embedding": [{"anchor": (a,), "positive": (b,)} for a, b in (*ANCHORS, *PAIRS)],
}
#: Task → the roles of labels.
LABELS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "classify": {"label": LABEL},
    "image": {"label": LABEL},
    "embedding": {"negative": NEGATIVE, "score": SCORE},
}
#: Roles that the only column with text gets if no column has a common name.
ONLY_TEXT = ("text", "source", "anchor")

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
    inputs, labels = INPUTS[task], LABELS.get(task, {})
    if task == "embedding" and not labeled:
        inputs = [{"anchor": (*(anchor for anchor, _ in ANCHORS), *TEXT)}]
    chosen = _parse_choices(task, rows, columns or {})
    if {"negative", "score"} <= chosen.keys():
        raise InputError("columns: negative and score exclude each other. Give one of them")
    for role, names in labels.items():
        if not labels.keys() & chosen.keys() and (free := _free_columns(rows, chosen, names)):
            chosen[role] = free if role == "negative" else free[:1]
    if task == "classify" and {"text", "text2"} & chosen.keys():
        inputs = inputs[-1:]  # the user has chosen, so no pair is guessed
    for roles in inputs:
        if task == "causal-lm" and not chosen.keys() <= roles.keys():
            continue
        fields = {role: names for role, names in chosen.items() if labeled or role not in labels}
        for role, names in roles.items():
            if role not in fields and (found := _free_columns(rows, fields, names)):
                fields[role] = found[:1]
        for role in roles.keys() - fields.keys():
            if role in ONLY_TEXT and len(texts := _text_columns(rows, fields)) == 1:
                fields[role] = texts
        if roles.keys() <= fields.keys():
            break
    else:
        raise _missing(task, rows, inputs[-1])
    if task == "embedding" and not labeled:
        return {"text": fields["anchor"]}
    if labeled and "label" in labels and "label" not in fields:
        raise _missing(task, rows, [*roles, "label"])
    return {role: fields[role] for role in (*roles, *fields)}


def _parse_choices(task: str, rows: Rows, columns: Mapping[str, str]) -> Fields:
    """Check the user's choices: for each role a column, or several joined by +."""
    known = list(dict.fromkeys([role for roles in (*INPUTS[task], LABELS.get(task, {})) for role in roles]))
    fields: Fields = {}
    for role, value in columns.items():
        if role not in known:
            hint = f"{nearest(role, known)}\n  The keys for task {task} are {', '.join(known)}."
            raise InputError(f"columns: unknown key {role!r}{hint}")
        whole = value in rows.columns or role in ("label", "score")
        fields[role] = (value,) if whole else tuple(name.strip() for name in value.split("+"))
        for name in fields[role]:
            if name not in rows.columns:
                hint = f"{nearest(name, rows.columns)}\n  {_described(rows)}"
                raise InputError(f"{rows.label}: there is no column {name!r} for {role}{hint}")
    return fields


def _free_columns(rows: Rows, fields: Fields, names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns with these names, in any case, that have no role yet."""
    taken = {column for columns in fields.values() for column in columns}
    by_name = {name.lower(): name for name in reversed(rows.columns) if name not in taken}
    return tuple(by_name[name] for name in names if name in by_name)


def _text_columns(rows: Rows, fields: Fields) -> tuple[str, ...]:
    """Return the columns with text that have no role yet."""
    free = _free_columns(rows, fields, [name.lower() for name in rows.columns])
    return tuple(column for column in free if isinstance(rows.rows[0].get(column), str))


def _missing(task: str, rows: Rows, roles: Sequence[str] | Mapping[str, Sequence[str]]) -> InputError:
    example = ",".join(f"{role}=COLUMN" for role in roles)
    return InputError(
        f"{rows.label}: task {task} needs columns for {' and '.join(roles)}.\n  {_described(rows)} "
        f"Name them in `columns`, such as {example}."
    )


def _described(rows: Rows) -> str:
    return f"The data has the columns {', '.join(map(str, rows.columns))[:2000] or 'none'}."
