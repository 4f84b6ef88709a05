"""Where the tensors of a model go in a PEFT adapter: factors of a module's weight, or modules that are saved whole."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.compat.tied_weights import in_layer
from ...checkpoints.lora import AdapterCheckpoint
from ...curvature.checkpoint_names import names_of_parameters, stored_sources
from ...curvature.match_parameters import empty_model
from ...errors import InputError

PREFIX = "base_model.model."
#: Task of an adapter → what the names of its architectures end in, and the heads that PEFT saves whole with it.
TASKS = {
    "CAUSAL_LM": (("ForCausalLM", "LMHeadModel"), ()),
    "SEQ_2_SEQ_LM": (("ForConditionalGeneration", "ForSeq2SeqLM"), ()),
    "SEQ_CLS": (("ForSequenceClassification",), ("classifier", "score")),
    "TOKEN_CLS": (("ForTokenClassification",), ("classifier", "score")),
    "QUESTION_ANS": (("ForQuestionAnswering",), ("qa_outputs",)),
}


@dataclass(frozen=True)
class Place:
    """A tensor in the model as PEFT sees it."""

    module: str
    parameter: str
    kind: str = ""
    """`linear`, `conv1d` (stored as in × out), `embedding` or `conv`; empty where LoRA cannot hold the tensor."""

    @property
    def transposed(self) -> bool:
        return self.kind in ("conv1d", "embedding")

    @property
    def key(self) -> str:
        """Of the tensor in the adapter's file, where its module is saved whole."""
        return f"{PREFIX}{self.module}.{self.parameter}"

    def key_of(self, letter: str) -> str:
        """Of a factor, A or B."""
        name = f"lora_embedding_{letter}" if self.kind == "embedding" else f"lora_{letter}.weight"
        return f"{PREFIX}{self.module}.{name}"


class AdapterLayout:
    """The places of a base's tensors: as the adapters name them, or else as the class of the model does."""

    def __init__(self, base: Checkpoint, adapters: Sequence[AdapterCheckpoint]) -> None:
        self.base = base
        self._known: dict[str, Place] = {}
        for adapter in adapters:
            for name, factors in adapter.factors.items():
                if factors.slice is not None:
                    continue
                if ".lora_embedding_" in factors.a:
                    kind = "embedding"
                else:
                    kind = (
                        "conv1d" if factors.transposed else "linear" if len(base.tensors[name].shape) == 2 else "conv"
                    )
                self._known[name] = Place(factors.module, "weight", kind)

    @functools.cached_property
    def _model(self) -> nn.Module:
        if self.base.folder is None:
            raise InputError(
                f"{self.base.label}: a file without a config.json, so that the modules of an adapter cannot be told. "
                "Give the folder of the model"
            )
        try:
            return empty_model(self.base.folder)
        except InputError as error:
            raise InputError(f"output.format: the modules of an adapter cannot be told. {error}") from error

    @functools.cached_property
    def _paths(self) -> dict[str, str]:
        """Tensor of the base → its name in the model."""
        paths, prefix = stored_sources(self._model), f"{getattr(self._model, 'base_model_prefix', '')}."
        own = {name for name, _ in self._model.named_buffers()}
        shapes = {name: tuple(value.shape) for name, value in self._model.state_dict().items()}
        found = {}
        for name in self.base.tensors:
            names = (name, prefix + name, name.removeprefix(prefix))
            path = next((paths.get(other, other) for other in names if other in paths or other in own), None)
            # transformers fuses experts: a stored tensor of another shape is only a part of the parameter.
            if path is not None and shapes.get(path) == self.base.tensors[name].shape:
                found[name] = path
        return found

    def place(self, name: str) -> Place:
        """Where a tensor of the base goes."""
        if name in self._known:
            return self._known[name]
        path = self._paths.get(name)
        if path is None or "." not in path:
            raise InputError(
                f"output.format: {name} has changed, and no module of {type(self._model).__name__} that an adapter "
                "could hold has it alone. Exclude it, to keep that of the base, or write a model."
            )
        module, _, parameter = path.rpartition(".")
        return Place(module, parameter, _kind(self._model.get_submodule(module)) if parameter == "weight" else "")

    def tied(self, name: str) -> list[Place]:
        """The other places of a tensor that a model uses in several: PEFT would change one of them alone."""
        if in_layer(name):
            return []
        own = self.place(name)
        if self.base.folder is None:
            return []
        path = f"{own.module}.{own.parameter}"
        groups = (names for names in names_of_parameters(self._model).values() if path in names)
        others = (other.rpartition(".") for names in groups for other in names if other != path)
        return [Place(module, parameter) for module, _, parameter in others]

    def below(self, module: str) -> dict[str, Place]:
        """The tensors of the base in a module, or in the model ("")."""
        return {
            name: Place(*path.rpartition(".")[::2])
            for name, path in self._paths.items()
            if not module or path.startswith(f"{module}.")
        }

    def heads(self, task: str | None) -> list[str]:
        """Modules that PEFT saves whole for a task, whether they have changed or not."""
        ends = TASKS[task][1] if task in TASKS else ()
        return [name for end in ends for name in self.fitting(end)]

    def fitting(self, name: str) -> list[str]:
        """The modules that PEFT saves whole where it is told to save this one: all whose path ends with it."""
        return [path for path, _ in self._model.named_modules() if path.endswith(name)]

    def targets(self, places: Mapping[str, Place]) -> list[str]:
        """Names of the modules with factors: the last part where it names these alone, else all of the path."""
        modules = {place.module for place in places.values()}
        others = {name.removesuffix(".weight") for name in self.base.tensors if name not in places}
        taken = {name.rpartition(".")[2] for name in others}
        return sorted({m if m.rpartition(".")[2] in taken else m.rpartition(".")[2] for m in modules})


def task_of_adapter(base: Checkpoint, adapters: Sequence[Mapping[str, Any]]) -> str | None:
    """The task in an adapter's config: that of the adapters it is made of, or what the base's architecture is for."""
    stated: set[str | None] = {config.get("task_type") for config in adapters}
    if len(stated) == 1 and (found := stated.pop()) is not None:
        return found
    named = base.config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return next((task for task, (ends, _) in TASKS.items() if name.endswith(ends)), None)


def _kind(module: nn.Module) -> str:
    """What PEFT makes of a module: other kinds, and embeddings and convolutions with ways of their own, not factors."""
    if type(module) is nn.Embedding:
        return "embedding"
    if isinstance(module, nn.Linear):
        return "" if type(module).__name__ == "NonDynamicallyQuantizableLinear" else "linear"
    if type(module).__name__ == "Conv1D":
        return "conv1d"
    return "conv" if type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and module.groups == 1 else ""
