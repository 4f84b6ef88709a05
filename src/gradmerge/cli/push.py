"""`gradmerge push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..text import one_line, size, some
from .options import Printing, command
from .output import heavy_imports, note, print_json, print_notes, print_table
from .stdio import echo

EXAMPLE = (
    "Examples: gradmerge push ./merged your-name/merged --dry-run   ·   "
    "gradmerge push ./merged your-name/merged --private   ·   gradmerge push ./yelp-curvature your-name/yelp"
)


@command()
def push(
    *,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A model, an adapter or a curvature folder.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository, created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None,
        typer.Option(metavar="BRANCH", help="Branch, created if it does not exist.", show_default="main"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be sent and what the card lacks.")
    ] = False,
    printing: Printing,
) -> None:
    """Publish a result on the Hugging Face Hub: weights, card, record and curvature, in one commit.

    Files that have not changed are not sent again. Log in with `hf auth login`, or set HF_TOKEN.
    """
    with heavy_imports():
        from ..api.hub import push as push_folder

    done = push_folder(out, repo, private=private, revision=revision, dry_run=dry_run, progress=not printing.silent)
    if printing.json:
        print_json(vars(done) | {"bytes": done.nbytes, "private": private, "dry_run": dry_run})
        return
    for key, consequence in done.lacks.items():
        note(f"the card has no {key}: {consequence}", printing.quiet)
    print_notes(done.notes, printing.quiet)
    if printing.quiet:
        return
    if dry_run:
        print_table(["file", "size"], [[name, size(nbytes)] for name, nbytes in done.files.items()], right=(1,))
        echo(f"{len(done.files)} files, {size(done.nbytes)} → {one_line(done.repo)}, branch {done.revision}")
        echo(f"not sent: {one_line(some(done.left_out, 12)) or 'nothing'}")
    else:
        echo(f"{len(done.files)} files → {one_line(str(done.url))}")
