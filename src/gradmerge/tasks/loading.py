"""Load a model and data that fits it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, get_type_hints

import torch
from torch import Tensor, nn

from .. import __version__
from ..arguments import check
from ..curvature.losses import ExampleLoss
from ..curvature.offload import spread_device
from ..errors import InputError, library_errors
from ..load_options import DEFAULTS, LoadOptions
from ..quiet import quiet_transformers
from ..text import nearest
from .columns import Fields, choose_columns
from .data import Rows, read_rows
from .embedding import EmbeddingData
from .image import ImageData
from .model_args import BASIC_KEYS, ModelArgs
from .model_files import LoadingInfo, check_small_files, folder_of, offline
from .models import device_of, load_model
from .text import CausalLMData, ClassificationData, Seq2SeqData, TokenizedData, drop_empty_rows

_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken", "tekken.json")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
#: Limit on the pixels per edge of the images that an image processor makes.
MAX_EDGE = 10_000
_DATA_CLASSES: Mapping[str, type[TokenizedData]] = {
    "classify": ClassificationData,
    "causal-lm": CausalLMData,
    "seq2seq": Seq2SeqData,
    "embedding": EmbeddingData,
}


def complete(
    options: LoadOptions, function: Callable[..., Any], model_keys: Sequence[str] | None = BASIC_KEYS
) -> LoadOptions:
    """Check the options of a call, and add the defaults of the others.

    ``model_keys``: the keys of ``model_args`` that the function supports; None for all.
    """
    types = get_type_hints(LoadOptions)
    for name, value in options.items():
        if name not in types:
            known = [known for known in inspect.signature(function).parameters if known != "loading"] + [*types]
            hint = f"{nearest(name, known)}\n  Known are {', '.join(known)}."
            raise InputError(f"there is no option {name!r}{hint}")
        check(name, value, types[name])
    ModelArgs.parse(options.get("model_args"), model_keys)
    return DEFAULTS | options


def tokenizer_of(options: LoadOptions) -> str | None:
    """Return the tokenizer that ``model_args`` names."""
    return (options["model_args"] or {}).get("tokenizer")


@dataclass
class LoadedTask:
    """A model, its data, and the loss of an example."""

    model: nn.Module
    task: str
    loss: ExampleLoss
    examples: int
    """Number of rows."""
    device: torch.device
    columns: Fields
    """Role → the columns of the data that it is read from."""
    data: Any
    """The rows: :class:`.TokenizedData` or :class:`.ImageData`. ``batch(indices)`` returns arguments of the model."""
    loading_notes: list[str]
    batch_size: int = 8
    """Default of :meth:`batches`."""

    @property
    def notes(self) -> list[str]:
        """Notes for the user. Making batches adds some, such as the number of rows that are too long."""
        return [*self.loading_notes, *self.data.notes()]

    def shared_facts(self) -> dict[str, Any]:
        """Return what must be the same in all processes of a run. Otherwise their results cannot be combined."""
        parameters = [p.detach() for p in self.model.parameters() if p.numel() and p.device.type != "meta"]
        weights = sum(float(p.flatten()[0]) for p in parameters)
        return {"version of gradmerge": __version__, "number of rows": self.examples, "weights": repr(weights)}

    def batches(
        self, batch_size: int | None = None, start: int = 0, end: int | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield batches on the CPU in the data's order, of rows ``start`` to ``end``. Does not tokenize other rows."""
        batch_size = self.batch_size if batch_size is None else batch_size
        end = self.examples if end is None else end
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size}: must be at least 1")
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

    Args:
        model_reference: A folder, a Hub id (`org/name@revision`) or a PEFT adapter folder.
        source: A data source, see :func:`gradmerge.read_rows`.
        gradients: See :func:`load_model`.
        bytes_per_parameter: See :func:`load_model`.
        head: See :func:`load_model`.
        loading: The options of :class:`gradmerge.LoadOptions`.
    """
    options = complete(loading, load_task, None)
    rows = read_rows(str(source), limit=options["limit"])  # the quicker of the two to fail
    model, info = load_model(
        str(model_reference),
        options["task"],
        device=options["device"],
        dtype=options["dtype"],
        model_args=options["model_args"],
        gradients=gradients,
        bytes_per_parameter=bytes_per_parameter,
        head=head,
    )
    return make_task(model, info, rows, options)


def with_data(model: nn.Module, info: LoadingInfo, source: str | Path, **loading: Unpack[LoadOptions]) -> LoadedTask:
    """Load data for a model that :func:`load_model` has loaded."""
    options = complete(loading, with_data)
    return make_task(model, info, read_rows(str(source), limit=options["limit"]), options)


def read_unlabeled(
    source: str, module: nn.Module, info: LoadingInfo, options: LoadOptions
) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Read the inputs of a model from a data source, without the columns of labels. Return batches and notes.

    Language models read texts, prompts with completions, or conversations. Encoder-decoders read their targets too,
    as inputs of the decoder: labels in the batches say which positions count. Embedding models read single texts.
    """
    task = make_task(module, info, read_rows(source, limit=options["limit"]), options, labeled=False)
    return list(task.batches()), task.notes


def make_task(
    model: nn.Module, info: LoadingInfo, rows: Rows, options: LoadOptions, *, labeled: bool = True
) -> LoadedTask:
    """Combine a model and rows. Without ``labeled``, the data has no loss."""
    fields = choose_columns(info.task, rows, options["columns"], labeled=labeled)
    if info.task == "causal-lm":
        rows = drop_empty_rows(rows, fields)
    data: Any
    if info.task == "image":
        data = ImageData(rows, fields, model, load_image_processor(info))
    else:
        data_class, max_length = _DATA_CLASSES[info.task], options["max_length"]
        if info.sentence_config is not None and not labeled:
            config = info.sentence_config
            texts = [config.prepare(rows.text(index, fields["anchor"])) for index in range(len(rows))]
            rows = Rows(rows.label, [{"text": text} for text in texts], ("text",), notes=rows.notes)
            fields, data_class, max_length = {"text": ("text",)}, ClassificationData, max_length or config.max_length
        data = data_class(rows, fields, model, load_tokenizer(info, tokenizer_of(options)), max_length)
    return LoadedTask(
        model=model,
        task=info.task,
        loss=getattr(data, "loss", None),  # type: ignore[arg-type]
        examples=len(rows),
        device=spread_device(model) or device_of(options["device"]),
        columns=fields,
        data=data,
        loading_notes=info.notes,
        batch_size=options["batch_size"],
    )


def load_tokenizer(info: LoadingInfo, tokenizer: str | None = None) -> Any:
    """Load the tokenizer that a user names, or the model's, or that of an adapter's base model."""
    folders = list(dict.fromkeys([info.folder, info.base_folder]))
    if tokenizer is not None:
        folders = [folder_of(tokenizer)]
        check_small_files(folders[0])
    name = tokenizer or info.reference
    folder = next((f for f in folders if any(any(f.glob(pattern)) for pattern in _TOKENIZER_FILES)), None)
    if folder is None:
        raise InputError(
            f"{name}: there is no tokenizer in {folders[0]} (no tokenizer.json, nor a vocabulary). Give a folder or "
            "Hub id that has one: model_args tokenizer=PATH"
        )
    from transformers import AutoTokenizer

    problem = f"{name}: the tokenizer in {folder} cannot be loaded (model_args tokenizer=PATH names another)"
    with library_errors(problem), quiet_transformers(), offline():
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_image_processor(info: LoadingInfo) -> Any:
    """Load the model's image processor."""
    folders = dict.fromkeys([info.folder, info.base_folder])
    folder = next((f for f in folders if any((f / name).is_file() for name in _PROCESSOR_FILES)), None)
    if folder is None:
        raise InputError(f"{info.reference}: there is no preprocessor_config.json. Copy it from the base model.")
    import transformers

    processor_class: Any = transformers.AutoImageProcessor
    problem = f"{info.reference}: the image processor in {folder} cannot be loaded"
    with library_errors(problem), quiet_transformers(), offline():
        # Pillow gives the same pixels with and without torchvision, which resizes differently.
        processor = processor_class.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        sizes = [dict(getattr(processor, key, None) or {}) for key in ("size", "crop_size", "pad_size")]
    edge = max((n for size in sizes for n in size.values() if isinstance(n, int)), default=0)
    if edge > MAX_EDGE:
        raise InputError(
            f"{info.reference}: the image processor makes images of {edge} pixels per edge, above {MAX_EDGE}"
        )
    return processor
