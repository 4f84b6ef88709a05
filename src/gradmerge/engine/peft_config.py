"""The tensors of a base in a PEFT adapter: which module each belongs to, its keys in the adapter's file, the config."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.lora import AdapterCheckpoint, read_adapter_config
from ..checkpoints.tied_weights import in_layer
from ..checkpoints.transformers_model import empty_model
from ..curvature.checkpoint_names import names_of_parameters, stored_sources
from ..errors import InputError
from ..notes import Note
from ..text import some
from ..urls import redact

PREFIX = "base_model.model."
#: Task of an adapter → what the names of its architectures end in, and the heads that PEFT saves whole for it.
TASKS = {
    "CAUSAL_LM": (("ForCausalLM", "LMHeadModel"), ()),
    "SEQ_2_SEQ_LM": (("ForConditionalGeneration", "ForSeq2SeqLM"), ()),
    "SEQ_CLS": (("ForSequenceClassification",), ("classifier", "score")),
    "TOKEN_CLS": (("ForTokenClassification",), ("classifier", "score")),
    "QUESTION_ANS": (("ForQuestionAnswering",), ("qa_outputs",)),
}
#: A share that is lost to the rounding of the factors, and not to their rank.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Change:
    """What a merge changes of one tensor. Without factors, the tensor is saved whole."""

    norm: float
    """The squared Frobenius norm of the change."""
    lost: float = 0.0
    """The same of what the factors lack."""
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    """A and B."""

    @property
    def rank(self) -> int:
        return self.factors["A"].shape[0]


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor of the base as a parameter of a module."""

    module: str
    parameter: str
    kind: str = ""
    """`linear`, `conv1d` (stored as in × out), `embedding` or `conv`; empty if LoRA cannot represent its change."""

    @property
    def transposed(self) -> bool:
        return self.kind in ("conv1d", "embedding")

    @property
    def key(self) -> str:
        """The key of the tensor itself in the adapter's file."""
        return f"{PREFIX}{self.module}.{self.parameter}"

    def factor_key(self, letter: str) -> str:
        """The key of its factor A or B."""
        name = f"lora_embedding_{letter}" if self.kind == "embedding" else f"lora_{letter}.weight"
        return f"{PREFIX}{self.module}.{name}"


class ModuleTree:
    """The modules of a base: those that its adapters name, and all others from the class that its config names."""

    def __init__(self, base: Checkpoint, adapters: Sequence[AdapterCheckpoint]) -> None:
        self.base = base
        self._known: dict[str, ModuleTensor] = {}
        for adapter in adapters:
            for name, factors in adapter.factors.items():
                if factors.slice is not None:
                    continue
                kind = "linear" if len(base.tensors[name].shape) == 2 else "conv"
                kind = "conv1d" if factors.transposed else kind
                kind = "embedding" if ".lora_embedding_" in factors.a else kind
                self._known[name] = ModuleTensor(factors.module, "weight", kind)

    @functools.cached_property
    def _model(self) -> nn.Module:
        if self.base.folder is None:
            raise InputError(
                f"{self.base.label}: a file without a config.json, so that the modules of an adapter are unknown. "
                "Give the folder of the model."
            )
        model: nn.Module | None = empty_model(self.base)
        if model is None:
            raise InputError(
                f"output.format: the modules of an adapter are unknown: transformers cannot build {self.base.label} "
                "from its config.json."
            )
        return model

    @functools.cached_property
    def _paths(self) -> dict[str, str]:
        """Tensor of the base → its path in the model."""
        sources, prefix = stored_sources(self._model), f"{getattr(self._model, 'base_model_prefix', '')}."
        buffers = {name for name, _ in self._model.named_buffers()}
        shapes = {name: tuple(value.shape) for name, value in self._model.state_dict().items()}
        paths = {}
        for name, info in self.base.tensors.items():
            names = (name, prefix + name, name.removeprefix(prefix))
            path = next((sources.get(n, n) for n in names if n in sources or n in buffers), None)
            # transformers fuses experts: a stored tensor of another shape is only a part of the parameter.
            if path is not None and shapes.get(path) == info.shape:
                paths[name] = path
        return paths

    def find(self, name: str) -> ModuleTensor:
        """Return the module and parameter of a tensor of the base."""
        if name in self._known:
            return self._known[name]
        path = self._paths.get(name)
        if path is None or "." not in path:
            raise InputError(
                f"output.format: {name} has changed, and no module of {type(self._model).__name__} that an adapter "
                "could hold has it alone. Exclude it, to keep that of the base, or write a model."
            )
        module, _, parameter = path.rpartition(".")
        return ModuleTensor(
            module, parameter, _kind(self._model.get_submodule(module)) if parameter == "weight" else ""
        )

    def can_factor(self, name: str) -> bool:
        """Return whether LoRA can represent the change of a tensor."""
        try:
            return bool(self.find(name).kind) and not self.tied(name)
        except InputError:  # raised again if the tensor has changed
            return False

    def tied(self, name: str) -> list[ModuleTensor]:
        """Return the other parameters that share a tensor: PEFT would change one of them alone."""
        if in_layer(name):
            return []
        tensor = self.find(name)
        if self.base.folder is None:
            return []
        path = f"{tensor.module}.{tensor.parameter}"
        groups = (names for names in names_of_parameters(self._model).values() if path in names)
        others = (other.rpartition(".") for names in groups for other in names if other != path)
        return [ModuleTensor(module, parameter) for module, _, parameter in others]

    def tensors_in(self, module: str) -> dict[str, ModuleTensor]:
        """Return the tensors of the base in a module."""
        paths = {name: path for name, path in self._paths.items() if path.startswith(f"{module}.")}
        return {name: ModuleTensor(*path.rpartition(".")[::2]) for name, path in paths.items()}

    def modules_to_save(self, names: Iterable[str], task: str | None) -> list[str]:
        """Return the modules that PEFT must save whole for some tensors, for those tied to them, and for the task.

        PEFT saves all modules whose path ends with the path that it is given.
        """
        ends = {tensor.module for name in names for tensor in (self.find(name), *self.tied(name))}
        ends |= set(TASKS[task][1]) if task in TASKS else set()
        modules = {path for end in ends for path, _ in self._model.named_modules() if path.endswith(end)}
        modules |= {path for end in modules for path, _ in self._model.named_modules() if path.endswith(end)}
        return sorted(m for m in modules if not any(m.startswith(f"{other}.") for other in modules))


def _kind(module: nn.Module) -> str:
    """Return how PEFT adapts a module; subclasses of embeddings and grouped convolutions are different."""
    if type(module) is nn.Embedding:
        return "embedding"
    if isinstance(module, nn.Linear):
        return "" if type(module).__name__ == "NonDynamicallyQuantizableLinear" else "linear"
    if type(module).__name__ == "Conv1D":
        return "conv1d"
    return "conv" if type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and module.groups == 1 else ""


@dataclass
class WrittenAdapter:
    """The config of an adapter and the entries of its file."""

    config: dict[str, Any]
    entries: dict[str, tuple[str, str]]
    """Key in the adapter's file → tensor of the base, and what is stored of it: A, B or `whole`."""
    factors: list[str]
    whole: list[str]


def lay_out(tree: ModuleTree, changes: Mapping[str, Change], adapters: Sequence[AdapterCheckpoint]) -> WrittenAdapter:
    """Return the adapter that holds some changes.

    Tensors that LoRA cannot represent are saved with all of their module. Biases beside factors are saved alone, which
    PEFT loads under `bias: all`.
    """
    task = _task(tree.base, [read_adapter_config(a.folder) for a in adapters if a.folder is not None])
    factors = {name: tree.find(name) for name, change in changes.items() if change.factors}
    whole = {name: tree.find(name) for name, change in changes.items() if not change.factors}
    factored = {tensor.module for tensor in factors.values()}
    biases = [name for name, tensor in whole.items() if tensor.parameter == "bias" and tensor.module in factored]
    modules = tree.modules_to_save([name for name in whole if name not in biases], task)
    saved = {name: tensor for module in modules for name, tensor in tree.tensors_in(module).items()}
    factors = {name: tensor for name, tensor in factors.items() if name not in saved}
    biases = [name for name in biases if name not in saved]
    if not factors:
        what = "no tensor that LoRA can represent" if whole else "nothing"
        raise InputError(
            f"output.format: {what} differs from the base, and PEFT does not load an adapter without factors. "
            "Write a model."
        )
    tied = {other.key: (name, "whole") for name in saved for other in tree.tied(name)}
    entries = tied | {tensor.key: (name, "whole") for name, tensor in saved.items()}
    entries |= {f"{PREFIX}{whole[name].module}.base_layer.bias": (name, "whole") for name in biases}
    for name, tensor in factors.items():
        entries |= {tensor.factor_key(letter): (name, letter) for letter in "AB"}
    config = _config(tree, changes, factors, task) | {"modules_to_save": modules or None}
    config |= {"bias": "all" if biases else "none"} | ({"ensure_weight_tying": True} if tied else {})
    return WrittenAdapter(config, entries, list(factors), [*saved, *biases])


def _task(base: Checkpoint, configs: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the task of an adapter: that of all merged adapters, or else that of the base's architecture."""
    tasks = {config.get("task_type") for config in configs}
    if len(tasks) == 1 and (task := tasks.pop()) is not None:
        return str(task)
    named = base.config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return next((task for task, (ends, _) in TASKS.items() if name.endswith(ends)), None)


def _config(
    tree: ModuleTree, changes: Mapping[str, Change], factors: Mapping[str, ModuleTensor], task: str | None
) -> dict[str, Any]:
    """Return adapter_config.json. alpha is the rank of every module, so that the scale is 1 without patterns too."""
    ranks = [changes[name].rank for name in factors]
    rank = max(ranks, key=ranks.count)
    pattern = {tensor.module: r for tensor, r in zip(factors.values(), ranks, strict=True) if r != rank}
    base = tree.base
    hub_id, _, revision = (base.hub_id or "").partition("@")
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": hub_id or redact(str((base.folder or base.files()[0]).absolute())),
        "revision": revision or None,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": sorted({tensor.module for tensor in factors.values()}),
        "fan_in_fan_out": any(tensor.kind == "conv1d" for tensor in factors.values()),
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


@dataclass
class AdapterReport:
    """What an adapter lacks of the merge, for the result, the record, the card and the notes."""

    base: Checkpoint
    rank: int
    """Of most modules."""
    lost: dict[str, float]
    """Tensor → the share of its change (squared Frobenius norm) that its factors lack."""
    lost_share: float
    """The same over all tensors together."""
    saved_whole: list[str]

    def record(self) -> dict[str, Any]:
        """Return the fields of gradmerge.json."""
        shares = {"lost_share": self.lost_share, "lost": self.lost}
        return {"format": "adapter", "rank": self.rank, **shares, "saved_whole": self.saved_whole}

    @property
    def text(self) -> str:
        """What the rank loses, for the card and as a note."""
        if self.lost_share <= ROUNDING:
            return "A LoRA adapter that holds all that the merge changes of its base."
        worst = max(self.lost, key=lambda name: self.lost[name])
        return (
            f"A LoRA adapter of rank {self.rank}, which lacks {100 * self.lost_share:.3g} % of what the merge changes "
            f"(squared Frobenius norm), of {worst} {100 * self.lost[worst]:.3g} %. gradmerge.json has the share of "
            "every tensor."
        )

    def notes(self) -> list[Note]:
        texts = [self.text] if self.lost_share > ROUNDING else []
        if self.saved_whole:
            texts.append(f"saved whole, as LoRA cannot represent them: {some(self.saved_whole, 3)}")
        return list(map(Note, texts))
