"""Advice to calibrate a merge, in sentences."""

from __future__ import annotations

import shlex


def calibration_words(command: str) -> list[str]:
    """The advice to calibrate, which ends with the command; nothing without a command."""
    if not command:
        return []
    words = shlex.split(command)
    unknown = ["OUT with the folder of the merge"] if "OUT" in words else []
    if any(word.endswith("=ROWS") for word in words):
        unknown.append("ROWS with a file of unlabeled rows of the task")
    replace = f" Replace {' and '.join(unknown)}." if unknown else ""
    what = "Calibration brings the merge closer to its fine-tuned models. It needs a few hundred rows of each task"
    return [f"{what}, without labels.{replace} To calibrate: `{command}`"]
