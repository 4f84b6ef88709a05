"""The files of a data set: so that a command writes over none of them, and notices when they change."""

from __future__ import annotations

from pathlib import Path

from ..storage.tensorfile import local_path
from ..tasks.data_sources import place_and_split


def data_paths(source: str | None) -> list[Path]:
    """The file or folder of a data set, whether the source names a split or not; nothing for one of the Hub."""
    if source is None:
        return []
    return [path for text in (source, place_and_split(source, None)[0]) if (path := local_path(text, None)).exists()]
