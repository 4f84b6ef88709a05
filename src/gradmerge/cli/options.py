"""Options that several commands share, and :func:`command`, which makes commands of functions.

An option is declared once. A command that runs a function of `api/` gets its options from the function's signature,
and their help from its docstring: ``@command_with(api=merge)``. Other groups of options are dataclasses.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ..arguments import annotation, argument_help
from ..distributed import launched
from ..errors import InputError
from ..urls import output_path
from .completion import WORDS, words_of
from .output import handle_errors, note_downloads

if TYPE_CHECKING:
    from ..tasks import Generation, LoadOptions

Run = Callable[..., None]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

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
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the bytes read and written, the memory, and whether they fit on this machine. Write nothing.",
    ),
]
CurvatureOut = Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Curvature folder to write.")]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="P",
        help="How to store it: float32, bfloat16 or log8 (one byte).",
        autocompletion=words_of("precision"),
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
    "accumulate_on": "WHERE",
}
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if gradmerge wrote it, or if it is empty.")]

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the recipe, such as damping=1e-8 or density=0.2."),
]
SweepOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=RANGE",
        help="Try values of a key of the recipe, such as density=0.1:0.9:0.2 (both ends), damping=1e-6,1e-3, "
        "rescale=none,l1, or t=[0,1],[1,0] over the layers. Repeatable; all combinations are tried.",
    ),
]


@dataclass(frozen=True)
class Printing:
    """The options of every command."""

    json: Json = False
    quiet: Quiet = False
    debug: Debug = False

    @property
    def silent(self) -> bool:
        """Whether progress is hidden."""
        return self.json or self.quiet


@dataclass(frozen=True)
class LoadingOptions:
    """The options of `gradmerge.LoadOptions`, with the same defaults."""

    task: Annotated[
        str,
        typer.Option(
            metavar="T",
            help="classify, causal-lm, seq2seq, image, embedding, or auto: what the model is made for.",
            autocompletion=words_of("task"),
        ),
    ] = "auto"
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=COLUMN,...",
            help="Which column is what, where names are not the usual ones. Keys: text, text2, label, labels, prompt, "
            "completion, messages, source, target, image, anchor, positive, negative, score. Several columns are "
            "joined by +.",
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Read at most N examples.")] = None
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Examples at once; the result does not depend on it.")
    ] = 8
    max_length: Annotated[
        int | None,
        typer.Option(metavar="N", help="Cut texts after N tokens; by default what the model allows, at most 1024."),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            metavar="D",
            help="cpu, cuda, cuda:1, …; auto is a GPU if there is one.",
            envvar=VARIABLES["device"],
            autocompletion=words_of("device"),
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="float32, bfloat16, float16, float64, or auto: as the model is stored.",
            autocompletion=words_of("dtype"),
        ),
    ] = "auto"
    model_args: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            help="How transformers loads the model: attn_implementation=sdpa, tokenizer=PATH; for evaluate and "
            "curvature estimate also device_map=auto, load_in_4bit=true, load_in_8bit=true, "
            "gradient_checkpointing=true.",
        ),
    ] = None

    def as_keywords(self) -> LoadOptions:
        """As keywords of the Python functions."""
        from ..tasks import parse_columns, parse_model_args

        args = None if self.model_args is None else parse_model_args(self.model_args)
        return {**asdict(self), "columns": parse_columns(self.columns), "model_args": args}  # type: ignore[typeddict-item]


@dataclass(frozen=True)
class GenerationOptions:
    """Options for generated answers."""

    generate: Annotated[
        bool,
        typer.Option("--generate", help="Also have the model write an answer to every row, greedily, and score it."),
    ] = False
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="With --generate: exact-match (default), rouge, bleu, chrf.", show_default=False
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="With --generate: tokens of an answer at most.", show_default="64"),
    ] = None

    def as_generation(self) -> Generation | None:
        """As it is given to the Python functions; any of these options asks for answers."""
        from ..tasks import Generation

        if not self.generate and self.metrics is None and self.max_new_tokens is None:
            return None
        return Generation([self.metrics] if self.metrics is not None else [], self.max_new_tokens)


def command(function: Run) -> Run:
    """Make a typer command of a function, as :func:`command_with` does."""
    return command_with()(function)


def command_with(
    *,
    api: Callable[..., Any] | None = None,
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
    processes: bool = False,
) -> Callable[[Run], Run]:
    """Return a decorator that makes a typer command of a function.

    A parameter that is a dataclass adds an option for each of its fields. Every command has one of the type `Printing`.

    Args:
        api: A function of `api/`. The parameter `options` holds its keywords that the command does not declare
            itself, and gets them as a mapping.
        only: Keywords of this function that the command has; by default all.
        without: Keywords of this function that the command does not have.
        processes: Whether several processes may run the command, as torchrun starts them.
    """

    def decorate(function: Run) -> Run:
        declared = _parameters(function)
        groups: dict[str, Any] = {name: p.annotation for name, p in declared.items() if is_dataclass(p.annotation)}
        in_groups = [name for group in groups.values() for name in _parameters(group)]
        from_api = {} if api is None else api_options(api, [*declared, *in_groups, *without], only)
        parameters: dict[str, inspect.Parameter] = {}
        for name, parameter in declared.items():
            if name in groups:
                parameters |= _parameters(groups[name])
            elif name == "options" and api is not None:
                parameters |= from_api
            else:
                parameters[name] = parameter

        @functools.wraps(function)
        def run(**values: Any) -> None:
            errors = handle_errors(values["debug"], values["json"], parameters)
            with errors, _name_variable(dict(values)), note_downloads(values["quiet"] or values["json"]):
                _check_processes(function.__name__, processes)
                values |= {name: output_path(value) for name, value in values.items() if isinstance(value, Path)}
                if api is not None:
                    values["options"] = {name: values.pop(name) for name in from_api}
                for name, group in groups.items():
                    values[name] = group(**{option: values.pop(option) for option in group.__dataclass_fields__})
                function(**values)

        run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
        return run

    return decorate


def api_options(
    function: Callable[..., Any], without: Sequence[str] = (), only: Sequence[str] | None = None
) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters of a function of `api/` as options, those in ``only`` if it is given."""
    options = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or name in (*without, *INTERNAL):
            continue
        if only is not None and name not in only:
            continue
        kind, text = annotation(function, name), _names_options(argument_help(function)[name], function)
        several = get_origin(kind) is Sequence
        kinds = [option for option in get_args(kind) if option not in (Path, NoneType)]
        kinds.sort(key=lambda option: option is not str)  # of `int | str`, the command line takes text
        settings: dict[str, Any] = {"help": f"{text} Repeatable." if several else text}
        if name in VARIABLES:
            settings["envvar"] = VARIABLES[name]
        if name in WORDS:
            settings["autocompletion"] = words_of(name)
        default = parameter.default
        if several:
            kind, default, settings["show_default"] = list[str], list(default), False
        elif kinds:
            kind = kinds[0] if default is not None else kinds[0] | None
        settings["metavar"] = (
            None if kind is bool else METAVARS.get(name, "N" if kind in (int, int | None) else name.upper())
        )
        words = name.replace("_", "-")
        option = typer.Option(f"--{words}/--no-{words}" if default is True else f"--{words}", **settings)
        options[name] = parameter.replace(annotation=Annotated[kind, option], default=default)
    return options


def _names_options(text: str, function: Callable[..., Any]) -> str:
    """Write the parameters in a description as options, and remove other markup."""
    names = [*inspect.signature(function).parameters, *LoadingOptions.__dataclass_fields__]
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


@functools.cache
def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or dataclass as keywords with evaluated types."""
    types = get_type_hints(function, include_extras=True)
    return {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[name])
        for name, parameter in inspect.signature(function).parameters.items()
    }


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
