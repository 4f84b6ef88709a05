"""A model with data that fits it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack, get_type_hints

import torch
from torch import Tensor, nn

from .._version import __version__
from ..arguments import check
from ..curvature.losses import ExampleLoss
from ..curvature.offload import spread_device
from ..errors import InputError
from ..quiet import quiet_transformers
from ..text import nearest
from .causal_lm import LanguageExamples, without_empty
from .classify import TextExamples
from .data.columns import Fields, choose_columns
from .data.read import Rows, read_rows
from .embedding import EmbeddingExamples
from .image import ImageExamples
from .model_args import BASIC_KEYS, ModelArgs
from .models import LoadingInfo, device_of, load_model
from .processors import load_image_processor, load_tokenizer
from .seq2seq import PairExamples


class LoadOptions(TypedDict, total=False):
    """How a model and its data are loaded: keywords of every function that does so, options of every such command."""

    task: str
    """`classify`, `causal-lm`, `seq2seq`, `image`, `embedding`, or `auto`: what the model is made for."""
    columns: Mapping[str, str] | None
    """Which column of the data is what, `{"text": "review"}`, where names are not the usual ones."""
    limit: int | None
    """How many rows are read at most."""
    batch_size: int
    """Examples at once; beyond rounding, results do not depend on it."""
    max_length: int | None
    """Tokens after which a text is cut; by default what the model allows, at most 1024."""
    device: str
    """`cpu`, `cuda`, `cuda:1`, …; `auto` is a GPU if there is one."""
    dtype: str
    """`float32`, `bfloat16`, `float16`, `float64`, or `auto`: as stored, but float32 for float16 on a CPU."""
    model_args: Mapping[str, Any] | None
    """How transformers loads the model. `{"attn_implementation": "sdpa"}`: `eager`, `sdpa`, `flash_attention_2`, …
    `{"tokenizer": "org/name"}`: folder or Hub id of the tokenizer, if it is not the model's. Estimates of curvature and
    `evaluate` also take: `device_map`: `auto` spreads layers over all GPUs, the CPU and the disk; or a mapping from
    layers to devices, or its JSON file. `load_in_4bit`, `load_in_8bit`: quantize the base of an adapter with
    bitsandbytes; False dequantizes a base that is stored quantized. `gradient_checkpointing`: recompute activations in
    the backward pass instead of storing them."""


DEFAULTS = LoadOptions(
    task="auto",
    columns=None,
    limit=None,
    batch_size=8,
    max_length=None,
    device="auto",
    dtype="auto",
    model_args=None,
)


def complete(
    given: LoadOptions, function: Callable[..., Any], model_keys: Sequence[str] | None = BASIC_KEYS
) -> LoadOptions:
    """Check the options that a function was given, and add the defaults of the others.

    ``model_keys``: the keys of ``model_args`` that the function supports; None for all.
    """
    types = get_type_hints(LoadOptions)
    for name, value in given.items():
        if name not in types:
            known = [known for known in inspect.signature(function).parameters if known != "loading"] + [*types]
            hint = f"{nearest(name, known)}\n  Known are {', '.join(known)}."
            raise InputError(f"there is no option {name!r}{hint}")
        check(name, value, types[name])
    ModelArgs.parse(given.get("model_args"), model_keys)
    return DEFAULTS | given


def tokenizer_of(options: LoadOptions) -> str | None:
    """The tokenizer that ``model_args`` names."""
    return (options["model_args"] or {}).get("tokenizer")


class Examples(Protocol):
    """Rows of a data set as a model takes them."""

    @property
    def output(self) -> ExampleLoss: ...

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Some rows as keyword arguments of the model, with "labels"; padded to the longest of them."""
        ...

    def notes(self) -> list[str]:
        """What a user should know of how the rows were read, so far."""
        ...


@dataclass
class LoadedTask:
    """A model, its data, and the loss of an example."""

    model: nn.Module
    task: str
    output: ExampleLoss
    examples: int
    """Number of rows."""
    device: torch.device
    columns: Fields
    """What was read from which columns of the data."""
    missing_keys: list[str]
    """Tensors of the model that the checkpoint does not hold; none is a parameter."""
    data: Examples
    loading_notes: list[str]
    batch_size: int = 8
    """Examples of a batch, where nothing else is said."""

    @property
    def notes(self) -> list[str]:
        """What a user should know; rows that are too long are counted as batches are made."""
        return self.loading_notes + self.data.notes()

    def shared_facts(self) -> dict[str, Any]:
        """What must be the same in all processes of a run: otherwise their sums do not add up."""
        there = [p.detach() for p in self.model.parameters() if p.numel() and p.device.type != "meta"]
        weights = sum(float(p.flatten()[0]) for p in there)
        return {"version of gradmerge": __version__, "number of rows": self.examples, "weights": repr(weights)}

    def batches(
        self, batch_size: int | None = None, start: int = 0, end: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Batches on the CPU in the data's order, of rows ``start`` to ``end``; others are not even tokenized."""
        batch_size = self.batch_size if batch_size is None else batch_size
        end = self.examples if end is None else end
        if batch_size < 1:
            raise InputError(f"--batch-size {batch_size}: at least one example is needed")
        for first in range(start, end, batch_size):
            with quiet_transformers():
                batch = self.data.batch(range(first, min(first + batch_size, end)))
            yield batch


def load_task(
    model_reference: str | Path,
    source: str | Path,
    *,
    gradients: bool = False,
    bytes_per_parameter: int = 0,
    head: str | None = None,
    **loading: Unpack[LoadOptions],
) -> LoadedTask:
    """Load a model and data for it.

    ``model_reference`` is a folder, a Hub id (`org/name@revision`) or a PEFT adapter folder; ``source`` a .jsonl, .csv,
    .parquet or .txt file (each also .gz), an .npz, a folder of images by class, or `org/name:split` of the Hub.
    ``gradients``, ``bytes_per_parameter`` and ``head`` are as of :func:`load_model`; the other
    options are those of :class:`gradmerge.LoadOptions`.
    """
    options = complete(loading, load_task, None)
    model_reference, source = str(model_reference), str(source)
    rows = read_rows(source, limit=options["limit"])  # the quicker of the two to fail
    model, info = load_model(
        model_reference,
        options["task"],
        device=options["device"],
        dtype=options["dtype"],
        model_args=options["model_args"],
        gradients=gradients,
        bytes_per_parameter=bytes_per_parameter,
        head=head,
    )
    return joined(model_reference, model, info, rows, options)


def with_data(
    model_reference: str | Path, model: nn.Module, info: LoadingInfo, source: str | Path, **loading: Unpack[LoadOptions]
) -> LoadedTask:
    """Data for a model that :func:`load_model` has loaded."""
    options = complete(loading, with_data)
    return joined(str(model_reference), model, info, read_rows(str(source), limit=options["limit"]), options)


def joined(reference: str, model: nn.Module, info: LoadingInfo, rows: Rows, options: LoadOptions) -> LoadedTask:
    """A model and rows as one task."""
    fields = choose_columns(info.task, rows, options["columns"])
    notes = list(info.notes)
    if info.task == "causal-lm":
        rows, left_out = without_empty(rows, fields)
        notes += left_out
    examples: Examples
    if info.task == "image":
        examples = ImageExamples(rows, fields, model, load_image_processor(reference, info))
    else:
        kinds: dict[str, Any] = {"classify": TextExamples, "causal-lm": LanguageExamples}
        kinds |= {"seq2seq": PairExamples, "embedding": EmbeddingExamples}
        tokenizer = load_tokenizer(reference, info, tokenizer_of(options))
        examples = kinds[info.task](rows, fields, model, tokenizer, options["max_length"])
    return LoadedTask(
        model=model,
        task=info.task,
        output=examples.output,
        examples=len(rows),
        device=spread_device(model) or device_of(options["device"]),
        columns=fields,
        missing_keys=info.missing_keys,
        data=examples,
        loading_notes=notes,
        batch_size=options["batch_size"],
    )
