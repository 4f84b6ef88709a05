"""Rows of data: from a local folder or the Hub, written once as files that every later stage reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """A .jsonl.gz; how many rows it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=3) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count
