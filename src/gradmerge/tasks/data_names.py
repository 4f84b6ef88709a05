"""What data are called in what others will read: without the path to them."""

from __future__ import annotations

import re
from pathlib import Path

from ..urls import remote_url, strip_file_scheme
from .data_sources import HUB, data_paths


def named_data(source: str, parts: int = 1) -> tuple[str, dict[str, str]]:
    """Data as text names them, and as `dataset` of a model index: its type is an id of the Hub, or a name.

    Of a path the last so many ``parts`` are told.
    """
    url = remote_url(source)
    if url is None and not data_paths(source):
        place, _, split = source.partition(":")
        if found := HUB.fullmatch(place):
            facts = {"type": found["name"], "name": found["name"], "config": found["config"], "split": split}
            return source, {key: text for key, text in facts.items() if text}
    path = Path(strip_file_scheme(source)).absolute().parts[1:] if url is None else url.partition("?")[0].split("/")[2:]
    name = "/".join(path[-parts:]) or source
    return name, {"type": dataset_type(name), "name": name}


def dataset_type(name: str) -> str:
    """A name in the form that ids of data sets have."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "data"
