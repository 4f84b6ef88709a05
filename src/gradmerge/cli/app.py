"""The commands, and how every one of them fails."""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .._version import __version__
from ..distributed import launched
from ..errors import InputError
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
)
from .help import Commands, GroupWithHelp
from .output import OUT_OF_MEMORY
from .stdio import hush, prepare_streams, say, settle

#: Depending on its version, typer brings its own click or uses the installed one.
UsageError: Any = typer.BadParameter.__base__


class EveryCommand(GroupWithHelp):
    """All commands. Whatever ends one of them becomes a message and an exit status here."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        other = _is_other()
        if other:
            hush()
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


def _is_other() -> bool:
    """Return whether this is one of several processes but not the first, which prints."""
    try:
        launch = launched()
    except InputError:  # the command raises it again
        return False
    return launch is not None and launch.rank > 0


app = Commands(
    name="gradmerge",
    cls=EveryCommand,
    help="Merge fine-tuned models, and remove what a model has learned, by matching gradients with curvature.",
    epilog="Start with: gradmerge demo   ·   gradmerge studio demo   ·   gradmerge merge --help",
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
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            writable=True,
            envvar="GRADMERGE_CACHE",
            help="Folder for what is fetched from the Hub or a URL. Default: that of the Hub, ~/.cache/gradmerge.",
        ),
    ] = None,
) -> None:
    if cache is not None:  # read by huggingface_hub and datasets when they are imported, which is later
        os.environ["GRADMERGE_CACHE"] = str(cache.absolute())
        os.environ["HF_HUB_CACHE"] = str(cache.absolute() / "hub")
        os.environ["HF_DATASETS_CACHE"] = str(cache.absolute() / "datasets")


app.command("merge", short_help="Merge models, as a recipe or options say.", epilog=merge.MERGE_EXAMPLE)(merge.merge)
app.command("calibrate", short_help="Improve a merge on unlabeled rows.", epilog=calibrate.EXAMPLE)(calibrate.calibrate)
app.command("distill", short_help="Train a merge with the fine-tuned models as teachers.", epilog=distill.EXAMPLE)(
    distill.distill
)
app.command("remove", short_help="Take data out of a model again.", epilog=remove.EXAMPLE)(remove.remove)
app.command("extract-lora", short_help="Make a LoRA adapter of a fine-tuned model.", epilog=extract_lora.EXAMPLE)(
    extract_lora.extract_lora
)
app.command("inspect", short_help="Look at models, and whether they can merge.", epilog=inspect.EXAMPLE)(
    inspect.inspect
)
app.command("evaluate", short_help="Measure a model on labelled data.", epilog=evaluate.EXAMPLE)(evaluate.evaluate)
app.command("methods", short_help="List the merge methods, or explain one.", epilog=methods.EXAMPLE)(methods.methods)
app.command("diagnose", short_help="Report what a merge costs each task.", epilog=diagnose.EXAMPLE)(diagnose.diagnose)
app.command("preview", short_help="Compare weights and methods before merging.", epilog=preview.EXAMPLE)(
    preview.preview
)
app.command("studio", short_help="Try weights and methods on a local page.", epilog=studio.EXAMPLE)(studio.studio)
app.command("push", short_help="Upload a result to the Hub, with its card.", epilog=push.EXAMPLE)(push.push)
app.command("demo", short_help="See the whole job on small models.", epilog=demo.EXAMPLE)(demo.demo)
app.add_typer(curvature.app, name="curvature", short_help="Estimate, import and look at curvature.")


def script() -> NoReturn:
    """The `gradmerge` script, as a process of its own."""
    status: Any = 0
    if named := [one for one in app.registered_commands if [one.name] == sys.argv[1:2]]:
        # Before it runs one command, typer would make all of them.
        app.registered_commands, app.registered_groups = named, []
    try:
        main()
    except SystemExit as ended:
        status = ended.code or 0
    if isinstance(status, int) and threading.active_count() == 1:
        # Python takes a quarter of a second to clear away PyTorch, object by object, which the system does at once.
        atexit._run_exitfuncs()
        settle(status)
        os._exit(status)
    sys.exit(status)


def main() -> None:
    """Run the command that the arguments of the process name; it ends with SystemExit."""
    prepare_streams()
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *args, **more: printable(plain(*args, **more))
    app(prog_name="gradmerge")
