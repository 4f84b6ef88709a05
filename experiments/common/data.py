"""Rows of data: read from a local folder, and written once as files that every later stage reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

#: The label of a token that does not count.
IGNORED = -100


def folder_in(folder: Path, name: str) -> Path:
    """Return the folder of that name in ``folder``, or ``folder`` itself if there is none."""
    return folder / name if (folder / name).is_dir() else folder


def sizes_of(folder: Path | None) -> list[list[Any]]:
    """Return names and sizes of the files in a folder: a stage that reads them is repeated when they change."""
    if folder is None:
        return []
    return sorted([str(path.relative_to(folder)), path.stat().st_size] for path in folder.rglob("*.*"))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write a .jsonl.gz, and return how many rows it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def evenly(rows: Sequence[Any], count: int | None) -> list[Any]:
    """Return ``count`` rows spread over all of them, since some files are sorted; None is all."""
    if count is None or count >= len(rows):
        return list(rows)
    return [rows[len(rows) * n // count] for n in range(count)]


class Collate:
    """Make rows of token ids, ``input_ids`` and ``labels``, a batch that is padded on the right."""

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        ids = [row["input_ids"] for row in rows]
        labels = [row["labels"] for row in rows]
        # The label of a text is a class, or a label for every token.
        whole = isinstance(labels[0], int)
        return {
            "input_ids": padded(ids, self._pad),
            "attention_mask": padded([[1] * len(row) for row in ids], 0),
            "labels": torch.tensor(labels) if whole else padded(labels, IGNORED),
        }

    def batches(self, rows: Sequence[Mapping[str, Any]], size: int) -> Iterable[dict[str, Tensor]]:
        """Yield all rows in batches, rows of similar length together."""
        ordered = sorted(rows, key=lambda row: len(row["input_ids"]))
        for first in range(0, len(ordered), size):
            yield self(ordered[first : first + size])


def padded(lists: Sequence[Any], filler: int) -> Tensor:
    """Return lists of integers as the rows of a tensor."""
    rows = [torch.as_tensor(one, dtype=torch.long) for one in lists]
    return pad_sequence(rows, batch_first=True, padding_value=filler)
