"""Load the model of a task: no random weights, no remote code, no pickle."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.checkpoint import TORCH_TYPES, Buffers
from ..checkpoints.lora import is_adapter, read_adapter_config
from ..checkpoints.open import open_checkpoint
from ..checkpoints.quantization import detect_quantization
from ..curvature.losses import unwrapped
from ..curvature.offload import offloaded_modules
from ..distributed import launched
from ..errors import InputError
from ..io.reader import close_files, open_files
from ..io.small_files import read_json, refuse_hub_code
from ..quiet import quiet_transformers
from ..text import count, first_line, listed, nearest
from .adapters import add_adapter, base_folder_of, num_classes
from .embedding import EmbeddingModel, SentenceConfig, read_sentence_config
from .model_args import ModelArgs
from .resolve_model import check_small_files, check_weights, folder_of, offline

TASKS = ("classify", "causal-lm", "seq2seq", "image", "embedding")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
FLOAT16_NOTE = "the model is stored as float16 and computes in float32 here, because CPUs are slow in float16"

_AUTO_CLASSES = {
    "classify": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
_ADAPTER_TASKS = {"SEQ_CLS": "classify", "CAUSAL_LM": "causal-lm", "SEQ_2_SEQ_LM": "seq2seq"}

#: A model may have this many parameters for a new head, and this many times the numbers in its files: one stored
#: integer packs up to eight quantized weights.
MAX_NEW_PARAMETERS, MAX_RATIO = 50_000_000, 16


@dataclass
class LoadingInfo:
    """Facts about how a model was loaded."""

    folder: Path
    """The local folder of the model."""
    base_folder: Path
    """The same, or the folder of an adapter's base model."""
    task: str
    missing: dict[str, str] = field(default_factory=dict)
    """Parameters of the model that are not in the checkpoint, or have another shape there → what to tell the user."""
    notes: list[str] = field(default_factory=list)

    def drop_missing(self, prefixes: tuple[str, ...]) -> None:
        """Forget missing tensors that something else replaces."""
        self.missing = {name: text for name, text in self.missing.items() if not name.startswith(prefixes)}


def load_model(
    reference: str,
    task: str = "auto",
    *,
    device: str = "auto",
    dtype: str = "auto",
    model_args: Mapping[str, Any] | None = None,
    allow_missing: bool = False,
    merge_adapter: bool = True,
    gradients: bool = False,
    bytes_per_parameter: int = 0,
    head: str | None = None,
) -> tuple[nn.Module, LoadingInfo]:
    """Load a model with the head of its task, in eval mode.

    Three guarantees: only safetensors are read, no code of the Hub or the folder runs, and no weight is random. A
    checkpoint that lacks weights, such as those of the head, is refused.

    Args:
        reference: A folder, a Hub id (`org/name@revision`) or a PEFT adapter folder.
        task: One of `TASKS`, or `auto` for the task of the config's architecture.
        device: `auto` is a GPU if there is one.
        dtype: `auto` is as stored, but float32 for float16 on a CPU.
        model_args: Keys of :class:`ModelArgs`.
        allow_missing: Load a model whose checkpoint lacks weights. The loading info names them.
        merge_adapter: Merge an adapter into its base model. Otherwise only the adapter's parameters require gradients.
        gradients: The caller computes gradients, so a quantized model needs an adapter.
        bytes_per_parameter: See :meth:`ModelArgs.from_pretrained`.
        head: Another model, whose head replaces the model's.
    """
    if head is not None:
        return _load_with_head(reference, head, task, device=device, dtype=dtype, model_args=model_args)
    args = ModelArgs.parse(model_args)
    args.check_device(device)
    target = device_of(device)
    check_dtype(dtype)
    info, config, adapter, sentence_config = locate(reference, task)
    _check_weight_files(reference, info)
    quantized = _computes_quantized(reference, args, config, adapter is not None, gradients)
    if adapter is not None and args.device_map is not None and not quantized:
        raise InputError(
            f"{reference}: device_map: an adapter is merged into its base in memory. Write the merged model first "
            "(gradmerge merge), or keep the base quantized (load_in_4bit)."
        )
    on_cpu = target.type == "cpu" if args.device_map is None else not torch.cuda.is_available()
    if on_cpu and dtype == "auto" and getattr(config, "dtype", None) == torch.float16:
        dtype = "float32"
        info.notes.append(FLOAT16_NOTE)
    options = args.from_pretrained(config, dtype, target, quantized=quantized, bytes_per_parameter=bytes_per_parameter)
    with quiet_transformers(), offline():
        model = _from_pretrained(reference, config, dtype, info, options, dequantize=not quantized)
        if adapter is not None:
            merge = merge_adapter and not any(
                type(p).__name__ in ("Params4bit", "Int8Params") for p in model.parameters()
            )
            model, replaced = add_adapter(reference, model, info.folder, merge=merge)
            info.drop_missing(replaced)
    if sentence_config is not None:
        info.drop_missing(("pooler.",))  # the pooler of BERT is not used
    if info.missing and not allow_missing:
        raise InputError(
            f"{reference}: the checkpoint does not fit task {info.task}. {type(model).__name__} has weights that are "
            f"not in the checkpoint and would be random:\n{listed(info.missing.values())}\n"
            "  Give a model that was fine-tuned for the task, or another task."
        )
    if sentence_config is not None:
        model = EmbeddingModel(model, sentence_config)
    if args.gradient_checkpointing and not enable_gradient_checkpointing(model):
        raise InputError(f"model_args: gradient_checkpointing: {type(model).__name__} does not support it")
    if gradients and offloaded_modules(model):
        enable_gradient_checkpointing(model)  # or all weights that the backward pass needs are in memory at once
    return (model if "device_map" in options else model.to(target)).eval(), info


def _load_with_head(reference: str, head: str, task: str, **options: Any) -> tuple[nn.Module, LoadingInfo]:
    """Load a model with the head of another one. Its own head may be missing."""
    with_head, head_info = load_model(head, task, **options)
    model, info = load_model(reference, head_info.task, allow_missing=True, **options)
    prefix = encoder_prefix(with_head)
    if missing := [name for name in info.missing if prefix and name.startswith(prefix)]:
        raise InputError(f"{reference}: its files lack weights of the encoder:\n{listed(missing)}")
    info.missing = {}
    return with_encoder_of(model, with_head, reference, head), info


def locate(reference: str, task: str) -> tuple[LoadingInfo, Any, dict[str, Any] | None, SentenceConfig | None]:
    """Find a model, and read its config, an adapter's config, and the modules of a sentence-transformers folder."""
    folder = folder_of(reference)
    check_small_files(folder)
    adapter = read_adapter_config(folder) if is_adapter(folder) else None
    sentence_config = None
    if task == "embedding" or (task == "auto" and adapter is None and (folder / "modules.json").is_file()):
        if adapter is not None:
            raise InputError(f"{reference}: task embedding takes no adapter. Merge it into its base with PEFT first")
        task, sentence_config = "embedding", read_sentence_config(reference, folder)
    base_folder = folder
    if sentence_config is not None:
        base_folder = sentence_config.transformer
    elif adapter is not None:
        base_folder = base_folder_of(reference, folder, adapter)
    check_small_files(base_folder)
    config = _read_config(reference, folder, base_folder, adapter)
    return (
        LoadingInfo(folder, base_folder, _task_of(reference, config, task, adapter)),
        config,
        adapter,
        sentence_config,
    )


def empty_model(reference: str, task: str = "auto", dtype: str = "auto") -> tuple[nn.Module, LoadingInfo]:
    """Make a model on the meta device from its config, and check the headers of its weight files.

    ``dtype`` "auto" is the type in the config, or float32. An adapter counts as merged into its base.
    """
    check_dtype(dtype)
    info, config, _, sentence_config = locate(reference, task)
    _check_weight_files(reference, info)
    stored = getattr(config, "dtype", None) or torch.float32
    model_dtype = stored if dtype == "auto" else getattr(torch, dtype)
    with quiet_transformers(), offline():
        model = _make_empty(reference, config, info.task, dtype=model_dtype)
    return (model if sentence_config is None else EmbeddingModel(model, sentence_config)).eval(), info


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype}: not known{nearest(dtype, DTYPES)}\n  Known are {', '.join(DTYPES)}.")


def device_of(name: str) -> torch.device:
    """Return the device of a name. "auto" is a GPU, or else the CPU. Each process of a machine gets its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and (launch := launched()) is not None and torch.cuda.is_available():
        if launch.local_rank >= torch.cuda.device_count():
            raise InputError(
                f"device={name}: this machine has {torch.cuda.device_count()} GPUs, and this is process "
                f"{launch.local_rank} on it, counted from 0. Start fewer processes, or use device=cpu."
            )
        torch.cuda.set_device(launch.local_rank)
        name = f"cuda:{launch.local_rank}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device={name}: there is no such device here: {first_line(error)}") from error
    if device.type == "meta":
        raise InputError(f"device={name}: the meta device computes nothing. Use cpu or cuda.")
    return device


def _read_config(reference: str, folder: Path, base_folder: Path, adapter: dict[str, Any] | None) -> Any:
    """Read the model's config. An adapter without one has its base's, with the number of classes of its own head."""
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        path = base_folder / "config.json"
    if not path.is_file():
        raise InputError(f"{reference}: there is no config.json in {base_folder}. Save the model with transformers.")
    try:
        refuse_hub_code(read_json(path), path)
        with quiet_transformers(), offline():
            config = AutoConfig.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # bad JSON, an unknown model type, values that do not fit
        raise InputError(f"{reference}: {path} cannot be used: {first_line(error)}") from error
    if adapter is not None and path.parent != folder and (classes := num_classes(folder)) is not None:
        config.num_labels = classes
    return config


def _task_of(reference: str, config: Any, task: str, adapter: dict[str, Any] | None) -> str:
    """Return the task that the user asks for. "auto" is the task of the config's architecture."""
    if task != "auto":
        if task not in TASKS:
            raise InputError(f"task={task}: not known{nearest(task, TASKS)}\n  Known are {', '.join(TASKS)}.")
        return task
    if adapter is not None and adapter.get("task_type") in _ADAPTER_TASKS:
        return _ADAPTER_TASKS[adapter["task_type"]]
    from transformers.models.auto import modeling_auto

    architectures = _architectures(config)
    for name, (_, table) in _AUTO_CLASSES.items():
        for value in getattr(modeling_auto, table).values():
            if not set(architectures).isdisjoint([value] if isinstance(value, str) else value):
                return name
    raise InputError(
        f"{reference}: no task has the architecture {', '.join(architectures) or 'none'}. Give a task, one of "
        f"{', '.join(TASKS)}"
    )


def _architectures(config: Any) -> list[str]:
    names = getattr(config, "architectures", None)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list | tuple) else []


def class_name(task: str, config: Any) -> str:
    """Return the name of the class in transformers for a task."""
    if task != "embedding":
        return _AUTO_CLASSES[task][0]
    return "AutoModelForTextEncoding" if getattr(config, "is_encoder_decoder", False) else "AutoModel"


def _check_weight_files(reference: str, info: LoadingInfo) -> None:
    check_weights(reference, info.base_folder, "model")
    if is_adapter(info.folder):
        check_weights(reference, info.folder, "adapter_model")


def _cannot_load(reference: str, config: Any, task: str, error: Exception) -> InputError:
    architecture = ", ".join(_architectures(config)) or "unknown"
    return InputError(
        f"{reference}: the model (architecture {architecture}) cannot be loaded for task {task}: {first_line(error)}"
    )


def _make_empty(reference: str, config: Any, task: str, **options: Any) -> nn.Module:
    """Make the model on the meta device."""
    import transformers

    try:
        with torch.device("meta"):
            model_class = getattr(transformers, class_name(task, config))
            model: nn.Module = model_class.from_config(config, trust_remote_code=False, **options)
    except Exception as error:  # no such model for the task, or impossible values
        raise _cannot_load(reference, config, task, error) from error
    return model


def _from_pretrained(
    reference: str, config: Any, dtype: str, info: LoadingInfo, options: dict[str, Any], *, dequantize: bool
) -> nn.Module:
    import transformers

    model_class: Any = getattr(transformers, class_name(info.task, config))
    empty = _make_empty(reference, config, info.task)
    _refuse_inflated(reference, info.base_folder, empty)
    folder: Path | None = info.base_folder
    state = _dequantized_state(info.base_folder, config, info) if dequantize else None
    if state is not None:
        if "device_map" in options:
            raise InputError(
                f"{reference}: the model is stored quantized and dequantized in memory, without device_map"
            )
        # Only classes of models load weights from memory, not AutoModel.
        model_class, folder, options = type(empty), None, options | {"state_dict": state}
    offload_folder = tempfile.TemporaryDirectory(prefix="gradmerge-offload-") if "device_map" in options else None
    if offload_folder is not None:
        options = options | {"offload_folder": offload_folder.name}
    try:
        model, loading = model_class.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with the shapes, unless an adapter replaces them
            **options,
        )
    except MemoryError:
        raise
    except Exception as error:  # a corrupt file, an unsupported attention
        raise _cannot_load(reference, config, info.task, error) from error
    assert isinstance(model, nn.Module)
    parameters = {name for name, _ in model.named_parameters()}  # the model computes buffers itself
    info.missing = {name: name for name in sorted(loading["missing_keys"]) if name in parameters} | {
        name: f"{name}: {list(stored)} in the checkpoint, {list(wanted)} in the model"
        for name, stored, wanted in sorted(loading["mismatched_keys"])
    }
    if offload_folder is not None:
        model.__dict__["_offload_folder"] = offload_folder  # deleted together with the model
    return model


def _refuse_inflated(reference: str, folder: Path, empty: nn.Module) -> None:
    """Refuse a config that makes far more weights than the files hold: random ones, which fill the memory first."""
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    files = open_files(folder, "model") or []
    stored = sum(entry.numel for file in files for entry in file.entries.values())
    close_files(files)
    if parameters > MAX_NEW_PARAMETERS + MAX_RATIO * stored:
        raise InputError(
            f"{reference}: its config makes a model of {count(parameters)} parameters, and its files hold "
            f"{count(stored)}. Is it the config of another model?"
        )


def _dequantized_state(folder: Path, config: Any, info: LoadingInfo) -> dict[str, Tensor] | None:
    """Return the dequantized weights of a quantized model, which gradients need; None for other models."""
    candidates: list[Any] = [config, getattr(config, "text_config", None)]
    parts = [part for part in candidates if _has_quantization(part)]
    if not parts:
        return None
    with open_checkpoint(folder) as stored:
        quantization = detect_quantization(stored)
    if quantization is None or not quantization.readable:
        return None
    with open_checkpoint(folder, dequantize=True) as dequantized:
        state = {
            name: dequantized.read(name, 0, tensor.numel, Buffers())
            .to(TORCH_TYPES[tensor.dtype])
            .reshape(tensor.shape)
            .clone()
            for name, tensor in dequantized.tensors.items()
        }
        info.notes += dequantized.notes
    for part in parts:
        del part.quantization_config
    return state


def _has_quantization(config: Any) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _computes_quantized(reference: str, args: ModelArgs, config: Any, adapter: bool, gradients: bool) -> bool:
    """Whether the model computes with bitsandbytes weights: ``args`` asks for them, or an adapter's base has them."""
    quantized = bool(args.bits)
    if args.bits is None and gradients and adapter and _has_quantization(config):
        stored = config.quantization_config
        method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
        quantized = str(getattr(method, "value", method)) == "bitsandbytes"
    if quantized and gradients and not adapter:
        raise InputError(
            f"{reference}: model_args: load_in_{args.bits}bit: quantized weights have no gradients. Give the folder of "
            "a PEFT adapter: curvature of its parameters can be estimated on a quantized base."
        )
    return quantized


def enable_gradient_checkpointing(model: Any) -> bool:
    """Enable gradient checkpointing. Return whether the model supports it."""
    inner = model
    while not hasattr(inner, "gradient_checkpointing_enable") and (children := list(inner.children())):
        inner = children[0]
    if not getattr(inner, "supports_gradient_checkpointing", False):
        return False
    inner.gradient_checkpointing_enable({"use_reentrant": False})
    if hasattr(inner, "config"):
        inner.config.use_cache = False
    return True


def model_with(model: Any, state: Mapping[str, Tensor], name: str | None = None) -> Any:
    """Make a model like this one, in its dtype and on its device, with other weights.

    Args:
        model: The model.
        state: Weights by the names of checkpoint files. transformers renames some of them while loading.
        name: The task, for errors.
    """
    if isinstance(model, EmbeddingModel):
        prefix = model.stored_parts["transformer"]
        part = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        return EmbeddingModel(model_with(model.transformer, part, name), model.sentence_config).eval()
    with quiet_transformers():
        result, info = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=dict(state),
            dtype=model.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, with a message
        )
    wrong = {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
    wrong &= {parameter for parameter, _ in result.named_parameters()}
    if wrong:
        raise InputError(
            f"{name or type(model).__name__}: the merged weights do not fit its model: {min(wrong)} is missing or has "
            "another shape"
        )
    return result.to(model.device).eval()


def representation_modules(module: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the language-model head whose input is the representation, or else the encoder whose output it is."""
    model: Any = unwrapped(module)
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if isinstance(head, nn.Module):
        return head, None
    encoder = getattr(model, "base_model", None)
    return None, encoder if isinstance(encoder, nn.Module) and encoder is not model else None


def encoder_prefix(module: nn.Module) -> str:
    """Return the path of the encoder in a model with a head for a task, with a dot; empty if there is none."""
    _, encoder = representation_modules(module)
    if encoder is None:
        return ""
    return next(f"{name}." for name, child in unwrapped(module).named_modules() if child is encoder)


@torch.no_grad()
def with_encoder_of(model: nn.Module, head: nn.Module, reference: str, head_reference: str) -> nn.Module:
    """Copy the encoder's weights of ``model`` into ``head``, a model with the wanted head, and return it."""
    prefix = encoder_prefix(head)
    if not prefix:
        raise InputError(f"head {head_reference}: has no head apart from its encoder")
    weights = model.state_dict()
    for name, value in head.state_dict().items():
        if name.startswith(prefix):
            if name not in weights or weights[name].shape != value.shape:
                shape = list(weights[name].shape) if name in weights else "missing"
                raise InputError(
                    f"head {head_reference}: does not fit {reference}: {name} is {list(value.shape)} there, and "
                    f"{shape} in {reference}"
                )
            value.copy_(weights[name])
    return head
