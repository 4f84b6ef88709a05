"""The five data sets of the sentiment experiment, written once as files that every later stage reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gradmerge as gm

from ..common.data import evenly, folder_in, write_rows
from .settings import SETS, Settings

SPLITS = ("train", "dev", "test")

Row = dict[str, Any]


def read_local(folder: Path) -> dict[str, dict[str, list[Row]]]:
    """Read NAME/SPLIT.jsonl.gz (or .jsonl, .csv, .parquet) with the columns ``text`` and ``label``.

    The folders are in ``folder`` or in its folder ``text``. A development set may be missing.
    """
    top = folder_in(folder, "text")
    found: dict[str, dict[str, list[Row]]] = {}
    for name in SETS:
        found[name] = {}
        for split in SPLITS:
            files = sorted((top / name).glob(f"{split}.*"))
            if files:
                rows = gm.read_rows(str(files[0])).rows
                found[name][split] = [{"text": str(row["text"]), "label": int(row["label"])} for row in rows]
            elif split != "dev":
                raise gm.InputError(f"{top / name}: there is no file {split}.jsonl.gz (or .jsonl, .csv, .parquet)")
    return found


def normalized(text: str) -> str:
    """Return what two copies of a text have in common: data sets differ in case, spaces and punctuation."""
    return re.sub(r"[\W_]+", "", text.lower())


def _hold_out(rows: Sequence[Row], count: int) -> tuple[list[Row], list[Row]]:
    """Split off ``count`` random rows, the same ones every time; no text is in both parts."""
    chosen = set(np.random.default_rng(0).permutation(len(rows))[:count].tolist())
    dev = [row for index, row in enumerate(rows) if index in chosen]
    texts = {normalized(row["text"]) for row in dev}
    return [row for row in rows if normalized(row["text"]) not in texts], dev


def write_splits(
    folder: Path, sets: Mapping[str, Mapping[str, list[Row]]], settings: Settings
) -> dict[str, dict[str, int]]:
    """Write NAME/SPLIT.jsonl.gz of every data set, and return how many rows each has.

    Development rows whose text is in the training set of any task are dropped, since some sets share sentences.
    """
    made: dict[str, dict[str, list[Row]]] = {}
    for name, given in sets.items():
        splits = dict(given)
        if "dev" not in splits:
            splits["train"], splits["dev"] = _hold_out(splits["train"], settings.dev_rows)
        cuts = {"train": settings.train_rows, "dev": settings.test_rows, "test": settings.test_rows}
        made[name] = {split: evenly(splits[split], cuts[split]) for split in SPLITS}
    trained = {normalized(row["text"]) for splits in made.values() for row in splits["train"]}
    counts: dict[str, dict[str, int]] = {}
    for name, splits in made.items():
        splits["dev"] = [row for row in splits["dev"] if normalized(row["text"]) not in trained]
        if not splits["dev"]:
            raise gm.InputError(f"{name}: every development row is also a training row, so none is left to tune on")
        counts[name] = {split: write_rows(folder / name / f"{split}.jsonl.gz", splits[split]) for split in SPLITS}
    return counts
