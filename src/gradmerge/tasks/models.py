"""Loading the model that a task runs on."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.adapter_config import is_adapter, read_adapter_config
from ..checkpoints.checkpoint import TORCH_TYPES, Buffers
from ..checkpoints.open import open_checkpoint
from ..checkpoints.quantization import detect_quantization
from ..curvature.offload import elsewhere
from ..distributed import launched
from ..errors import InputError
from ..io.reader import close_files, open_files
from ..io.remote_code_guard import refuse_hub_code
from ..io.small_files import read_json
from ..quiet import quiet_transformers
from ..text import count, first_line, listed, nearest
from .adapters import base_of, classes_of, with_adapter
from .encoder import encoder_prefix, with_encoder_of
from .model_args import ModelArgs
from .resolve_model import check_small_files, check_weights, folder_of, offline
from .sentence_model import EmbeddingModel, SentenceSetup, read_setup

TASKS = ("classify", "causal-lm", "seq2seq", "image", "embedding")
NARROW = "the model is stored as float16 and computes in float32 here, as CPUs are slow in float16"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

_AUTO_CLASSES = {
    "classify": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
#: What embeds texts has no head: its class follows from the folder's modules.json.
_BARE = ("AutoModel", "AutoModelForTextEncoding")
_ADAPTER_TASKS = {"SEQ_CLS": "classify", "CAUSAL_LM": "causal-lm", "SEQ_2_SEQ_LM": "seq2seq"}

#: A model may have this many parameters for a new head, and this many times what its files hold, where one stored
#: integer packs eight codes.
MOST_INFLATED = (50_000_000, 16)


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
    notes: list[str] = field(default_factory=list)


def load_model(
    reference: str,
    task: str = "auto",
    *,
    device: str = "auto",
    dtype: str = "auto",
    model_args: Mapping[str, Any] | None = None,
    whole: bool = True,
    adapter_apart: bool = False,
    gradients: bool = False,
    bytes_per_parameter: int = 0,
    head: str | None = None,
) -> tuple[nn.Module, LoadingInfo]:
    """The model of a folder, a Hub id or an adapter, with the head of its task, in eval mode on the device.

    ``dtype`` "auto" is as stored, but float32 for float16 on a CPU. Only safetensors are read, no remote code is run.
    A model whose checkpoint lacks weights, as of the head, is refused, since they would be random numbers; with
    ``whole=False`` the loading info names them instead. An adapter is merged into its base, or ``adapter_apart``: then
    it alone asks for gradients. ``gradients``: the caller computes gradients, so a quantized model needs an adapter.
    ``bytes_per_parameter`` is as of :meth:`ModelArgs.from_pretrained`. ``head`` names another model, whose head
    replaces that of the model.
    """
    if head is not None:
        return _load_with_head(reference, head, task, device=device, dtype=dtype, model_args=model_args)
    args = ModelArgs.parse(model_args)
    args.check_device(device)
    place = device_of(device)
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: not known{nearest(dtype, DTYPES)}\n  Known are {', '.join(DTYPES)}.")
    info, config, adapter, setup = locate(reference, task)
    task, folder, base_folder = info.task, info.folder, info.base_folder
    check_weights(reference, base_folder, "model")
    if adapter is not None:
        check_weights(reference, folder, "adapter_model")
    quantized = _is_quantized(reference, args, config, adapter is not None, gradients)
    if adapter is not None and args.device_map is not None and not quantized:
        raise InputError(
            f"{reference}: device_map: an adapter is merged into its base in memory. Write the merged model first "
            "(gradmerge merge), or keep the base quantized (load_in_4bit)."
        )
    given = args.from_pretrained(config, dtype, place, quantized=quantized, bytes_per_parameter=bytes_per_parameter)
    with quiet_transformers(), offline():
        model = _loaded(reference, base_folder, config, task, dtype, info, given, quantized)
        if adapter is not None:
            apart = adapter_apart or any(type(p).__name__ in ("Params4bit", "Int8Params") for p in model.parameters())
            model = with_adapter(reference, model, folder, info, apart)
    if setup is not None:  # the pooler of BERT and its kin is not used
        info.missing_keys = [key for key in info.missing_keys if not key.startswith("pooler.")]
    if whole:
        _refuse_random_weights(reference, model, info)
    if setup is not None:
        model = EmbeddingModel(model, setup, next(model.parameters()).dtype)
    if args.gradient_checkpointing and not recompute(model):
        raise InputError(f"model_args: gradient_checkpointing: {type(model).__name__} cannot recompute its activations")
    if gradients and elsewhere(model) and not recompute(model):
        slow = "cannot recompute its activations: all weights that its backward pass needs are in memory at once"
        info.notes.append(f"{type(model).__name__} {slow}")
    if "device_map" in given:
        info.notes += offloaded(model)
        return model.eval(), info
    if place.type == "cpu" and dtype == "auto" and any(p.dtype == torch.float16 for p in model.parameters()):
        model = model.float()
        info.notes.append(NARROW)
    return model.to(place).eval(), info


def _load_with_head(reference: str, head: str, task: str, **options: Any) -> tuple[nn.Module, LoadingInfo]:
    """The model with the head of another one; its own head may be missing."""
    with_head, head_info = load_model(head, task, **options)
    model, info = load_model(reference, head_info.task, whole=False, **options)
    prefix = encoder_prefix(with_head)
    if missing := [key for key in (*info.missing_keys, *info.other_shapes) if prefix and key.startswith(prefix)]:
        raise InputError(f"{reference}: its files lack weights of the encoder:\n{listed(missing)}")
    info.missing_keys, info.other_shapes = [], {}
    return with_encoder_of(model, with_head, reference, head), info


def locate(reference: str, task: str) -> tuple[LoadingInfo, Any, dict[str, Any] | None, SentenceSetup | None]:
    """Where a model lies, its config, the config of its adapter, and the modules of a sentence-transformers folder."""
    folder = folder_of(reference)
    check_small_files(folder)
    adapter = read_adapter_config(folder) if is_adapter(folder) else None
    setup = None
    if task == "embedding" or (task == "auto" and adapter is None and (folder / "modules.json").is_file()):
        if adapter is not None:
            raise InputError(f"{reference}: task embedding takes no adapter; merge it into its base with PEFT first")
        task, setup = "embedding", read_setup(reference, folder)
    base_folder = setup.transformer if setup else folder if adapter is None else base_of(reference, folder, adapter)
    check_small_files(base_folder)
    config = config_of(reference, folder, base_folder, adapter)
    task = task_of(reference, config, task, adapter)
    return LoadingInfo(folder, base_folder, task), config, adapter, setup


def model_without_weights(reference: str, task: str = "auto", dtype: str = "auto") -> tuple[nn.Module, LoadingInfo]:
    """Make a model on the meta device from its config, and check the headers of its weight files.

    ``dtype`` "auto" is the type in the config, or float32. An adapter counts as merged into its base.
    """
    import transformers

    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}: not known{nearest(dtype, DTYPES)}\n  Known are {', '.join(DTYPES)}.")
    info, config, adapter, setup = locate(reference, task)
    check_weights(reference, info.base_folder, "model")
    if adapter is not None:
        check_weights(reference, info.folder, "adapter_model")
    stored = getattr(config, "dtype", None) or torch.float32
    computes = stored if dtype == "auto" else getattr(torch, dtype)
    try:
        with quiet_transformers(), offline(), torch.device("meta"):
            kind = getattr(transformers, class_name(info.task, config))
            model = kind.from_config(config, dtype=computes, trust_remote_code=False)
    except Exception as error:  # the config does not fit the task, or has impossible values
        raise InputError(f"{reference}: no model of its config for task {info.task}: {first_line(error)}") from error
    return (model if setup is None else EmbeddingModel(model, setup, computes)).eval(), info


def _is_quantized(reference: str, args: ModelArgs, config: Any, adapter: bool, gradients: bool) -> bool:
    """Whether the model computes with bitsandbytes weights: those it asks for, or stored ones below an adapter."""
    if args.bits is not None:
        quantized = args.bits > 0
    else:
        quantized = gradients and adapter and _states_quantization(config) and _is_bits(config)
    if quantized and gradients and not adapter:
        raise InputError(
            f"{reference}: model_args: load_in_{args.bits}bit: quantized weights have no gradients. Give the folder of "
            "a PEFT adapter: curvature of its parameters can be estimated on a quantized base."
        )
    return quantized


def _is_bits(config: Any) -> bool:
    stated = config.quantization_config
    method = stated.get("quant_method") if isinstance(stated, dict) else getattr(stated, "quant_method", None)
    return str(getattr(method, "value", method)) == "bitsandbytes"


def device_of(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU, or the CPU. Several processes on a machine have a GPU each."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" or launched() is None:
            return torch.device(name)
    if name == "cuda" and (place := launched()) is not None and torch.cuda.is_available():
        if place.local_rank >= torch.cuda.device_count():
            here = f"{torch.cuda.device_count()}, and this is process {place.local_rank} of those that run here"
            raise InputError(f"--device {name}: GPUs on this machine are {here}. Start fewer, or use --device cpu.")
        torch.cuda.set_device(place.local_rank)
        name = f"cuda:{place.local_rank}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"--device {name}: there is no such device here: {first_line(error)}") from error
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
        for value in getattr(modeling_auto, table).values():
            if not set(architectures).isdisjoint([value] if isinstance(value, str) else value):
                return name
    stated = f"({', '.join(architectures) or 'none'}). Give --task, one of {', '.join(TASKS)}"
    raise InputError(f"{reference}: the task cannot be told from the model's architecture {stated}")


def _architectures(config: Any) -> list[str]:
    stated = getattr(config, "architectures", None)
    return [name for name in stated if isinstance(name, str)] if isinstance(stated, list | tuple) else []


def model_with(model: Any, state: Mapping[str, Tensor], name: str | None = None) -> Any:
    """A model like this one, in its dtype and on its device, with weights given by the names of checkpoint files.

    transformers renames some weights between files and memory, so it is the one to load them. ``name`` is for errors.
    """
    if isinstance(model, EmbeddingModel):
        return model.with_state(lambda inner, part: model_with(inner, part, name), state)
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
        wrong = f"the merged weights do not fit its model: {lacking[0]} is missing or has another shape"
        raise InputError(f"{name or type(model).__name__}: {wrong}")
    return made.to(model.device).eval()


def config_of(reference: str, folder: Path, base_folder: Path, adapter: dict[str, Any] | None) -> Any:
    """The config of the model; for an adapter its own if it has one, else its base's with the adapter's classes."""
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
        raise InputError(f"{reference}: {where / 'config.json'} cannot be used: {first_line(error)}") from error
    if adapter is not None and where is base_folder:
        classes = classes_of(folder)
        if classes is not None and classes != config.num_labels:
            config.num_labels = classes
    return config


def class_name(task: str, config: Any) -> str:
    """The class of transformers that makes the model of a task."""
    return _AUTO_CLASSES[task][0] if task != "embedding" else _BARE[bool(getattr(config, "is_encoder_decoder", False))]


def _loaded(
    reference: str,
    folder: Path,
    config: Any,
    task: str,
    dtype: str,
    info: LoadingInfo,
    given: dict[str, Any],
    quantized: bool,
) -> nn.Module:
    import transformers

    kind = getattr(transformers, class_name(task, config))
    offload = tempfile.TemporaryDirectory(prefix="gradmerge-offload-") if "device_map" in given else None
    if offload is not None:
        given = given | {"offload_folder": offload.name}
        if dtype == "auto" and not torch.cuda.is_available() and getattr(config, "dtype", None) == torch.float16:
            dtype = "float32"
            info.notes.append(NARROW)
    _refuse_inflated(reference, folder, kind, config)
    place: Path | None = folder
    if not quantized and (state := _dequantized_state(folder, config, info)) is not None:
        if "device_map" in given:
            raise InputError(
                f"{reference}: the model is stored quantized and dequantized in memory, without device_map"
            )
        with torch.device("meta"):
            kind = type(kind.from_config(config, trust_remote_code=False))  # which takes weights from memory
        place, given = None, given | {"state_dict": state}
    try:
        model, loading = kind.from_pretrained(
            place,
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
            f"{reference}: the model (architecture {stated}) cannot be loaded for task {task}: {first_line(error)}"
        ) from error
    info.missing_keys = sorted(loading["missing_keys"])
    info.other_shapes = {
        name: f"{list(stored)} in the checkpoint, {list(wanted)} in the model"
        for name, stored, wanted in sorted(loading["mismatched_keys"])
    }
    assert isinstance(model, nn.Module)
    if offload is not None:
        model.__dict__["_offload_folder"] = offload  # accelerate's copies of weights are deleted with the model
    return model


def offloaded(model: nn.Module) -> list[str]:
    """A note on weights that are on no device, if there are some."""
    away = {name for path, module, _ in elsewhere(model) for name in (f"{path}.{n}" for n in module._parameters)}
    share = sum(p.numel() for name, p in model.named_parameters() if name in away)
    whole = sum(p.numel() for p in model.parameters())
    stay = f"{count(share)} of {count(whole)} parameters stay on the CPU or the disk, and are fetched layer by layer"
    return [stay] if share else []


def recompute(model: Any) -> bool:
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


def _dequantized_state(folder: Path, config: Any, info: LoadingInfo) -> dict[str, Tensor] | None:
    """The weights that the codes of a quantised model stand for, where they can be read; None for any other model.

    What computes with them needs gradients, which codes do not have.
    """
    stating: list[Any] = [part for part in (config, getattr(config, "text_config", None)) if _states_quantization(part)]
    if not stating:
        return None
    with open_checkpoint(folder) as stored:
        found = detect_quantization(stored)
    if found is None or not found.readable:
        return None
    with open_checkpoint(folder, dequantize=True) as plain:
        state = {
            name: plain.read(name, 0, one.numel, Buffers()).to(TORCH_TYPES[one.dtype]).reshape(one.shape).clone()
            for name, one in plain.tensors.items()
        }
        info.notes += plain.notes
    for part in stating:
        del part.quantization_config
    return state


def _states_quantization(config: Any) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _refuse_inflated(reference: str, folder: Path, kind: Any, config: Any) -> None:
    """Refuse a config that makes far more weights than the files hold: random ones, which take all memory first."""
    try:
        with torch.device("meta"):
            empty = kind.from_config(config, trust_remote_code=False)
    except Exception:  # loading it gives the better message
        return
    wanted = sum(parameter.numel() for parameter in empty.parameters())
    files = open_files(folder, "model") or []
    stored = sum(entry.numel for file in files for entry in file.entries.values())
    close_files(files)
    if wanted > MOST_INFLATED[0] + MOST_INFLATED[1] * stored:
        sizes = f"a model of {count(wanted)} parameters, and its files hold {count(stored)}"
        raise InputError(f"{reference}: its config makes {sizes}. Is the config of another model?")


def _refuse_random_weights(reference: str, model: nn.Module, info: LoadingInfo) -> None:
    parameters = {name for name, _ in model.named_parameters()}
    random = [key for key in info.missing_keys if key in parameters]  # a buffer such as position_ids makes itself
    random += [f"{name}: {shapes}" for name, shapes in info.other_shapes.items()]
    if random:
        raise InputError(
            f"{reference}: model and task do not fit: {type(model).__name__}, which task {info.task} needs, has "
            "weights that the checkpoint does not give, and random numbers in their place would make the results "
            f"meaningless:\n{listed(random)}\n  Give a model that was fine-tuned for the task, or another --task."
        )
