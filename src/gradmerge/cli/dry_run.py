"""Printing the result of `--dry-run`."""

from __future__ import annotations

from typing import Any

from ..api.dry_run import JobSize
from ..recipe import in_words
from ..text import count, size
from .output import continued, print_json, print_table
from .stdio import say


def print_merge(facts: dict[str, Any], job: JobSize, as_json: bool) -> None:
    """Print the plan of a merge, and its size."""
    if as_json:
        print_json(facts | job.to_dict())
        return
    options = "".join(f", {name}={in_words(value)}" for name, value in facts["options"].items())
    say(f"method:  {facts['method']}{options}")
    rows = [
        [one["source"], one["kind"], count(one["parameters"]) if "parameters" in one else "", size(one["bytes"])]
        for one in facts["inputs"]
    ]
    print_table(["input", "kind", "parameters", "size"], rows, right=(2, 3))
    say(f"tensors: {facts['merged_tensors']} merged, {facts['copied_tensors']} copied")
    if "damping" in facts:
        say(f"damping: {facts['damping']:g}")
    if "damping_of_layers" in facts:
        say(f"         {facts['damping_of_layers']}, where it has Kronecker curvature")
    for one in facts.get("penalty", ()):
        say(f"penalty: {one['penalty']} for {one['model']} ({one['from']})")
    number = facts["output_files"]
    files = "one LoRA adapter" if job.bytes_written is None else f"{number} file{'s' if number > 1 else ''}"
    say(f"output:  {files}" + (f" in {facts['output']}" if facts["output"] else ""))
    _print_size(facts, job)


def print_estimate(facts: dict[str, Any], job: JobSize, as_json: bool) -> None:
    """Print what an estimate of curvature reads, and its size."""
    if as_json:
        print_json(facts | job.to_dict())
        return
    say(f"model:   {count(facts['parameters'])} parameters in {facts['dtype']}, on {facts['device']}")
    say(f"data:    {facts['examples']:,} examples, task {facts['task']}")
    _print_size(facts, job)


def _print_size(facts: dict[str, Any], job: JobSize) -> None:
    for line in job.lines():
        say(line)
    for text in facts["notes"]:
        say(f"note: {continued(text)}")
