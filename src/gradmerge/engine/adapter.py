"""The output of a merge that is written as one LoRA adapter of its base.

If the rule is a weighted sum and all models are adapters of the base, their factors are concatenated. No weight of the
base is read. Every other tensor goes through the rule, and its difference from the base is factorized. Factors
stay in memory until the end. Tensors that are saved whole are then merged once more.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..checkpoints.checkpoint import TORCH_TYPES, Buffers, Checkpoint, is_same
from ..checkpoints.lora import AdapterCheckpoint, read_adapter_config
from ..checkpoints.tied_weights import in_layer
from ..checkpoints.transformers_model import empty_model
from ..curvature.checkpoint_names import names_of_parameters, stored_sources
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..io.reader import TensorInfo
from ..notes import Note
from ..text import some
from ..urls import redact
from .executor import Executor, LocalExecutor, run_parallel
from .jobs import Block, BlockJob, Job, LayerJob, MergedBlock, all_finite, rounded, rule_arguments
from .plan import Plan

#: A difference from the base below this share of an entry is a rounding error.
ROUNDING = 2.0**-22
#: The share of a change that the rounding of its factors may lose.
LOSSLESS = 1e-12
#: The inputs that a rule may read for its weights to be recognized.
LINEAR_INPUTS = {"base", "tuned", "weights", "base_weight"}
#: Entries of a matrix that are converted to float64 at once.
PANEL = 1 << 20
#: Singular values below this share of the largest are rounding errors.
NEGLIGIBLE = 1e-7
PREFIX = "base_model.model."
#: Task of an adapter → what the names of its architectures end in, and the heads that PEFT saves whole for it.
TASKS = {
    "CAUSAL_LM": (("ForCausalLM", "LMHeadModel"), ()),
    "SEQ_2_SEQ_LM": (("ForConditionalGeneration", "ForSeq2SeqLM"), ()),
    "SEQ_CLS": (("ForSequenceClassification",), ("classifier", "score")),
    "TOKEN_CLS": (("ForTokenClassification",), ("classifier", "score")),
    "QUESTION_ANS": (("ForQuestionAnswering",), ("qa_outputs",)),
}


@dataclass
class Change:
    """The change of one tensor by the merge. Without factors, the adapter saves the whole tensor."""

    norm: float
    """The squared Frobenius norm of the change."""
    lost: float = 0.0
    """The squared Frobenius norm of the part that the factors do not represent."""
    factors: dict[str, Tensor] = field(default_factory=dict)
    """LoRA's A and B; empty if the tensor is saved whole."""


@dataclass
class Difference:
    """The difference of one tensor from the base, while its blocks are merged."""

    matrix: Tensor | None
    """None if LoRA cannot represent it."""
    missing: int
    """The number of entries that are not merged yet."""
    norms: list[float] = field(default_factory=list)
    """The squared norm of each block."""
    changed: bool = False
    """Whether any entry differs from the base by more than a rounding error."""


class AdapterOutput:
    """The unfinished adapter, with the interface of :class:`~gradmerge.engine.output.Output`.

    It changes the jobs of the plan to write float64, so that differences from the base are exact. A killed merge leaves
    nothing to resume.
    """

    finished: frozenset[int] = frozenset()

    def __init__(self, plan: Plan, folder: AtomicDir, executor: Executor) -> None:
        assert isinstance(executor, LocalExecutor)
        self.base = adapter_base(plan)
        adapters = [c for c in plan.inputs.tuned if isinstance(c, AdapterCheckpoint) and is_same(c.base, self.base)]
        self._adapters = adapters if len(adapters) == len(plan.inputs.tuned) else []
        """The merged models, if all of them are adapters of the base."""
        self._tree = ModuleTree(self.base, adapters)
        self._plan, self._folder, self._executor = plan, folder, executor
        self._rank = plan.recipe.output.rank
        self._dtype = getattr(torch, plan.recipe.output.dtype, torch.float32)  # also for `auto` and `widest`
        self._stored = plan.merged_tensors
        plan.jobs = [in_float64(job) for job in plan.jobs]
        self._differences: dict[str, Difference] = {}
        self._changes: dict[str, Change] = {}
        self._whole: dict[str, Tensor] | None = None
        """Name → tensor that the adapter saves whole; None until :meth:`finish`. Then ``put`` fills these tensors."""
        self._lock = threading.Lock()
        self.report: AdapterReport | None = None

    def __enter__(self) -> AdapterOutput:
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing: no file is open."""

    def open(self) -> list[Block]:
        """Concatenate the factors of adapters where that is exact. Return the blocks of all other tensors."""
        self._folder.clear()
        self._folder.keep = False
        left = set[str]()

        def work(job: Job, buffers: Buffers) -> None:
            if not self._combine_factors(job):
                left.add(job.name)

        run_parallel(self._plan.merged_jobs, work, self._executor.threads)
        if self._rank is None and (inexact := [name for name in self._stored if name in left and self._lora_may(name)]):
            raise InputError(
                f"output.rank: the change of {inexact[0]} is no weighted sum of LoRA adapters of the base, so that an "
                "adapter can only approximate it. Set its rank (such as 64); the loss is reported."
            )
        return [block for block in self._plan.blocks() if block.job.name in left]

    def _combine_factors(self, job: Job) -> bool:
        """Concatenate the adapters' factors of a tensor, if that is exact. Return whether it was."""
        weights = linear_weights(self._plan, job) if self._adapters else None
        if weights is None:
            return False
        pairs = zip(weights, self._adapters, strict=True)
        changing = [(weight, adapter) for weight, adapter in pairs if any(map(adapter.changes, job.tensors))]
        if not all(adapter.has_only_factors(job.name) for _, adapter in changing):
            return False
        factors = [(weight, *adapter.read_factors(job.name)) for weight, adapter in changing if weight]
        if factors:
            b = torch.cat([weight * b for weight, b, _ in factors], 1)
            a = torch.cat([a for *_, a in factors])
            self._check_finite(job.name, a, b)
            change = truncate(b, a, self._rank, self._dtype)
            if change.norm:  # 0 if no adapter has trained this module: PEFT initializes B with zeros
                self._set_change(job.name, change)
        return True

    def _lora_may(self, name: str) -> bool:
        """Return whether LoRA can represent the change of a tensor, and no adapter saves it whole."""
        replaced = any(adapter.changes(name) and name not in adapter.factors for adapter in self._adapters)
        return not replaced and self._tree.can_factor(name)

    def put(self, merged: MergedBlock) -> None:
        """Add a block to the difference of its tensors, and factorize complete ones.

        In :meth:`finish`, it stores the block in the tensors that are saved whole.
        """
        for name, values in merged.tensors.items():
            if self._whole is None:
                self._add(name, merged.start, values)
            elif name in self._whole:
                tensor = self._whole[name]
                tensor.view(-1)[merged.start : merged.start + len(values)] = rounded(values, tensor.dtype)

    def _add(self, name: str, start: int, values: Tensor) -> None:
        numel = self._stored[name].numel
        with self._lock:
            if name not in self._differences:
                # The memory of zeros is not used until something is written.
                matrix = torch.zeros(numel) if self._lora_may(name) else None
                self._differences[name] = Difference(matrix, numel)
        difference = self._differences[name]
        base = self.base.read(name, start, start + len(values), Buffers()).double()
        change = values.double() - base
        if difference.matrix is not None and bool(change.any()):
            difference.matrix[start : start + len(values)] = change
        with self._lock:
            difference.norms.append(float(change.square().sum()))
            difference.changed |= bool((change.abs() > ROUNDING * base.abs()).any())
            difference.missing -= len(values)
            if difference.missing:
                return
            del self._differences[name]
        if difference.changed and difference.matrix is None:
            self._changes[name] = Change(math.fsum(difference.norms))
        elif difference.changed and difference.matrix is not None:
            matrix = difference.matrix.reshape(self._stored[name].shape[0], -1)
            matrix = matrix.T if self._tree.find(name).transposed else matrix
            assert self._rank is not None
            self._set_change(name, factorize(matrix, self._rank, self._dtype))

    def _set_change(self, name: str, change: Change) -> None:
        shape, (a, b) = self._stored[name].shape, (change.factors[letter] for letter in "AB")
        self._check_finite(name, a, b)
        if len(shape) > 2:  # PEFT's factors of a convolution have its shape
            a, b = a.reshape(-1, *shape[1:]), b.reshape(*b.shape, *(1 for _ in shape[2:]))
        self._changes[name] = replace(change, factors={"A": a.contiguous(), "B": b.contiguous()})

    def _check_finite(self, name: str, *tensors: Tensor) -> None:
        if not self._plan.allow_nonfinite and not all(map(all_finite, tensors)):
            raise InputError(
                f"the adapter of {name} has values that are NaN or infinite, or too large for its type. Set "
                "output.dtype to a wider type, or set allow_nonfinite."
            )

    def finish(self) -> dict[str, int]:
        """Write the adapter, set the report, and return file → bytes.

        It merges tensors that are saved whole once more, because only their norms were kept.
        """
        changes = {name: self._changes[name] for name in self._stored if name in self._changes}
        config, entries = lay_out(self._tree, changes, self._adapters)
        names = dict.fromkeys(name for name, part in entries.values() if part == "whole")
        self._whole = {name: self._base_tensor(name) for name in names}
        again = [job for job in self._plan.merged_jobs if names.keys() & changes.keys() & job.tensors.keys()]
        self._executor.merge(self._plan, self._plan.blocks(jobs=again), self)
        for name, tensor in self._whole.items():
            self._check_finite(name, tensor)
        tensors = {
            key: self._whole[name].clone() if part == "whole" else changes[name].factors[part]
            for key, (name, part) in sorted(entries.items())
        }
        path = self._folder.folder / "adapter_model.safetensors"
        save_file(tensors, path, {"format": "pt"})
        (self._folder.folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        factored = [name for name in changes if name not in names]
        norm = sum(change.norm for change in changes.values())
        self.report = AdapterReport(
            self.base,
            config["r"],
            {name: changes[name].lost / changes[name].norm for name in factored},
            sum(changes[name].lost for name in factored) / norm,
            [name for name in names if name in changes],
        )
        return {path.name: path.stat().st_size}

    def _base_tensor(self, name: str) -> Tensor:
        """Return a tensor of the base, in the type of the result if the merge changes it."""
        info = self.base.tensors[name]
        dtype = TORCH_TYPES[self._stored[name].dtype if name in self._changes else info.dtype]
        return rounded(self.base.read(name, 0, info.numel, Buffers()), dtype).reshape(info.shape)


def adapter_base(plan: Plan) -> Checkpoint:
    """Return the model that the adapter is for: the recipe's base, or the base of all merged adapters."""
    recipe, base = plan.recipe, plan.inputs.base
    if recipe.output.curvature:
        raise InputError("output.curvature: an adapter has no curvature; write a model for that")
    if base is None:
        if recipe.exclude or recipe.include != ["*"]:
            raise InputError("output.format: with include or exclude, name the base that the other tensors come from")
        bases = [c.base for c in plan.inputs.tuned if isinstance(c, AdapterCheckpoint)]
        if len(bases) < len(plan.inputs.tuned) or not all(is_same(bases[0], other) for other in bases):
            raise InputError("output.format: an adapter needs a base: name it in the recipe, as base")
        base = bases[0]
    if isinstance(base, AdapterCheckpoint):
        raise InputError(
            f"output.format: the base is itself an adapter, of {base.label}, and an adapter names a model as its base. "
            "Merge it into its base first."
        )
    return base


def in_float64(job: Job) -> Job:
    """Return a job with a float64 result, so that the difference from the base is exact."""
    if job.rule is None:
        return job
    job = replace(job, info=TensorInfo("F64", job.info.shape), compute=torch.float64)
    if isinstance(job, LayerJob) and job.bias is not None:
        name, info = job.bias
        job = replace(job, bias=(name, TensorInfo("F64", info.shape)))
    return job


def linear_weights(plan: Plan, job: Job) -> list[float] | None:
    """Return the weights c_t if the rule computes base + Σ c_t (θ_t − base) for a tensor; otherwise None.

    The function runs the rule on unit vectors to get the c_t, and on random numbers to check them.
    """
    if not isinstance(job, BlockJob) or job.granularity == "tensor" or not plan.needs <= LINEAR_INPUTS:
        return None
    settings, models = plan.inputs.settings.of(job.name), len(plan.inputs.tuned)

    def merge(base: Tensor, tuned: Sequence[Tensor]) -> Tensor:
        return job.rule(**rule_arguments(job.rule, plan, {"base": base, "tuned": list(tuned)}, settings))

    # Numbers of many sizes and both signs.
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(models + 1, 64, generator=generator, dtype=torch.float64)
    base, *tuned = numbers * 10 ** torch.linspace(-2, 2, 64, dtype=torch.float64)
    try:
        zero, units = torch.zeros(1, dtype=torch.float64), torch.eye(models, dtype=torch.float64)
        weights = [float(merge(zero, row.split(1))) for row in units]
        merged = merge(base, tuned)
    except (ValueError, ZeroDivisionError):
        return None
    expected = base + sum(c * (model - base) for c, model in zip(weights, tuned, strict=True))
    scale = 1 + sum(map(abs, weights))
    return weights if bool(((merged - expected).abs() <= 1e-9 * scale * (1 + expected.abs())).all()) else None


# Factors


def factorize(matrix: Tensor, rank: int, dtype: torch.dtype) -> Change:
    """Approximate a matrix by a product BA of at most this rank, stored in ``dtype``.

    The singular vectors of the shorter side are the eigenvectors of its Gram matrix, in float64. The loss is measured
    on the stored factors. Singular values that are rounding errors are left out.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64)
    panels = max(1, PANEL // max(1, tall.shape[1]))
    for panel in tall.split(panels):
        gram.addmm_(panel.T.double(), panel.double())
    values, vectors = torch.linalg.eigh(gram)
    roots, vectors = values.clamp_(min=0).sqrt_().flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = int((roots > NEGLIGIBLE * roots[0]).sum()) if len(roots) else 0
    roots, vectors = roots[:kept], vectors[:, :kept]
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    short = rounded((vectors * roots.sqrt()).T.contiguous(), dtype)
    long = torch.cat([rounded(panel.double() @ (vectors / roots.sqrt()), dtype) for panel in tall.split(panels)])
    pairs = zip(tall.split(panels), long.split(panels), strict=True)
    lost = sum(float((panel.double() - part.double() @ short.double()).square_().sum()) for panel, part in pairs)
    b, a = (long, short) if tall is matrix else (short.T, long.T)
    return Change(float(gram.trace()), lost, {"A": a, "B": b})


def truncate(b: Tensor, a: Tensor, rank: int | None, dtype: torch.dtype) -> Change:
    """Reduce a product BA in float64 to at most ``rank``, stored in ``dtype``. None keeps the rank."""
    norm, lost = max(float(((b.T @ b) * (a @ a.T)).sum()), 0.0), 0.0
    if rank is not None and a.shape[0] > rank:
        left, left_core = torch.linalg.qr(b)
        right, right_core = torch.linalg.qr(a.T)
        u, roots, v = torch.linalg.svd(left_core @ right_core.T, full_matrices=False)
        lost = float(roots[rank:].square().sum())
        b, a = left @ (u[:, :rank] * roots[:rank].sqrt()), (roots[:rank].sqrt()[:, None] * v[:rank]) @ right.T
    return Change(norm, lost, {"A": rounded(a.contiguous(), dtype), "B": rounded(b.contiguous(), dtype)})


# PEFT's modules, keys and config


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
        """Return the key of the factor A or B."""
        name = f"lora_embedding_{letter}" if self.kind == "embedding" else f"lora_{letter}.weight"
        return f"{PREFIX}{self.module}.{name}"


class ModuleTree:
    """Maps tensors of the base to PEFT modules: by the keys of its adapters, else by the class in its config."""

    def __init__(self, base: Checkpoint, adapters: Sequence[AdapterCheckpoint]) -> None:
        self.base = base
        self._known: dict[str, ModuleTensor] = {}
        for adapter in adapters:
            for name, factors in adapter.factors.items():
                if factors.slice is None:
                    kind = "linear" if len(base.tensors[name].shape) == 2 else "conv"
                    kind = "conv1d" if factors.transposed else kind
                    kind = "embedding" if ".lora_embedding_" in factors.a else kind
                    self._known[name] = ModuleTensor(factors.module, "weight", kind)

    @functools.cached_property
    def _model(self) -> nn.Module:
        model: nn.Module | None = None if self.base.folder is None else empty_model(self.base)
        if model is None:
            raise InputError(
                f"output.format: the modules of an adapter are unknown: {self.base.label} is no folder with a "
                "config.json from which transformers can build the model."
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
        module, _, parameter = self._paths.get(name, "").rpartition(".")
        if not module:
            raise InputError(
                f"output.format: {name} has changed, and no module of {type(self._model).__name__} that an adapter "
                "could hold has it alone. Exclude it, to keep that of the base, or write a model."
            )
        kind = _kind(self._model.get_submodule(module)) if parameter == "weight" else ""
        return ModuleTensor(module, parameter, kind)

    def can_factor(self, name: str) -> bool:
        """Return whether LoRA can represent the change of a tensor."""
        try:
            return bool(self.find(name).kind) and not self.tied(name)
        except InputError:  # raised again if the tensor has changed
            return False

    def tied(self, name: str) -> list[ModuleTensor]:
        """Return the other parameters that share a tensor. PEFT would change only one of them."""
        if in_layer(name) or self.base.folder is None:
            return []
        tensor = self.find(name)
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
    """Return the kind of LoRA layer for a module; empty for none, such as grouped convolutions."""
    if type(module) is nn.Embedding:
        return "embedding"
    if isinstance(module, nn.Linear):
        return "" if type(module).__name__ == "NonDynamicallyQuantizableLinear" else "linear"
    if type(module).__name__ == "Conv1D":
        return "conv1d"
    return "conv" if type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and module.groups == 1 else ""


def lay_out(
    tree: ModuleTree, changes: Mapping[str, Change], adapters: Sequence[AdapterCheckpoint]
) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """Return the config of an adapter with these changes, and the entries of its file.

    An entry is key → (tensor of the base, `A`, `B` or `whole`). If LoRA cannot represent the change of a tensor, its
    whole module is saved. A bias of a module with factors is saved alone, which PEFT loads with `bias: all`.
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
    ranks = {tensor.module: len(changes[name].factors["A"]) for name, tensor in factors.items()}
    rank = max(ranks.values(), key=list(ranks.values()).count)
    pattern = {module: other for module, other in ranks.items() if other != rank}
    hub_id, _, revision = (tree.base.hub_id or "").partition("@")
    # alpha is the rank of every module, so that the scale is 1 without patterns too.
    config = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": hub_id or redact(str((tree.base.folder or tree.base.files()[0]).absolute())),
        "revision": revision or None,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": sorted(ranks),
        "modules_to_save": modules or None,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": any(tensor.kind == "conv1d" for tensor in factors.values()),
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        **({"ensure_weight_tying": True} if tied else {}),
    }
    return config, entries


def _task(base: Checkpoint, configs: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the task of an adapter: that of all merged adapters, or else that of the base's architecture."""
    tasks = {config.get("task_type") for config in configs}
    if len(tasks) == 1 and (task := tasks.pop()) is not None:
        return str(task)
    named = base.config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return next((task for task, (ends, _) in TASKS.items() if name.endswith(ends)), None)


@dataclass
class AdapterReport:
    """The loss of writing a merge as an adapter, for the result, the record, the card and the notes."""

    base: Checkpoint
    rank: int
    """The rank of most modules."""
    lost: dict[str, float]
    """Tensor → the share of its change (squared Frobenius norm) that its factors do not represent."""
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
        if self.lost_share <= LOSSLESS:
            return "A LoRA adapter that holds the whole change from its base."
        worst = max(self.lost, key=lambda name: self.lost[name])
        return (
            f"A LoRA adapter of rank {self.rank}. It lacks {100 * self.lost_share:.3g} % of the change from its base "
            f"(squared Frobenius norm), and {100 * self.lost[worst]:.3g} % of the change of {worst}. gradmerge.json "
            "has the share of every tensor."
        )

    def notes(self) -> list[Note]:
        texts = [self.text] if self.lost_share > LOSSLESS else []
        if self.saved_whole:
            texts.append(f"saved whole, as LoRA cannot represent them: {some(self.saved_whole, 3)}")
        return list(map(Note, texts))
