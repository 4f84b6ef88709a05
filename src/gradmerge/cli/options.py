"""Options that several commands share, and :func:`command`, which makes commands of functions.

An option is declared once. A command that runs a function of `api/` gets its options from the function's signature,
and their help from its docstring: ``@command(api=merge)``. Options for loading models and data are those of
:class:`gradmerge.LoadOptions`, with the docstrings of its attributes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from ..arguments import annotation, argument_help, attribute_help
from ..distributed import launched
from ..errors import InputError
from ..load_options import DEFAULTS, LoadOptions, parse_pairs
from ..urls import output_path
from .output import handle_errors, note_downloads

Run = Callable[..., None]

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model folder, Hub id (org/name@revision) or PEFT adapter folder.")
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        metavar="SRC",
        help="A .jsonl, .csv or .parquet file, also .gz; a .txt file with one example of causal-lm per line; a folder "
        "of images by class; an .npz with x and y (or x_test and y_test: FILE.npz:test); or org/name:split of the "
        "Hub. A file may be a URL.",
    ),
]
NamedData = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        "-d",
        metavar="NAME=SRC",
        help="Labeled rows of a task, to evaluate merges on: the name of its fine-tuned model (or base), and a data "
        "source as for evaluate. Repeatable.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the bytes read and written, the memory, and whether they fit on this machine. Write nothing.",
    ),
]
#: Options whose default can be set in the environment.
VARIABLES = {"device": "GRADMERGE_DEVICE", "threads": "GRADMERGE_THREADS"}
#: Keywords of functions of `api/` that are no options.
INTERNAL = ("progress", "command", "block")
#: Keywords of `merge` about how a recipe and its models are read.
READING = ("threads", "allow_pickle", "allow_config", "dequantize", "allow_code")
#: What help shows for the value of an option, if it is neither N nor the name.
METAVARS = {
    "base": "MODEL",
    "head": "MODEL",
    "metrics": "A,B",
    "lm_eval": "TASK,...",
    "lm_eval_tasks": "DIR",
    "include": "GLOB",
    "exclude": "GLOB",
    "allow_config": "KEY",
    "ray_address": "HOST:PORT",
    "budget": "SHARE",
    "merged": "DIR",
    "target": "DIR",
    "cache_memory": "SIZE",
    "forget": "SRC",
    "retain": "SRC",
    "unseen": "SRC",
    "until": "LOSS",
    "at_delta": "BASE",
    "columns": "KEY=COLUMN,...",
    "device": "D",
    "model_args": "KEY=VALUE,...",
    "revision": "BRANCH",
}
#: Option for loading models and data → default.
LOADING: dict[str, Any] = {**DEFAULTS}
#: Options that are at least 1.
COUNTS = ("limit", "batch_size", "max_new_tokens")
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key of the recipe, such as damping=1e-8 or density=0.2. Repeatable.",
    ),
]


@dataclass(frozen=True)
class Printing:
    """The options of every command."""

    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False

    @property
    def silent(self) -> bool:
        """Whether progress is hidden."""
        return self.json or self.quiet


def command(
    *,
    api: Callable[..., Any] | None = None,
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
    loading: Sequence[str] | None = None,
    defaults: Mapping[str, str] = MappingProxyType({}),
    processes: bool = False,
) -> Callable[[Run], Run]:
    """Return a decorator that makes a typer command of a function.

    The function has a parameter `printing` for the options of :class:`Printing`.

    Args:
        api: A function of `api/`. The parameter `options` holds its keywords that the command does not declare
            itself, and gets them as a mapping. Of :class:`gradmerge.LoadOptions`, the mapping holds what the user sets.
        only: Keywords of this function that the command has; by default all.
        without: Keywords of this function that the command does not have.
        loading: Options of :class:`gradmerge.LoadOptions` that the command has; by default all if the function takes
            them.
        defaults: Option → the default that help shows, where the function's is not that of the signature.
        processes: Whether several processes may run the command, as torchrun starts them.
    """

    def decorate(function: Run) -> Run:
        declared, printing_options = _parameters(function), _parameters(Printing)
        from_api = {} if api is None else api_options(api, [*declared, *without], only, loading, defaults)
        parameters: dict[str, inspect.Parameter] = {}
        for name, parameter in declared.items():
            parameters |= {"options": from_api, "printing": printing_options}.get(name, {name: parameter})
        options = [name for name, parameter in parameters.items() if not _is_argument(parameter)]

        @functools.wraps(function)
        def run(**values: Any) -> None:
            printing = Printing(**{name: values.pop(name) for name in printing_options})
            errors = handle_errors(printing.debug, printing.json, options)
            with errors, _name_variable(dict(values)), note_downloads(printing.silent):
                _check_processes(function.__name__, processes)
                values |= {name: output_path(value) for name, value in values.items() if isinstance(value, Path)}
                if api is not None:
                    values["options"] = _keywords({name: values.pop(name) for name in from_api}, api)
                function(**values, printing=printing)

        run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return run

    return decorate


def api_options(
    function: Callable[..., Any],
    without: Sequence[str] = (),
    only: Sequence[str] | None = None,
    loading: Sequence[str] | None = None,
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of a function of `api/` as options; see :func:`command`."""
    signature = inspect.signature(function).parameters
    if loading is None:
        loading = [*LOADING] if "loading" in signature else []
    kinds = get_type_hints(LoadOptions) | {"columns": str | None, "model_args": str | None}
    options = {}
    for name, parameter in signature.items():
        chosen = name not in (*without, *INTERNAL) and (only is None or name in only)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and chosen:
            text = _names_options(argument_help(function)[name], function)
            options[name] = _option(name, annotation(function, name), parameter.default, text, defaults.get(name))
    for name in loading:
        if name not in without:
            text = _names_options(attribute_help(LoadOptions)[name], function)
            options[name] = _option(name, kinds[name], LOADING[name], text, defaults.get(name))
    return options


def _option(name: str, kind: Any, default: Any, text: str, shown: str | None) -> inspect.Parameter:
    """Return a parameter for typer."""
    several = get_origin(kind) is Sequence
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else ()
    kinds = [option for option in options if option not in (Path, NoneType)]
    kinds.sort(key=lambda option: option is not str)  # of `int | str`, the command line takes text
    settings: dict[str, Any] = {"help": f"{text} Repeatable." if several else text}
    if shown is not None:
        settings["show_default"] = shown
    if name in VARIABLES:
        settings["envvar"] = VARIABLES[name]
    if name in COUNTS:
        settings["min"] = 1
    if several:
        kind, default, settings["show_default"] = list[str], list(default), False
    elif kinds:
        kind = kinds[0] if default is not None and default is not inspect.Parameter.empty else kinds[0] | None
    if kind is not bool and not any(get_origin(option) is Literal for option in (kind, *kinds)):
        settings["metavar"] = METAVARS.get(name, "N" if kind in (int, int | None) else name.upper())
    words = name.replace("_", "-")
    option = typer.Option(f"--{words}/--no-{words}" if default is True else f"--{words}", **settings)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=default)


def _keywords(values: dict[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return options as keywords of a function of `api/`, which has its own defaults for loading models and data."""
    own = inspect.signature(function).parameters
    values = {name: v for name, v in values.items() if name in own or v != LOADING[name]}
    texts = {name: values[name] for name in ("columns", "model_args") if values.get(name) is not None}
    return values | {name: parse_pairs(name, text) for name, text in texts.items()}


def _names_options(text: str, function: Callable[..., Any]) -> str:
    """Write the parameters in a description as options, and remove other markup."""
    names = [*inspect.signature(function).parameters, *LOADING]
    option = re.compile(r"``(\w+)``")
    text = option.sub(lambda m: "--" + m[1].replace("_", "-") if m[1] in names else m[1], text)
    return text.replace("`", "")


def _check_processes(name: str, processes: bool) -> None:
    """Raise if several processes run a command that does not support it."""
    launch = launched()
    if launch is None:
        return
    if not processes:
        raise InputError(
            f"{name.replace('_', '-')}: runs in one process, but this is one of {launch.world_size} (WORLD_SIZE and "
            "RANK in the environment, which torchrun and accelerate launch set). Start it without them. Several "
            "processes can run curvature estimate and evaluate."
        )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Launchers stop processes with SIGTERM. Like Ctrl-C, it leaves no unfinished output.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def from_environment(option: str, value: Any) -> bool:
    """Return whether an option has the value that the environment sets."""
    return option in VARIABLES and os.environ.get(VARIABLES[option]) == str(value)


@contextlib.contextmanager
def _name_variable(values: dict[str, Any]) -> Iterator[None]:
    """Add to an error about an option that its value comes from the environment."""
    try:
        yield
    except InputError as error:
        for option, variable in VARIABLES.items():
            if from_environment(option, values.get(option)) and re.search(rf"\b{option}\b", str(error)):
                error.args = (f"{error}\n  It comes from the environment: {variable}={values[option]}",)
        raise


def _is_argument(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter is positional on the command line, such as MERGED."""
    return any(isinstance(value, typer.models.ArgumentInfo) for value in get_args(parameter.annotation))


@functools.cache
def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or dataclass as keywords with evaluated types."""
    types = get_type_hints(function, include_extras=True)
    return {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[name])
        for name, parameter in inspect.signature(function).parameters.items()
    }


def method_names(incomplete: str) -> list[str]:
    """Return the methods that complete a word. In a list with commas, they complete the last item.

    Their names are read from the files of the rules, because importing those would import PyTorch, which takes seconds.
    """
    before, comma, last = incomplete.rpartition(",")
    texts = (path.read_text("utf-8") for path in sorted((Path(__file__).parent.parent / "rules").glob("*.py")))
    names = [name for text in texts for name in re.findall(r'^@rule\(\s*"([a-z0-9-]+)"', text, re.MULTILINE)]
    return [before + comma + name for name in names if name.startswith(last)]


def named(pairs: list[str], option: str = "data") -> dict[str, str]:
    """Return `NAME=VALUE` options as a mapping."""
    example = "yelp=./yelp-model" if option == "teacher" else "yelp=reviews.jsonl"
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name or not text:
            raise InputError(f"--{option} {pair}: write NAME=VALUE, such as --{option} {example}")
        if name in found:
            raise InputError(f"--{option} {pair}: {name} is repeated")
        found[name] = text
    return found
