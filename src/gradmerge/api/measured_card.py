"""Add metrics to the card and the record of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cards.card import evaluation, with_evaluations
from ..cards.metadata import CARD, MAX_CARD, RECORD
from ..errors import InputError
from ..io.atomic_dir import atomic_file
from ..io.small_files import MAX_TOKENIZER, read_bounded, read_json
from ..tasks.data import dataset_metadata, dataset_type
from ..text import to_json
from ..urls import redact, remote_url, strip_file_scheme


class MeasuredCard:
    """The card and the record of a folder that gradmerge wrote."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        if not all((self._folder / name).is_file() for name in (CARD, RECORD)):
            raise InputError(f"card: {folder} is not a folder with {CARD} and {RECORD}, as gradmerge writes them")
        self._read()

    def _read(self) -> tuple[str, dict[str, Any]]:
        card = read_bounded(self._folder / CARD, MAX_CARD).decode("utf-8", "replace")
        record = read_json(self._folder / RECORD, MAX_TOKENIZER)
        if not isinstance(record.setdefault("evaluations", []), list):
            raise InputError(f"{self._folder / RECORD}: evaluations is not a list")
        with_evaluations(card, "", [], str(self._folder / CARD))  # raises if the card cannot be read
        return card, record

    def add(self, source: str | None, numbers: Mapping[str, Any]) -> None:
        """Add metrics on a data set and those of lm-eval; they replace earlier ones on the same data."""
        card, record = self._read()
        new = [self._on_data(source, numbers, record["evaluations"])] if source is not None else []
        for task, metrics in (numbers.get("lm_eval") or {}).items():
            dataset = {"type": dataset_type(task), "name": task}
            new.append(evaluation(task, dataset, metrics, "by the lm-evaluation-harness"))
        replaced = [one["dataset"] for one in new]
        record["evaluations"] = [one for one in record["evaluations"] if one.get("dataset") not in replaced] + new
        card = with_evaluations(card, self._folder.resolve().name, record["evaluations"], str(self._folder / CARD))
        with atomic_file(self._folder / CARD) as partial:
            partial.write_text(card, "utf-8")
        write_record(self._folder, record)

    def _on_data(self, source: str, numbers: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        path = redact(remote_url(source) or "") or str(Path(strip_file_scheme(source)).absolute())
        for parts in range(1, 6):  # as many parts of the path as distinguish files of the same name
            name, dataset = dataset_metadata(source, parts)
            if all(one.get("source") == path for one in earlier if one.get("dataset") == dataset):
                break
        return evaluation(name, dataset, numbers) | {"source": path}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    with atomic_file(folder / RECORD) as partial:
        partial.write_text(redact(to_json(record)) + "\n", "utf-8")
