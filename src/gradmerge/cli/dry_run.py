"""Print the result of `--dry-run`."""

from __future__ import annotations

from ..api.dry_run import JobSize
from ..recipe import in_words
from ..text import size
from .options import Printing
from .output import indented, print_json, print_table
from .stdio import echo


def print_dry_run(job: JobSize, printing: Printing) -> None:
    """Print what a job would do, and its size."""
    if printing.json:
        print_json(job.to_dict())
        return
    for name, value in job.facts.items():
        if isinstance(value, list) and value:
            columns = list(dict.fromkeys(key for row in value for key in row))
            rows = [[size(row[c]) if c == "bytes" else str(row.get(c, "")) for c in columns] for row in value]
            print_table(columns, rows)
        elif isinstance(value, dict):
            if value:
                echo(f"{name}: " + ", ".join(f"{key}={in_words(item)}" for key, item in value.items()))
        elif value is not None:
            echo(f"{name.replace('_', ' ')}: {in_words(value)}")
    for line in job.lines():
        echo(line)
    for text in job.notes:
        echo(f"note: {indented(text)}")
