"""`gradmerge push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..text import one_line, size, some
from .options import Printing, command
from .output import heavy_imports, note, print_json, print_notes, print_table, progress
from .stdio import echo

EXAMPLE = (
    "Examples: gradmerge push ./merged your-name/merged --dry-run   ·   "
    "gradmerge push ./merged your-name/merged --private   ·   gradmerge push ./yelp-curvature your-name/yelp"
)


@command
def push(
    *,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A model, an adapter or a curvature folder.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None,
        typer.Option(metavar="BRANCH", help="Send to a branch, made if it is not there.", show_default="main"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be sent and what the card lacks, and stop.")
    ] = False,
    printing: Printing,
) -> None:
    """Publish a result on the Hugging Face Hub: weights, card, record and curvature, in one commit.

    What is there already is not sent again. Log in with `hf auth login`, or set HF_TOKEN.
    """
    with heavy_imports():
        from ..api.publishing import push as push_folder

    with progress(printing.silent) as shown:
        done = push_folder(out, repo, private=private, revision=revision, dry_run=dry_run, progress=shown)
    if printing.json:
        facts: dict[str, Any] = {
            "repo": done.repo,
            "revision": done.revision,
            "kind": done.kind,
            "private": private,
            "dry_run": dry_run,
            "files": done.files,
            "bytes": done.nbytes,
            "left_out": done.left_out,
            "lacks": done.lacks,
            "sent": done.sent,
            "unchanged": done.unchanged,
            "removed": done.removed,
            "url": done.url,
            "notes": done.notes,
        }
        print_json(facts)
        return
    if dry_run:
        print_table(["file", "size"], [[name, size(nbytes)] for name, nbytes in done.files.items()], right=(1,))
        where = f"{one_line(done.repo)}, branch {done.revision}{', private if it is new' if private else ''}"
        echo(f"{len(done.files)} files, {size(done.nbytes)} → {where}")
        echo(f"not sent: {one_line(some(done.left_out, 12)) or 'nothing'}")
    for key, why in done.lacks.items():
        note(f"the card has no {key}: {why}", printing.quiet)
    print_notes(done.notes, printing.quiet)
    if dry_run or printing.quiet:
        return
    if done.url is None:
        echo(f"{done.repo} has all of it already")
        return
    kept = f", {len(done.unchanged)} were there already" if done.unchanged else ""
    gone = f", {len(done.removed)} of earlier ones removed" if done.removed else ""
    echo(f"{len(done.sent)} files sent{kept}{gone} → {one_line(done.url)}")
