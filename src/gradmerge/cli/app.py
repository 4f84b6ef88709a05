"""All commands of `gradmerge`, and the script that runs them."""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import typer
import typer.core
from typer.core import TyperGroup

from .. import __version__
from ..distributed import launched
from ..text import printable, to_json
from . import (
    calibrate,
    curvature,
    demo,
    diagnose,
    distill,
    evaluate,
    extract_lora,
    inspect,
    merge,
    methods,
    preview,
    push,
    remove,
    studio,
    verify,
)
from .output import discard, echo, explain, prepare_streams, silence

# If rich is installed, typer prints a backslash before the brackets of its help. The names depend on its version.
for _name, _value in (("HAS_RICH", False), ("rich", None)):
    setattr(typer.core, _name, _value)
#: Depending on its version, typer brings its own click or uses the installed one.
UsageError: Any = typer.BadParameter.__base__
#: The steps of the work, and the commands of each.
STEPS: dict[str, list[ModuleType]] = {
    "Merge": [demo, inspect, methods, curvature, merge, remove, extract_lora],
    "Improve": [preview, studio, calibrate, distill],
    "Check": [verify, evaluate, diagnose],
    "Publish": [push],
}


def name_of(module: ModuleType) -> str:
    """Return the name of the command in a module."""
    return module.__name__.rpartition(".")[2].replace("_", "-")


class Gradmerge(TyperGroup):
    """All commands. Every error becomes a message and an exit status."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for step, modules in STEPS.items():
            with formatter.section(step):
                names = map(name_of, modules)
                formatter.write_dl([(name, self.commands[name].get_short_help_str(100)) for name in names])

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        if (launch := launched()) is not None and launch.rank > 0:
            silence()  # only the first process prints
        try:
            ended = super().main(words, *rest, **more | {"standalone_mode": False})
            status = ended if isinstance(ended, int) else 0
            if sys.stdout is not None:
                sys.stdout.flush()
        except UsageError as error:
            text = io.StringIO()
            error.show(file=text)
            echo(text.getvalue().rstrip("\n"), err=True)
            status = error.exit_code
            if "--json" in words:
                echo(to_json({"error": error.format_message(), "status": status}, indent=None))
        except (typer.Abort, MemoryError, OSError) as error:
            message, status = explain(KeyboardInterrupt() if isinstance(error, typer.Abort) else error)
            discard(sys.stdout)
            if not isinstance(error, BrokenPipeError):  # the reader, such as `head`, has ended
                echo(f"error: {message}", err=True)
        sys.exit(status)


app = typer.Typer(
    name="gradmerge",
    cls=Gradmerge,
    help="Merge fine-tuned models, and remove what a model has learned, by matching gradients with curvature.",
    epilog="Start with: gradmerge demo",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"gradmerge {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            writable=True,
            envvar="GRADMERGE_CACHE",
            help="Folder for downloads from the Hub or a URL. Default: the Hub's cache, and ~/.cache/gradmerge.",
        ),
    ] = None,
) -> None:
    if cache is not None:  # read by huggingface_hub and datasets when they are imported, which is later
        os.environ["GRADMERGE_CACHE"] = str(cache.absolute())
        os.environ["HF_HUB_CACHE"] = str(cache.absolute() / "hub")
        os.environ["HF_DATASETS_CACHE"] = str(cache.absolute() / "datasets")


def examples(text: str) -> str:
    """Return the examples of a command, `Examples: one   ·   another`, as lines that typer does not wrap."""
    title, _, commands = text.partition(": ")
    return "\n".join(["\b", f"{title}:", *(f"  {line}" for line in commands.split("   ·   "))])


def add_commands(group: typer.Typer, commands: Mapping[str, tuple[Callable[..., None], str]]) -> None:
    """Add functions with their examples. The first sentence of a docstring is the command's line in the list."""
    for name, (function, text) in commands.items():
        group.command(name, epilog=examples(text))(function)


modules = [module for step in STEPS.values() for module in step if module is not curvature]
add_commands(app, {name_of(one): (getattr(one, one.__name__.rpartition(".")[2]), one.EXAMPLE) for one in modules})
_curvature = typer.Typer(help="Estimate curvature, import it, or show it.")
add_commands(
    _curvature,
    {
        "estimate": (curvature.estimate, curvature.ESTIMATE),
        "import": (curvature.import_, curvature.IMPORT),
        "show": (curvature.show, curvature.SHOW),
    },
)
app.add_typer(_curvature, name="curvature", no_args_is_help=True)


def script() -> NoReturn:
    """Run the `gradmerge` script."""
    status: Any = 0
    if chosen := [command for command in app.registered_commands if [command.name] == sys.argv[1:2]]:
        # Otherwise typer builds all commands before it runs one.
        app.registered_commands, app.registered_groups = chosen, []
    try:
        main()
    except SystemExit as ended:
        status = ended.code or 0
    if isinstance(status, int) and threading.active_count() == 1:
        # Python takes a quarter of a second to free PyTorch, object by object.
        atexit._run_exitfuncs()
        os._exit(status)
    sys.exit(status)


def main() -> None:
    """Run the command that the arguments of the process name; it ends with SystemExit."""
    prepare_streams()
    original = warnings.formatwarning
    warnings.formatwarning = lambda *args, **more: printable(original(*args, **more))
    app(prog_name="gradmerge")
