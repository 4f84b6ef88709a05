"""`gradmerge push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..api.hub import push as push_folder
from ..text import one_line, size, some
from .options import Printing, command
from .output import echo, heavy_imports, note, print_json, print_notes, print_table

EXAMPLE = (
    "Examples: gradmerge push ./merged your-name/merged --dry-run   ·   "
    "gradmerge push ./merged your-name/merged --private   ·   gradmerge push ./yelp-curvature your-name/yelp"
)


@command(api=push_folder)
def push(
    *,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A model, an adapter or a curvature folder.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository, created if it does not exist.")],
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Publish a result on the Hugging Face Hub, with its card.

    Weights, card, record and curvature are one commit. Files that have not changed are not sent again. Log in with `hf
    auth login`, or set HF_TOKEN.
    """
    with heavy_imports():
        done = push_folder(out, repo, progress=not printing.silent, **options)
    if printing.json:
        print_json(vars(done) | {"bytes": done.nbytes, "private": options["private"], "dry_run": options["dry_run"]})
        return
    for key, consequence in done.lacks.items():
        note(f"the card has no {key}: {consequence}", printing.quiet)
    print_notes(done.notes, printing.quiet)
    if printing.quiet:
        return
    if options["dry_run"]:
        print_table(["file", "size"], [[name, size(nbytes)] for name, nbytes in done.files.items()], right=(1,))
        echo(f"{len(done.files)} files, {size(done.nbytes)} → {one_line(done.repo)}, branch {done.revision}")
        echo(f"not sent: {one_line(some(done.left_out, 12)) or 'nothing'}")
    else:
        echo(f"{len(done.files)} files → {one_line(str(done.url))}")
