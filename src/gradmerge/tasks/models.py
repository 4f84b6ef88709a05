"""Load the model of a task: no random weights, no remote code, no pickle."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import check_known
from ..checkpoints.checkpoint import TORCH_TYPES, Buffers
from ..checkpoints.lora import PatternMatcher
from ..checkpoints.open import open_checkpoint
from ..checkpoints.quantization import detect_quantization
from ..curvature.losses import unwrapped
from ..curvature.offload import offloaded_modules
from ..distributed import launched
from ..errors import InputError, library_errors
from ..io.reader import close_files, open_files
from ..quiet import quiet_transformers
from ..text import count, first_line, listed
from .embedding import EmbeddingModel
from .model_args import ModelArgs
from .model_files import LoadingInfo, architectures, check_weights, class_name, locate, offline

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
FLOAT16_NOTE = "the model is stored as float16 and computes in float32 here, because CPUs are slow in float16"

#: A model may have this many parameters for a new head, and this many times the numbers in its files: one stored
#: integer packs up to eight quantized weights.
MAX_NEW_PARAMETERS, MAX_RATIO = 50_000_000, 16


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
    check_known(f"dtype={dtype}", dtype, DTYPES)
    info = locate(reference, task)
    check_weights(info)
    quantized = _computes_quantized(info, args, gradients)
    if info.adapter is not None and args.device_map is not None and not quantized:
        raise InputError(
            f"{reference}: device_map: an adapter is merged into its base in memory. Write the merged model first "
            "(gradmerge merge), or keep the base quantized (load_in_4bit)."
        )
    on_cpu = target.type == "cpu" if args.device_map is None else not torch.cuda.is_available()
    if on_cpu and dtype == "auto" and getattr(info.config, "dtype", None) == torch.float16:
        dtype = "float32"
        info.notes.append(FLOAT16_NOTE)
    options = args.from_pretrained(info.config, dtype, target, quantized, bytes_per_parameter)
    with quiet_transformers(), offline():
        model = _from_pretrained(info, dtype, options, dequantize="device_map" not in options)
        if info.adapter is not None:
            merge = merge_adapter and not quantized and not _has_quantization(info.config)
            model = _add_adapter(info, model, merge=merge)
    if info.sentence_config is not None:
        _drop_missing(info, "pooler.")  # the pooler of BERT is not used
    if info.missing and not allow_missing:
        raise InputError(
            f"{reference}: the checkpoint does not fit task {info.task}. {type(model).__name__} has weights that are "
            f"not in the checkpoint and would be random:\n{listed(info.missing.values())}\n"
            "  Give a model that was fine-tuned for the task, or another task."
        )
    if info.sentence_config is not None:
        model = EmbeddingModel(model, info.sentence_config)
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


def empty_model(reference: str, task: str = "auto", dtype: str = "auto") -> tuple[nn.Module, LoadingInfo]:
    """Make a model on the meta device from its config, and check the headers of its weight files.

    ``dtype`` "auto" is the type in the config, or float32. An adapter counts as merged into its base.
    """
    check_known(f"dtype={dtype}", dtype, DTYPES)
    info = locate(reference, task)
    check_weights(info)
    stored = getattr(info.config, "dtype", None) or torch.float32
    with quiet_transformers(), offline():
        model = _make_empty(info, dtype=stored if dtype == "auto" else getattr(torch, dtype))
    return (model if info.sentence_config is None else EmbeddingModel(model, info.sentence_config)).eval(), info


def device_of(name: str) -> torch.device:
    """Return the device of a name. "auto" is a GPU, or else the CPU. Each process of a machine gets its own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if name == "cuda" and (launch := launched()) is not None:
            name = f"cuda:{launch.local_rank}"
            torch.cuda.set_device(launch.local_rank)
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device={name}: there is no such device here: {first_line(error)}") from error
    if device.type == "meta":
        raise InputError(f"device={name}: the meta device computes nothing. Use cpu or cuda.")
    return device


def _make_empty(info: LoadingInfo, **options: Any) -> nn.Module:
    """Make the model on the meta device."""
    import transformers

    model_class: Any = getattr(transformers, class_name(info))
    # An architecture of another task, or values that do not fit together.
    with library_errors(_cannot_load(info)), torch.device("meta"):
        model: nn.Module = model_class.from_config(info.config, trust_remote_code=False, **options)
    return model


def _cannot_load(info: LoadingInfo) -> str:
    architecture = ", ".join(architectures(info.config)) or "unknown"
    return f"{info.reference}: the model (architecture {architecture}) cannot be loaded for task {info.task}"


def _from_pretrained(info: LoadingInfo, dtype: str, options: dict[str, Any], *, dequantize: bool) -> nn.Module:
    """Load the model with transformers, and note the parameters that its files lack."""
    import transformers

    empty = _make_empty(info)
    _refuse_inflated(info, empty)
    model_class: Any = getattr(transformers, class_name(info))
    folder: Path | None = info.base_folder
    if dequantize and (state := _dequantized_state(info)) is not None:
        # Only classes of models load weights from memory, not AutoModel.
        model_class, folder, options = type(empty), None, options | {"state_dict": state}
    offload_folder = tempfile.TemporaryDirectory(prefix="gradmerge-offload-") if "device_map" in options else None
    if offload_folder is not None:
        options = options | {"offload_folder": offload_folder.name}
    with library_errors(_cannot_load(info)):  # a corrupt file, an unsupported attention
        model, loading = model_class.from_pretrained(
            folder,
            config=info.config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused by the caller, unless an adapter replaces them
            **options,
        )
    assert isinstance(model, nn.Module)
    parameters = {name for name, _ in model.named_parameters()}  # the model computes buffers itself
    info.missing = {name: name for name in sorted(loading["missing_keys"]) if name in parameters} | {
        name: f"{name}: {list(stored)} in the checkpoint, {list(wanted)} in the model"
        for name, stored, wanted in sorted(loading["mismatched_keys"])
    }
    if offload_folder is not None:
        model.__dict__["_offload_folder"] = offload_folder  # deleted together with the model
    return model


def _drop_missing(info: LoadingInfo, *prefixes: str) -> None:
    """Forget missing parameters that the model does not use, or that an adapter replaces."""
    info.missing = {name: text for name, text in info.missing.items() if not name.startswith(prefixes)}


def _refuse_inflated(info: LoadingInfo, empty: nn.Module) -> None:
    """Refuse a config that makes far more weights than the files hold: random ones, which fill the memory first."""
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    files = open_files(info.base_folder, "model") or []
    stored = sum(entry.numel for file in files for entry in file.entries.values())
    close_files(files)
    if parameters > MAX_NEW_PARAMETERS + MAX_RATIO * stored:
        raise InputError(
            f"{info.reference}: its config makes a model of {count(parameters)} parameters, and its files hold "
            f"{count(stored)}. Is it the config of another model?"
        )


def _dequantized_state(info: LoadingInfo) -> dict[str, Tensor] | None:
    """Return the dequantized weights of a quantized model, which gradients need; None for other models."""
    configs = [info.config, getattr(info.config, "text_config", None)]
    if not any(map(_has_quantization, configs)):
        return None
    with open_checkpoint(info.base_folder) as stored:
        quantization = detect_quantization(stored)
    if quantization is None or not quantization.readable:
        return None
    with open_checkpoint(info.base_folder, dequantize=True) as dequantized:
        state = {
            name: dequantized.read(name, 0, tensor.numel, Buffers())
            .to(TORCH_TYPES[tensor.dtype])
            .reshape(tensor.shape)
            .clone()
            for name, tensor in dequantized.tensors.items()
        }
        info.notes += dequantized.notes
    for config in filter(_has_quantization, configs):
        del config.quantization_config
    return state


def _has_quantization(config: Any) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _computes_quantized(info: LoadingInfo, args: ModelArgs, gradients: bool) -> bool:
    """Whether the model computes with bitsandbytes weights: ``args`` asks for them, or an adapter's base has them."""
    quantized = args.bits > 0
    if gradients and info.adapter is not None and _has_quantization(info.config):
        stored = info.config.quantization_config
        method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
        quantized |= str(getattr(method, "value", method)) == "bitsandbytes"
    if quantized and gradients and info.adapter is None:
        raise InputError(
            f"{info.reference}: model_args: load_in_{args.bits}bit: quantized weights have no gradients. Give the "
            "folder of a PEFT adapter: curvature of its parameters can be estimated on a quantized base."
        )
    return quantized


def _add_adapter(info: LoadingInfo, model: nn.Module, *, merge: bool) -> nn.Module:
    """Merge the adapter into its base model, or wrap the model for training the adapter."""
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise InputError(
            f"{info.reference}: this is a PEFT adapter, which needs the library peft: pip install peft"
        ) from error
    folder = str(info.folder)
    with library_errors(f"{info.reference}: the adapter does not fit its base model"):
        config = _resolve_patterns(PeftConfig.from_pretrained(folder), model, info.folder)
        wrapped = PeftModel.from_pretrained(model, folder, config=config, is_trainable=not merge)
        saved_modules = [name for name, _ in wrapped.named_modules() if name.endswith(".modules_to_save")]
        result = wrapped.merge_and_unload() if merge else wrapped
    if merge:
        result.requires_grad_(True)  # peft freezes the base model
    assert isinstance(result, nn.Module)
    _drop_missing(
        info, *(name.removeprefix("base_model.model.").removesuffix("modules_to_save") for name in saved_modules)
    )
    return result


def _resolve_patterns(config: Any, model: nn.Module, folder: Path) -> Any:
    """Replace the regular expressions in an adapter's config by the names that they match.

    PEFT matches them with ``re``, which has no time limit.
    """
    path = folder / "adapter_config.json"
    matcher = PatternMatcher(path)
    modules = [name for name, _ in model.named_modules() if name]
    targets = [*modules, *(name for name, _ in model.named_parameters())] if config.target_parameters else modules

    def matching(pattern: str, names: list[str]) -> list[str]:
        return [name for name in names if matcher.fullmatch(pattern, name)]

    for key in ("target_modules", "exclude_modules"):
        value = getattr(config, key, None)
        if isinstance(value, str) and value != "all-linear":
            setattr(config, key, set(matching(value, modules)))
    if config.target_modules is not None and not config.target_modules and not config.target_parameters:
        raise InputError(f"{path}: target_modules fits no module of the base. Was it trained on another base?")
    for key in ("rank_pattern", "alpha_pattern"):
        values = getattr(config, key, None) or {}
        names = {pattern: matching(rf"(.*\.)?({pattern})", targets) for pattern in values}
        setattr(config, key, {"|".join(map(re.escape, names[p])): v for p, v in values.items() if names[p]})
    for key in ("modules_to_save", "layers_pattern"):
        value = getattr(config, key, None) or []
        for name in [value] if isinstance(value, str) else value:
            if not re.fullmatch(r"[\w.-]+", name):
                raise InputError(f"{path}: {key} must be names of modules, not {name[:80]!r}")
    return config


def enable_gradient_checkpointing(model: Any) -> bool:
    """Enable gradient checkpointing. Return whether the model supports it."""
    inner = model.transformer if isinstance(model, EmbeddingModel) else model
    if not getattr(inner, "supports_gradient_checkpointing", False):
        return False
    inner.gradient_checkpointing_enable({"use_reentrant": False})
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
        prefix = model.sentence_config.prefix
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
