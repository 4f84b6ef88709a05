"""Rows of data: from a local folder or the Hub, written once as files that every later stage reads."""

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
    """The folder of that name in ``folder``, or, where there is none, ``folder`` itself."""
    return folder / name if (folder / name).is_dir() else folder


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """A .jsonl.gz; how many rows it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def evenly(rows: Sequence[Any], count: int | None) -> list[Any]:
    """So many of the rows, spread over all of them, since some files are sorted; None is all."""
    if count is None or count >= len(rows):
        return list(rows)
    return [rows[len(rows) * n // count] for n in range(count)]


class Collate:
    """Rows of token ids, ``input_ids`` and ``labels``, as one batch, padded on the right; padding never counts."""

    def __init__(self, pad: int) -> None:
        self._pad = pad

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": padded(ids, self._pad),
            "attention_mask": padded([[1] * len(row) for row in ids], 0),
            "labels": padded([row["labels"] for row in rows], IGNORED),
        }


def padded(lists: Sequence[Any], filler: int) -> Tensor:
    """Whole numbers, a row for each list."""
    rows = [torch.as_tensor(one, dtype=torch.long) for one in lists]
    return pad_sequence(rows, batch_first=True, padding_value=filler)
