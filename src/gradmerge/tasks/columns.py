"""Which column of a data set is what: as the user says, else by the usual names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from ..errors import InputError
from ..text import nearest
from .rows import Rows

#: The keys of ``--columns`` that each task reads.
READS: Mapping[str, tuple[str, ...]] = {
    "classify": ("text", "text2", "label", "labels"),
    "causal-lm": ("text", "prompt", "completion", "messages"),
    "seq2seq": ("source", "target"),
    "image": ("image", "label", "labels"),
    "embedding": ("anchor", "positive", "negative", "score"),
}
#: The keys that hold labels.
LABELS = ("label", "labels", "score")
KEYS = tuple(dict.fromkeys(key for keys in READS.values() for key in keys))

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

#: Anchor and positive; the pairs above serve as well.
ANCHORS = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("query", "document"),
    ("query", "answer"),
    ("question", "answer"),
)
SCORE = ("score", "similarity", "similarity_score", "label", "labels")
Fields = dict[str, tuple[str, ...]]
"""Role → the columns it is read from, in order."""


def parse_columns(text: str | None) -> dict[str, str]:
    """`text=review,label=stars` as a mapping."""
    if not text:
        return {}
    result: dict[str, str] = {}
    for part in text.split(","):
        key, equals, column = (word.strip() for word in part.partition("="))
        if not equals or not key or not column:
            raise InputError(f"--columns {text}: write key=column, such as --columns text=review,label=stars")
        if key in result:
            raise InputError(f"--columns {text}: {key} is given twice. Several columns are joined by +: {key}=a+b")
        result[key] = column
    return result


def choose_columns(task: str, rows: Rows, given: Mapping[str, str] | None, *, labeled: bool = True) -> Fields:
    """The columns that a task reads; without ``labeled`` those of its inputs, and data may lack labels."""
    choice = _Choice(task, rows, given or {}, labeled)
    fields = _CHOOSERS[task](choice)
    return fields if labeled else {role: names for role, names in fields.items() if role not in LABELS}


class _Choice:
    def __init__(self, task: str, rows: Rows, given: Mapping[str, str], labeled: bool) -> None:
        self.task, self.rows, self.labeled = task, rows, labeled
        self.by_name = {name.lower(): name for name in reversed(rows.columns)}
        self.given = {key: self._named(key, value) for key, value in given.items()}

    def _named(self, key: str, value: str) -> tuple[str, ...]:
        if key not in KEYS:
            raise InputError(f"--columns: there is no key {key!r}{nearest(key, KEYS)}\n  Keys are {', '.join(KEYS)}.")
        if key not in READS[self.task]:
            keys = ", ".join(READS[self.task])
            raise InputError(f"--columns: task {self.task} reads no {key!r}; its keys are {keys}")
        names = [value] if value in self.rows.columns else [name.strip() for name in value.split("+")]
        for name in names:
            if name not in self.rows.columns:
                hint = f"{nearest(name, self.rows.columns)}\n  {self.found}"
                raise InputError(f"{self.rows.label}: there is no column {name!r} for {key}{hint}")
        return tuple(names)

    @property
    def found(self) -> str:
        return f"The data has the columns {', '.join(map(str, self.rows.columns))[:2000] or 'none'}."

    def usual(self, names: Sequence[str], taken: Sequence[str] = ()) -> tuple[str, ...] | None:
        """The first usual name that is there and not taken."""
        there = (self.by_name[name] for name in names if name in self.by_name)
        return next(((column,) for column in there if column not in taken), None)

    def only_text(self, taken: Sequence[str]) -> tuple[str, ...] | None:
        """The only column with text that is left, whatever its name."""
        left = [c for c in self.rows.columns if c not in taken and isinstance(self.rows.rows[0].get(c), str)]
        return (left[0],) if len(left) == 1 else None

    def needed(self, found: tuple[str, ...] | None, what: str, example: str) -> tuple[str, ...]:
        """What was found, or an error with an example of how to name it."""
        if found is not None:
            return found
        hint = f"{self.found} Say which is which: --columns {example}"
        raise InputError(f"{self.rows.label}: task {self.task} needs {what}.\n  {hint}")


def _classify(choice: _Choice) -> Fields:
    fields = dict(choice.given)
    key = "labels" if "labels" in fields else "label"
    if "label" in fields and "labels" in fields:
        raise InputError("--columns: give either label (one column) or labels (several, joined by +)")
    given_text = [column for role in ("text", "text2") for column in fields.get(role, ())]
    label = fields.get(key) or choice.usual(LABEL, given_text)
    if label is None and not choice.labeled:
        label = ()
    label = choice.needed(label, "labels", f"text={(*choice.rows.columns, 'COLUMN')[0]},label=COLUMN")
    if "text" not in fields:
        pair = next((p for p in PAIRS if all(n in choice.by_name and choice.by_name[n] not in label for n in p)), None)
        if pair is not None and "text2" not in fields:
            fields["text"], fields["text2"] = ((choice.by_name[name],) for name in pair)
        else:
            taken = (*label, *fields.get("text2", ()))
            text = choice.usual(TEXT, taken) or choice.only_text(taken)
            fields["text"] = choice.needed(text, "a text", f"text=COLUMN,label={'+'.join(label)}")
    return {**fields, key: label}


def _causal_lm(choice: _Choice) -> Fields:
    given = choice.given
    if "messages" in given or "text" in given:
        if len(given) > 1:
            both = " and ".join(given)
            raise InputError(f"--columns: {both} do not go together; give text, messages, or prompt and completion")
        return dict(given)
    for key in ("messages", "text") if not given else ():
        if (found := choice.usual([key])) is not None:
            return {key: found}
    completion = given.get("completion") or choice.usual(COMPLETION, given.get("prompt", ()))
    prompt = given.get("prompt") or choice.usual(PROMPT, completion or ())
    if given:
        completion = choice.needed(completion, "a completion as well", "prompt=COLUMN,completion=COLUMN")
        prompt = choice.needed(prompt, "a prompt as well", "prompt=COLUMN,completion=COLUMN")
    if prompt is not None and completion is not None:
        return {"prompt": prompt, "completion": completion}
    text = choice.usual(TEXT) or choice.only_text(())
    return {"text": choice.needed(text, "a text, or a prompt and its completion", "text=COLUMN")}


def _seq2seq(choice: _Choice) -> Fields:
    target = choice.given.get("target") or choice.usual(TARGET, choice.given.get("source", ()))
    target = choice.needed(target, "a target", "source=COLUMN,target=COLUMN")
    source = choice.given.get("source") or choice.usual(SOURCE, target) or choice.only_text(target)
    source = choice.needed(source, "a source", f"source=COLUMN,target={'+'.join(target)}")
    return {"source": source, "target": target}


def _image(choice: _Choice) -> Fields:
    image = choice.given.get("image") or choice.usual(IMAGE)
    image = choice.needed(image, "images", "image=COLUMN,label=COLUMN")
    key = "labels" if "labels" in choice.given else "label"
    label = choice.given.get(key) or choice.usual(("label", "labels", "fine_label", *LABEL), image)
    if label is None and not choice.labeled:
        label = ()
    return {"image": image, key: choice.needed(label, "labels", f"image={image[0]},label=COLUMN")}


def _embedding(choice: _Choice) -> Fields:
    fields = dict(choice.given)
    if not choice.labeled and "anchor" not in fields:
        names = [name for pair in ANCHORS for name in pair[:1]]
        fields["anchor"] = choice.needed(
            choice.usual([*names, *TEXT]) or choice.only_text(()), "a text", "anchor=COLUMN"
        )
    if not choice.labeled:
        return {"text": fields["anchor"]}
    pair = next((p for p in (*ANCHORS, *PAIRS) if all(name in choice.by_name for name in p)), None)
    for key, place in (("anchor", 0), ("positive", 1)):
        found = (choice.by_name[pair[place]],) if pair is not None else None
        fields[key] = choice.needed(fields.get(key) or found, "two texts", "anchor=COLUMN,positive=COLUMN,score=COLUMN")
    taken = [column for key in fields for column in fields[key]]
    if not {"score", "negative"} & fields.keys():
        negatives = [
            c for c in choice.rows.columns if re.fullmatch(r"negatives?(_?\d+)?", c.lower()) and c not in taken
        ]
        score = choice.usual(SCORE, taken)
        fields |= {"negative": tuple(negatives)} if negatives else {"score": score} if score else {}
    if {"score", "negative"} <= fields.keys():
        raise InputError("--columns: give either score (a number for the pair) or negative (texts to tell apart)")
    return fields


_CHOOSERS: Mapping[str, Callable[[_Choice], Fields]] = {
    "classify": _classify,
    "causal-lm": _causal_lm,
    "seq2seq": _seq2seq,
    "image": _image,
    "embedding": _embedding,
}
