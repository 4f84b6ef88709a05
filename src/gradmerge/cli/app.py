"""The commands, and how every one of them fails."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from .._version import __version__
from ..text import printable, to_json
from . import (
    curvature,
    demo,
    diagnose,
    evaluate,
    extract_lora,
    gradient,
    inspect,
    merge,
    methods,
    preview,
    push,
    recipe,
    refine,
    remove,
)
from .output import OUT_OF_MEMORY
from .streams import prepare_streams, say, settle

#: Depending on its version, typer brings its own click or uses the installed one.
UsageError: Any = typer.BadParameter.__base__


class Commands(TyperGroup):
    """All commands. Whatever ends one of them becomes a message and an exit status here."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        try:
            ended = super().main(words, *rest, **more | {"standalone_mode": False})
            status = ended if isinstance(ended, int) else 0
        except UsageError as error:
            shown = io.StringIO()
            error.show(file=shown)
            say(shown.getvalue().rstrip("\n"), err=True)
            status = error.exit_code
            if "--json" in words:
                say(to_json({"error": error.format_message(), "status": status}, indent=None))
        except typer.Abort:
            status = 1
            say("error: interrupted", err=True)
        except MemoryError:  # too little is left even to make the message
            status = 1
            say(f"error: {OUT_OF_MEMORY}", err=True)
        sys.exit(settle(status))


app = typer.Typer(
    name="gradmerge",
    cls=Commands,
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
        say(f"gradmerge {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


app.command("merge", epilog=merge.MERGE_EXAMPLE)(merge.merge)
app.command("remove", epilog=remove.EXAMPLE)(remove.remove)
app.command("refine", epilog=refine.EXAMPLE)(refine.refine)
app.command("extract-lora", epilog=extract_lora.EXAMPLE)(extract_lora.extract_lora)
app.command("inspect", epilog=inspect.EXAMPLE)(inspect.inspect)
app.command("evaluate", epilog=evaluate.EXAMPLE)(evaluate.evaluate)
app.command("gradient", epilog=gradient.EXAMPLE)(gradient.gradient)
app.command("methods", epilog=methods.EXAMPLE)(methods.methods)
app.command("diagnose", epilog=diagnose.EXAMPLE)(diagnose.diagnose)
app.command("preview", epilog=preview.EXAMPLE)(preview.preview)
app.command("push", epilog=push.EXAMPLE)(push.push)
app.command("demo", epilog=demo.EXAMPLE)(demo.demo)
app.add_typer(curvature.app, name="curvature")
app.add_typer(recipe.app, name="recipe")


def main() -> None:
    """Entry point of the `gradmerge` script."""
    prepare_streams()
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *args, **more: printable(plain(*args, **more))
    app()
