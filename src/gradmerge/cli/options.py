"""Options that commands share, in groups, and how a command gets them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..distributed import launched, stop_on_sigterm
from ..errors import InputError
from ..urls import as_url, output_path
from .completion import words_of
from .output import (
    AllowCode,
    AllowConfig,
    AllowPickle,
    Debug,
    Dequantize,
    Json,
    Quiet,
    fetching_noted,
    guarded,
)

if TYPE_CHECKING:
    from ..tasks import Generation, LoadOptions

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model folder, Hub id (org/name@revision) or PEFT adapter folder.")
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        metavar="SRC",
        help="A .jsonl, .csv or .parquet file; .txt, each line an example of causal-lm, empty lines skipped; "
        "each also .gz; a folder of images by class; an .npz with x and y (or x_test and y_test: FILE.npz:test); "
        "or org/name:split of the Hub. A file may be a URL.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the sizes of input, output and memory, and whether they fit, and stop.")
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
#: Options whose default may stand in the environment.
VARIABLES = {"device": "GRADMERGE_DEVICE", "threads": "GRADMERGE_THREADS"}
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if gradmerge wrote it, or it is empty.")]

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
    """What a command prints."""

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
            "curvature estimate also device_map=auto or FILE.json, load_in_4bit=true, load_in_8bit=true, "
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


@dataclass(frozen=True)
class HarnessOptions:
    """Tasks of the lm-evaluation-harness."""

    lm_eval: Annotated[
        str | None,
        typer.Option(
            metavar="TASK,...", help="Tasks of the lm-evaluation-harness; --limit, --batch-size and --device hold too."
        ),
    ] = None
    lm_eval_tasks: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder of task files for it. Functions that they name are run."),
    ] = None


@dataclass(frozen=True)
class ReadOptions:
    """How models are read."""

    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=256,
            help="Threads; by default one per core, at most 4.",
            envvar=VARIABLES["threads"],
        ),
    ] = None
    allow_pickle: AllowPickle = False
    allow_config: AllowConfig = None
    dequantize: Dequantize = False

    def as_keywords(self) -> dict[str, Any]:
        """As keywords of the Python functions."""
        return {**asdict(self), "allow_config": self.allow_config or ()}


@dataclass(frozen=True)
class RecipeOptions(ReadOptions):
    """How a recipe and its models are read."""

    allow_code: AllowCode = False


def command(function: Callable[..., None], *, processes: bool = False) -> Callable[..., None]:
    """Make a typer command of a function that takes groups of options.

    typer sees the options one by one; the function gets each group as one object. Every command takes
    `Printing`, which says how errors end. ``processes``: it may be run by several processes, as torchrun starts them.
    """
    shown: dict[str, inspect.Parameter] = {}
    groups: dict[str, Any] = {}
    for name, parameter in _parameters(function).items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            shown |= _parameters(groups[name])
        else:
            shown[name] = parameter

    @functools.wraps(function)
    def run(**given: Any) -> None:
        device, quiet = str(given.get("device")), given["quiet"] or given["json"]
        with guarded(given["debug"], given["json"]), _variable_named(device), fetching_noted(quiet):
            _check_processes(function.__name__, processes)
            given = {name: _shown(value) for name, value in given.items()}
            made = {
                name: group(**{option: given.pop(option) for option in group.__dataclass_fields__})
                for name, group in groups.items()
            }
            function(**given, **made)

    run.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in shown.items()}
    return run


def _shown(value: Any) -> Any:
    """What was given, with URLs as they are shown, and paths as places that may be URLs."""
    if isinstance(value, Path):
        return output_path(value)
    return (as_url(value) or value) if isinstance(value, str) else value


on_processes = functools.partial(command, processes=True)


def _check_processes(name: str, processes: bool) -> None:
    """Refuse to be one of several processes of torchrun or `accelerate launch`, unless the command supports them."""
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
    stop_on_sigterm()


def from_environment(option: str, value: Any) -> bool:
    """Whether the value of an option is what the environment says."""
    return option in VARIABLES and os.environ.get(VARIABLES[option]) == str(value)


@contextlib.contextmanager
def _variable_named(device: str) -> Iterator[None]:
    """Say where a device comes from that is not there: those who set a variable once have not typed it now."""
    try:
        yield
    except InputError as error:
        if from_environment("device", device) and re.search(r"\bdevice\b", str(error)):
            error.args = (f"{error}\n  It comes from the environment: {VARIABLES['device']}={device}",)
        raise


@functools.cache
def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function or dataclass, by keyword, with their types."""
    types = get_type_hints(function, include_extras=True)
    return {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[name])
        for name, parameter in inspect.signature(function).parameters.items()
    }


def named(pairs: list[str], option: str = "data") -> dict[str, str]:
    """`NAME=VALUE` options as a mapping."""
    values = {"teacher": "a model that knows it, as --teacher yelp=./yelp-model"}
    value = values.get(option, f"its data, as --{option} yelp=reviews.jsonl")
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name or not text:
            raise InputError(f"--{option} {pair}: give the task's name and {value}")
        if name in found:
            raise InputError(f"--{option} {pair}: {name} has one already")
        found[name] = as_url(text) or text
    return found
