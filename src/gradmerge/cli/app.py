"""The commands, and how every one of them fails."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from .._version import __version__
from . import curvature, demo, diagnose, evaluate, inspect, merge, methods, preview

app = typer.Typer(
    name="gradmerge",
    help="Merge fine-tuned models, and remove what a model has learned, by matching gradients with curvature.",
    epilog="Start with: gradmerge demo, gradmerge methods, then gradmerge merge --help",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradmerge {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


app.command("merge", epilog=merge.MERGE_EXAMPLE)(merge.merge)
app.command("remove", epilog=merge.REMOVE_EXAMPLE)(merge.remove)
app.command("inspect", epilog=inspect.EXAMPLE)(inspect.inspect)
app.command("evaluate", epilog=evaluate.EXAMPLE)(evaluate.evaluate)
app.command("methods", epilog=methods.EXAMPLE)(methods.methods)
app.command("diagnose", epilog=diagnose.EXAMPLE)(diagnose.diagnose)
app.command("preview", epilog=preview.EXAMPLE)(preview.preview)
app.command("demo", epilog=demo.EXAMPLE)(demo.demo)
app.add_typer(curvature.app, name="curvature")


def main() -> None:
    """Entry point of the `gradmerge` script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a Greek letter is no reason to fail on a terminal that has none
            stream.reconfigure(errors="backslashreplace")
    app()
