"""Loading what a task runs on: the model, its tokenizer, its image processor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.lora import is_adapter, read_adapter_config
from ..checkpoints.opening import HUB_ID, fetch_from_hub
from ..errors import InputError
from ..quiet import quiet_transformers
from ..storage.modelconfig import check_implementation, refuse_hub_code
from ..storage.smallfile import read_json
from ..storage.tensorfile import close_files, in_utf8, local_path, open_files
from ..text import count, listed, nearest
from .adapters import without_patterns
from .folders import check_small_files, check_weights

TASKS = ("classify", "causal-lm", "seq2seq", "image")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

_AUTO_CLASSES = {
    "classify": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
_ADAPTER_TASKS = {"SEQ_CLS": "classify", "CAUSAL_LM": "causal-lm", "SEQ_2_SEQ_LM": "seq2seq"}
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken", "tekken.json")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PROCESSOR_SIZES = ("size", "crop_size", "pad_size")
#: Pixels along the longer edge of what an image processor makes.
LONGEST_EDGE = 10_000

#: A model may have so many parameters more than its files, and so many times as many: a new head, or eight codes in an integer.
MOST_INFLATED = (50_000_000, 16)

#: Layers at the top whose number of rows is the number of classes.
_HEADS = ("score", "classifier", "classifier.out_proj")


@dataclass
class LoadingInfo:
    """What there is to know about how a model was loaded."""

    folder: Path
    """Where the model lies on this machine."""
    base_folder: Path
    """The same, or for an adapter the folder of its base."""
    task: str
    missing_keys: list[str] = field(default_factory=list)
    """Parameters and buffers of the model that the checkpoint does not hold."""
    other_shapes: dict[str, str] = field(default_factory=dict)
    """Tensors whose shape in the checkpoint is not the model's, and both shapes."""
    unexpected_keys: list[str] = field(default_factory=list)
    """Tensors of the checkpoint that the model has no place for."""
    notes: list[str] = field(default_factory=list)


def load_model(
    reference: str,
    task: str = "auto",
    *,
    device: str = "auto",
    dtype: str = "auto",
    attn: str | None = None,
    whole: bool = True,
) -> tuple[nn.Module, LoadingInfo]:
    """The model of a folder, a Hub id or an adapter, with the head of its task, in eval mode on the device.

    ``dtype`` "auto" is as stored, but float32 for float16 on a CPU. Only safetensors are read, and no remote code is run.
    A model whose checkpoint lacks weights, as of the head, is refused, since they would be random numbers; with ``whole=False``
    the loading info names them instead.
    """
    place = device_of(device)
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: not known{nearest(dtype, DTYPES)}\n  Known are {', '.join(DTYPES)}.")
    check_implementation("attn_implementation", attn, "--attn")
    folder = _folder_of(reference)
    check_small_files(folder)
    adapter = read_adapter_config(folder) if is_adapter(folder) else None
    base_folder = folder if adapter is None else _base_of(reference, folder, adapter)
    check_small_files(base_folder)
    config = _config_of(reference, folder, base_folder, adapter)
    task = task_of(reference, config, task, adapter)
    info = LoadingInfo(folder, base_folder, task)
    check_weights(reference, base_folder, "model")
    if adapter is not None:
        check_weights(reference, folder, "adapter_model")
    with quiet_transformers(), offline():
        model = _loaded(reference, base_folder, config, task, dtype, attn, info)
        if adapter is not None:
            model = _with_adapter(reference, model, folder, info)
    if whole:
        _refuse_random_weights(reference, model, info)
    if place.type == "cpu" and dtype == "auto" and any(p.dtype == torch.float16 for p in model.parameters()):
        model = model.float()
        info.notes.append("the model is stored as float16 and computes in float32 here, as CPUs are slow in float16")
    return model.to(place).eval(), info


def device_of(name: str) -> torch.device:
    """The device of a name; "auto" is the first GPU, or the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"--device {name}: there is no such device here: {reason}") from error
    if device.type == "meta":
        raise InputError(f"--device {name}: nothing can be computed on it")
    return device


def task_of(reference: str, config: Any, task: str, adapter: dict[str, Any] | None = None) -> str:
    """The task a user asks for; "auto" is what the config's architecture was made for."""
    if task != "auto":
        if task not in TASKS:
            raise InputError(f"--task {task}: not known{nearest(task, TASKS)}\n  Known are {', '.join(TASKS)}.")
        return task
    if adapter is not None and adapter.get("task_type") in _ADAPTER_TASKS:
        return _ADAPTER_TASKS[adapter["task_type"]]
    from transformers.models.auto import modeling_auto

    architectures = _architectures(config)
    for name, (_, table) in _AUTO_CLASSES.items():
        known: set[str] = set()
        for value in getattr(modeling_auto, table).values():
            known |= {value} if isinstance(value, str) else set(value)
        if known & set(architectures):
            return name
    stated = ", ".join(architectures) or "none"
    raise InputError(
        f"{reference}: the task cannot be told from the model's architecture ({stated}). Give --task, one of {', '.join(TASKS)}"
    )


def _architectures(config: Any) -> list[str]:
    stated = getattr(config, "architectures", None)
    return [name for name in stated if isinstance(name, str)] if isinstance(stated, list | tuple) else []


def load_tokenizer(reference: str, info: LoadingInfo, tokenizer: str | None = None) -> Any:
    """The tokenizer that a user names, or the one beside the model, or beside the base of an adapter."""
    if tokenizer is not None:
        folders = [_folder_of(tokenizer)]
        check_small_files(folders[0])
    else:
        folders = list(dict.fromkeys([info.folder, info.base_folder]))
    folder = next((f for f in folders if any(any(f.glob(name)) for name in _TOKENIZER_FILES)), None)
    if folder is None:
        raise InputError(
            f"{tokenizer or reference}: no tokenizer in {folders[0]} (no tokenizer.json, nor a vocabulary). "
            "Name a folder or Hub id that has one: --tokenizer PATH"
        )
    from transformers import AutoTokenizer

    try:
        with quiet_transformers(), offline():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers passes on errors of every kind, from JSON to sentencepiece
        raise InputError(
            f"{tokenizer or reference}: the tokenizer in {folder} cannot be loaded: {_first_line(error)}. "
            "Name another folder: --tokenizer PATH"
        ) from error


def load_image_processor(reference: str, info: LoadingInfo) -> Any:
    """The image processor beside the model, or None when there is none."""
    folders = dict.fromkeys([info.folder, info.base_folder])
    folder = next((f for f in folders if any((f / name).is_file() for name in _PROCESSOR_FILES)), None)
    if folder is None:
        return None
    import transformers

    kind: Any = transformers.AutoImageProcessor
    try:
        with quiet_transformers(), offline():
            # The same pixels with and without torchvision: its resizing differs from that of PIL.
            processor = kind.from_pretrained(folder, backend="pil", local_files_only=True, trust_remote_code=False)
            sizes = [n for key in _PROCESSOR_SIZES for n in dict(getattr(processor, key, None) or {}).values()]
    except Exception as error:
        raise InputError(
            f"{reference}: the image processor in {folder} cannot be loaded: {_first_line(error)}"
        ) from error
    if any(isinstance(n, int) and n > LONGEST_EDGE for n in sizes):
        raise InputError(
            f"{reference}: the image processor in {folder} makes images of {max(sizes)} pixels an edge; {LONGEST_EDGE} is the limit"
        )
    return processor


def model_with(model: Any, state: Mapping[str, Tensor], name: str | None = None) -> Any:
    """A model like this one, of its type and on its device, with weights that go by the names of checkpoint files.

    transformers renames some weights between files and memory, so it is the one to load them. ``name`` is for errors.
    """
    with quiet_transformers():
        made, info = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=dict(state),
            dtype=model.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, with a message
        )
    unfit = {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
    lacking = sorted(unfit & {parameter for parameter, _ in made.named_parameters()})
    if lacking:
        raise InputError(
            f"{name or type(model).__name__}: the merged weights do not fit its model: "
            f"{lacking[0]} is missing or has another shape"
        )
    return made.to(model.device).eval()


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Without the Hub: all that a model needs lies in its folder by now, whatever its config may ask for."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _folder_of(reference: str) -> Path:
    path = local_path(reference, None)
    if path.is_dir():
        return in_utf8(path)
    if path.is_file():
        raise InputError(f"{reference}: a file is not enough to run a model; give the folder with its config.json")
    if HUB_ID.fullmatch(reference) and not reference.startswith("."):
        return fetch_from_hub(reference, allow_pickle=False)
    raise InputError(f"{reference}: no such folder ({path.absolute()})")


def _base_of(reference: str, folder: Path, adapter: dict[str, Any]) -> Path:
    stated = adapter.get("base_model_name_or_path")
    if not isinstance(stated, str) or not stated:
        raise InputError(f"{reference}: the adapter's config names no base model")
    beside = local_path(stated, folder)
    try:
        base = beside if beside.is_dir() and not local_path(stated, None).is_dir() else _folder_of(stated)
    except InputError as error:
        raise InputError(f"{reference}: the adapter's base cannot be opened. {error}") from error
    if is_adapter(base):
        raise InputError(f"{reference}: the adapter names another adapter as its base, {stated}. Merge that one first.")
    return base


def _config_of(reference: str, folder: Path, base_folder: Path, adapter: dict[str, Any] | None) -> Any:
    """The config of the model; for an adapter its own if it has one, else that of its base with the adapter's classes."""
    from transformers import AutoConfig

    where = folder if (folder / "config.json").is_file() else base_folder
    if not (where / "config.json").is_file():
        raise InputError(f"{reference}: no config.json in {where}, so what model this is cannot be told")
    try:
        written = read_json(where / "config.json")
    except InputError as error:
        raise InputError(f"{reference}: {where / 'config.json'} cannot be used. {error}") from error
    refuse_hub_code(written, where / "config.json")
    try:
        with quiet_transformers(), offline():
            config = AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # bad JSON, an unknown model type, values that do not fit
        raise InputError(f"{reference}: {where / 'config.json'} cannot be used: {_first_line(error)}") from error
    if adapter is not None and where is base_folder:
        classes = _classes_of(folder)
        if classes is not None and classes != config.num_labels:
            config.num_labels = classes
    return config


def _classes_of(folder: Path) -> int | None:
    """The number of classes of the head that an adapter brings along, if it does."""
    for file in open_files(folder, "adapter_model") or []:
        with contextlib.closing(file):
            for head in _HEADS:
                for middle in ("", ".modules_to_save.default"):
                    entry = file.entries.get(f"base_model.model.{head}{middle}.weight")
                    if entry is not None:
                        return entry.shape[0]
    return None


def _loaded(
    reference: str, folder: Path, config: Any, task: str, dtype: str, attn: str | None, info: LoadingInfo
) -> nn.Module:
    import transformers

    kind = getattr(transformers, _AUTO_CLASSES[task][0])
    given = {} if attn is None else {"attn_implementation": attn}
    _refuse_inflated(reference, folder, kind, config)
    try:
        model, loading = kind.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the shapes, unless an adapter replaces them
            **given,
        )
    except MemoryError:
        raise
    except Exception as error:  # no such model for the task, a corrupt file, an unknown attention
        stated = ", ".join(_architectures(config)) or "unknown"
        raise InputError(
            f"{reference}: the model (architecture {stated}) cannot be loaded for task {task}: {_first_line(error)}"
        ) from error
    info.missing_keys = sorted(loading["missing_keys"])
    info.unexpected_keys = sorted(loading["unexpected_keys"])
    info.other_shapes = {
        name: f"{list(stored)} in the checkpoint, {list(wanted)} in the model"
        for name, stored, wanted in sorted(loading["mismatched_keys"])
    }
    assert isinstance(model, nn.Module)
    return model


def _refuse_inflated(reference: str, folder: Path, kind: Any, config: Any) -> None:
    """Refuse a config that makes far more weights than the files hold: they would be random, and take all memory first."""
    try:
        with torch.device("meta"):
            empty = kind.from_config(config, trust_remote_code=False)
    except Exception:  # which loading it tells better
        return
    wanted = sum(parameter.numel() for parameter in empty.parameters())
    files = open_files(folder, "model") or []
    stored = sum(entry.numel for file in files for entry in file.entries.values())
    close_files(files)
    if wanted > MOST_INFLATED[0] + MOST_INFLATED[1] * stored:
        raise InputError(
            f"{reference}: its config makes a model of {count(wanted)} parameters, and its files hold {count(stored)}. Is the config of "
            "another model?"
        )


def _with_adapter(reference: str, model: nn.Module, folder: Path, info: LoadingInfo) -> nn.Module:
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise InputError(
            f"{reference}: this is a PEFT adapter, which needs the library peft: pip install peft"
        ) from error
    try:
        config = without_patterns(PeftConfig.from_pretrained(str(folder)), dict(model.named_modules()), folder)
        wrapped = PeftModel.from_pretrained(model, str(folder), config=config)
        brought = _modules_to_save(wrapped)
        merged = wrapped.merge_and_unload()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{reference}: the adapter cannot be put on its base {info.base_folder}: {_first_line(error)}"
        ) from error
    merged.requires_grad_(True)  # an adapter freezes its base, but the merged weights are a model like any other
    replaced = tuple(f"{name}." for name in brought)
    info.missing_keys = [key for key in info.missing_keys if not key.startswith(replaced)]
    info.other_shapes = {key: shapes for key, shapes in info.other_shapes.items() if not key.startswith(replaced)}
    assert isinstance(merged, nn.Module)
    return merged


def _modules_to_save(wrapped: nn.Module) -> list[str]:
    """Names, in the base, of the modules that the adapter replaces whole, such as a head."""
    found = [name for name, _ in wrapped.named_modules() if name.endswith(".modules_to_save")]
    return [name.removeprefix("base_model.model.").removesuffix(".modules_to_save") for name in found]


def _refuse_random_weights(reference: str, model: nn.Module, info: LoadingInfo) -> None:
    parameters = {name for name, _ in model.named_parameters()}
    random = [key for key in info.missing_keys if key in parameters]  # a buffer such as position_ids makes itself
    random += [f"{name}: {shapes}" for name, shapes in info.other_shapes.items()]
    if random:
        architecture = type(model).__name__
        raise InputError(
            f"{reference}: model and task do not fit: {architecture}, which task {info.task} needs, has weights that the "
            f"checkpoint does not give, and random numbers in their place would make the results meaningless:\n{listed(random)}\n"
            f"  Give a model that was fine-tuned for the task, or another --task."
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    first = text.partition("\n")[0] or type(error).__name__
    return first[:300].rstrip(". ")
