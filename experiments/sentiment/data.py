"""The five data sets, from the Hub or a local folder, written once as files that every later stage reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gradmerge as gm

from ..common.data import evenly, folder_in, write_rows

BASE = "imdb"
TASKS = ("yelp", "rotten_tomatoes", "sst2", "amazon")
SETS = (BASE, *TASKS)
TITLES = {"imdb": "IMDB", "yelp": "Yelp", "rotten_tomatoes": "RT", "sst2": "SST2", "amazon": "Amazon"}
SPLITS = ("train", "dev", "test")

Row = dict[str, Any]


@dataclass(frozen=True)
class Hub:
    """Where a data set is on the Hub, and how much of it is used."""

    place: str
    text: tuple[str, ...] = ("text",)
    dev: str | None = None
    test: str = "test"
    first: int | None = None
    """Train on the first so many rows; development rows are those that follow."""


HUB = {
    "imdb": Hub("stanfordnlp/imdb"),
    "yelp": Hub("fancyzhx/yelp_polarity", first=112_000),  # 20 % of 560,000
    "rotten_tomatoes": Hub("cornell-movie-review-data/rotten_tomatoes", dev="validation"),
    "sst2": Hub("stanfordnlp/sst2", text=("sentence",), test="validation"),  # its test set has no labels
    "amazon": Hub("fancyzhx/amazon_polarity", text=("title", "content"), first=360_000),  # 10 % of 3,600,000
}


def from_hub(name: str, dev_rows: int) -> dict[str, list[Row]]:
    """The splits of a data set of the Hub."""
    hub = HUB[name]
    limit = None if hub.first is None else hub.first + dev_rows
    splits = {
        "train": _rows(f"{hub.place}:train", hub.text, limit=limit),
        "test": _rows(f"{hub.place}:{hub.test}", hub.text),
    }
    if hub.dev is not None:
        splits["dev"] = _rows(f"{hub.place}:{hub.dev}", hub.text)
    elif hub.first is not None:
        splits["train"], splits["dev"] = splits["train"][: hub.first], splits["train"][hub.first :]
    return splits


def local_files(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of NAME/SPLIT.jsonl.gz (or .jsonl, .csv, .parquet) in a folder, or in its folder ``text``."""
    top = folder_in(folder, "text")
    found: dict[str, dict[str, Path]] = {}
    for name in SETS:
        found[name] = {}
        for split in SPLITS:
            files = sorted((top / name).glob(f"{split}.*"))
            if files:
                found[name][split] = files[0]
            elif split != "dev":
                raise gm.InputError(f"{top / name}: there is no file {split}.jsonl.gz (or .jsonl, .csv, .parquet)")
    return found


def from_files(files: Mapping[str, Path]) -> dict[str, list[Row]]:
    """The splits of a data set in local files with the columns ``text`` and ``label``."""
    return {split: _rows(str(path), ("text",)) for split, path in files.items()}


def _rows(source: str, columns: Sequence[str], limit: int | None = None) -> list[Row]:
    found = gm.read_rows(source, limit=limit)
    rows = []
    for index, row in enumerate(found.rows):
        for column in (*columns, "label"):
            if column not in row:
                raise gm.InputError(f"{source}: row {index + 1} has no {column!r}")
        if str(row["label"]) not in ("0", "1"):
            raise gm.InputError(
                f"{source}: row {index + 1}: label {row['label']!r} is not 0 (negative) or 1 (positive)"
            )
        rows.append({"text": " ".join(str(row[column]) for column in columns), "label": int(row["label"])})
    return rows


def key(text: str) -> str:
    """What two copies of a text have in common: data sets differ in case, spaces and punctuation."""
    return re.sub(r"[\W_]+", "", text.lower())


def held_out(rows: Sequence[Row], count: int) -> tuple[list[Row], list[Row]]:
    """Training rows without ``count`` random ones, and these; the same ones every time. No text is in both."""
    chosen = set(np.random.default_rng(0).permutation(len(rows))[:count].tolist())
    dev = [row for index, row in enumerate(rows) if index in chosen]
    texts = {key(row["text"]) for row in dev}
    return [row for row in rows if key(row["text"]) not in texts], dev


def write_splits(
    folder: Path,
    sets: Mapping[str, dict[str, list[Row]]],
    *,
    dev_rows: int,
    train_rows: int | None = None,
    test_rows: int | None = None,
) -> dict[str, dict[str, int]]:
    """NAME/SPLIT.jsonl.gz of every data set; how many rows each has, and how many of them are in training sets too.

    Development rows whose text is in the training set of any task are dropped, as some of these sets share sentences.
    """
    made: dict[str, dict[str, list[Row]]] = {}
    for name, given in sets.items():
        splits = dict(given)
        if "dev" not in splits:
            splits["train"], splits["dev"] = held_out(splits["train"], dev_rows)
        cuts = {"train": train_rows, "dev": test_rows, "test": test_rows}
        made[name] = {split: evenly(splits[split], cuts[split]) for split in SPLITS}
    texts = {name: {key(row["text"]) for row in splits["train"]} for name, splits in made.items()}
    trained = set().union(*texts.values())
    counts: dict[str, dict[str, int]] = {}
    for name, splits in made.items():
        splits["dev"] = [row for row in splits["dev"] if key(row["text"]) not in trained]
        counts[name] = {split: write_rows(folder / name / f"{split}.jsonl.gz", splits[split]) for split in SPLITS}
        others = set().union(*(texts[other] for other in texts if other != name))
        counts[name]["train rows in another's train"] = sum(key(row["text"]) in others for row in splits["train"])
        counts[name]["test rows in some train"] = sum(key(row["text"]) in trained for row in splits["test"])
        if not counts[name]["dev"]:
            raise gm.InputError(f"{name}: every development row is in a training set too: there is none to tune on")
    return counts
