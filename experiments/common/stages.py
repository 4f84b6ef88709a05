"""Stages of an experiment: a stage is skipped if an earlier run did it with the same settings."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RECORD = "stage.json"
"""File in the folder of a finished stage: the hash of its settings, its result, and how long it took."""


def run_stage(folder: Path, make: Callable[[Path], Any], settings: Any = None, after: Sequence[str] = ()) -> Any:
    """Return the result of ``make(folder)``, or the result that an earlier run saved with the same settings.

    ``make`` writes its files to ``folder`` and returns JSON values. ``settings`` are all settings that the result
    depends on. ``after`` are the stages that it reads: folders beside ``folder``, whose settings count too.
    """
    facts = [settings, [settings_hash(folder.with_name(name)) for name in after]]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    record = folder / RECORD
    if record.is_file() and settings_hash(folder) == digest:
        return json.loads(record.read_text())["result"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{folder.parent.name}: {folder.name} …", flush=True)
    begun = time.perf_counter()
    result = json.loads(json.dumps(make(folder)))
    seconds = time.perf_counter() - begun
    unfinished = record.with_suffix(".partial")
    unfinished.write_text(json.dumps({"hash": digest, "seconds": seconds, "result": result}, indent=1) + "\n")
    unfinished.rename(record)
    print(f"{folder.parent.name}: {folder.name} done in {seconds:.0f} s", flush=True)
    return result


def settings_hash(folder: Path) -> str:
    """The hash of the settings of a finished stage."""
    found: str = json.loads((folder / RECORD).read_text())["hash"]
    return found


def stage_seconds(folder: Path) -> dict[str, float]:
    """How long each finished stage in ``folder`` took."""
    return {record.parent.name: json.loads(record.read_text())["seconds"] for record in folder.glob(f"*/{RECORD}")}
