"""The plan of a merge: open what the recipe names, compare it, and make a job for every tensor of the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.checkpoint import Checkpoint, RenamedCheckpoint, View
from ..checkpoints.comparison import compare
from ..checkpoints.layers import compare_parts
from ..checkpoints.open import apply_adapter, open_checkpoint
from ..checkpoints.tied_weights import tied_copies
from ..curvature.format import default_curvature
from ..errors import InputError
from ..io.reader import FLOATS, TensorInfo
from ..notes import Kind, Note
from ..recipe import Base, CurvatureSource, Model, Recipe, reduction_factor
from ..rules import Rule
from ..rules.measures import Measure
from ..rules.spec import RANDOM_INPUTS
from ..text import natural
from .inputs import CONSTANT_DAMPING, CurvatureInput, Inputs, penalty_notes, recorded_penalty, zero_if_none
from .jobs import CPU, Block, BlockJob, CopyJob, Job, LayerJob, rule_arguments
from .match_curvature import SolvedLayers, layer_option_problems, match_curvature
from .settings import LayerRange, LayerSettings, settings_of_slices, smallest, stacked_models, varies
from .statistics import Statistics, compute_measures
from .vocabularies import with_one_vocabulary

BLOCK = 1 << 18
"""Entries that go through a rule at once. Smaller blocks stay in a core's cache, but threads then spend their time
waiting for the interpreter's lock. Larger ones take more memory."""
FEW_BLOCKS = 12
"""If a thread holds at most this many blocks in memory, blocks have twice the size. Threads then wait half as often for
each other. More blocks of that size would not fit the processor's cache."""


@dataclass
class Plan:
    """What a merge will do."""

    recipe: Recipe
    rule: Rule
    inputs: Inputs
    jobs: list[Job]
    needs: frozenset[str]
    """Inputs that are read: those that the rule needs and the recipe names, or those that a caller asks for."""
    device: torch.device = CPU
    """The device of the arithmetic."""
    allow_nonfinite: bool = False
    precision_factor: float | None = None
    """Factor of the written curvature H̄; None if the merge writes none."""
    statistics: Statistics = field(default_factory=Statistics)
    """What is known of whole tensors, once :func:`~gradmerge.engine.statistics.compute_statistics` has run."""
    notes: list[Note] = field(default_factory=list)
    block: int = BLOCK
    """The preferred number of entries of a block; see :attr:`block_size`."""

    def note(self, texts: Iterable[str]) -> None:
        self.notes += [text if isinstance(text, Note) else Note(text) for text in texts]

    @property
    def merged_jobs(self) -> list[Job]:
        """The jobs of tensors that go through the rule."""
        return [job for job in self.jobs if job.rule is not None]

    @property
    def block_jobs(self) -> list[BlockJob]:
        return [job for job in self.jobs if isinstance(job, BlockJob)]

    @property
    def layer_jobs(self) -> list[LayerJob]:
        return [job for job in self.jobs if isinstance(job, LayerJob)]

    @property
    def merged_tensors(self) -> dict[str, TensorInfo]:
        """The tensors of the result that go through the rule."""
        return {name: info for job in self.merged_jobs for name, info in job.tensors.items()}

    @property
    def copied_tensors(self) -> int:
        return len(self.jobs) - len(self.merged_jobs)

    def blocks(self, size: int | None = None, jobs: Iterable[Job] | None = None) -> Iterator[Block]:
        """Yield all blocks, or those of some jobs, of about ``size`` entries, in the order of the template's files."""
        size = size or self.block_size
        number = 0
        for job in self.jobs if jobs is None else jobs:
            for block in job.split(job.block_size(size)):
                yield replace(block, number=number)
                number += 1

    @property
    def measures(self) -> Mapping[str, Measure]:
        """Statistics of whole tensors that the rule needs."""
        return self.rule.measures_of(self.inputs.options)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Types and shapes of the result, in an order that does not depend on how the inputs are stored."""
        infos = {name: info for job in self.jobs for name, info in job.tensors.items()}
        return {name: infos[name] for name in sorted(infos, key=natural)}

    @property
    def precision_tensors(self) -> dict[str, TensorInfo]:
        """Types and shapes of the result's curvature, in the same order."""
        merged = self.merged_tensors
        return {name: TensorInfo("F32", info.shape) for name, info in self.tensors.items() if name in merged}

    @property
    def examples(self) -> int:
        """The number of examples behind the curvature of the result: the sum over all inputs."""
        inputs = self.inputs
        sources = (*([inputs.prior] if inputs.prior else []), *inputs.curvature)
        return max(1, sum(source.dataset_size for source in sources))

    @property
    def total_read(self) -> int:
        return sum(job.bytes_read(self) for job in self.jobs)

    @property
    def merged_read(self) -> int:
        """Bytes that one pass over the merged tensors reads."""
        return sum(job.bytes_read(self) for job in self.merged_jobs)

    @property
    def statistics_read(self) -> int:
        """Bytes that are read for statistics: a pass for each measure, one for thresholds, and the damping."""
        passes = len(self.measures) + ("thresholds" in self.needs)
        total = passes * self.merged_read if passes else 0
        if self.inputs.needs_mean_curvature(self.rule):
            total += sum(source.nbytes(name) for source in self.inputs.curvature for name in self.merged_tensors)
        return total

    @property
    def total_written(self) -> int:
        model = sum(info.nbytes for job in self.jobs for info in job.tensors.values())
        precision = sum(info.numel * 4 for info in self.merged_tensors.values())
        return model + (0 if self.precision_factor is None else precision)

    def memory(self, threads: int) -> int:
        """Return the approximate peak memory in bytes: the interpreter, and each thread's blocks."""
        size = self.block_size
        entries = max((job.block_size(size) for job in self.block_jobs if job.granularity != "tensor"), default=size)
        blocks = threads * max(size, entries) * (8 if self._needs_float64 else 4) * self._blocks_in_memory
        return 330_000_000 + blocks + threads * max((job.memory(self) for job in self.jobs), default=0)

    @property
    def _blocks_in_memory(self) -> int:
        """How many blocks a thread has in memory, about: inputs as they are stored and converted, and temporaries."""
        base, tuned = int(self.inputs.base is not None and "base" in self.needs), len(self.inputs.tuned)
        return 2 * (base + tuned + len(self.inputs.curvatures)) + tuned + 6

    @property
    def _needs_float64(self) -> bool:
        settings = self.inputs.settings.distinct(self.merged_tensors)
        needed = any(self.rule.needs_float64(some.all_weights, some.options) for some in settings)
        return needed or any(job.compute == torch.float64 for job in self.jobs)

    @property
    def block_size(self) -> int:
        """The number of entries of a block: :attr:`block`, or twice that if few blocks are in memory.

        Random masks take memory too, so their blocks are not doubled.
        """
        few = self._blocks_in_memory <= FEW_BLOCKS and not self._needs_float64 and not self.needs & RANDOM_INPUTS
        return 2 * self.block if few else self.block


_STORED_TYPES = {dtype: code for code, dtype in FLOATS.items()}
"""Name of a dtype in recipes → its code in safetensors."""


def open_plan(
    recipe: Recipe,
    *,
    reads: frozenset[str] | None = None,
    needed_by: str | None = None,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    dequantize: bool = False,
) -> Plan:
    """Open the models and curvature of a recipe, and plan its merge. The caller closes ``plan.inputs``.

    Args:
        recipe: The recipe.
        reads: Names in :data:`gradmerge.rules.spec.INPUTS` of the inputs to read. The default is what the method needs.
        needed_by: What needs ``reads``, for error messages. The default is the method.
        allow_pickle: Also read .bin and .pt checkpoints (tensors only).
        allow_config: Keys in which the configs of the models may differ.
        dequantize: Dequantize fp8 and bitsandbytes weights on load.
    """
    needs = recipe.rule.needs(recipe.resolved_options) if reads is None else reads
    with ExitStack() as opened:
        inputs = open_inputs(recipe, needs, needed_by or recipe.method, opened, allow_pickle, dequantize)
        plan = make_plan(recipe, inputs, reads=reads, allow_config=allow_config)
        opened.pop_all()
        return plan


def open_inputs(
    recipe: Recipe, needs: frozenset[str], needed_by: str, opened: ExitStack, allow_pickle: bool, dequantize: bool
) -> Inputs:
    """Open the models of a recipe, and the curvature that ``needs`` asks for. ``opened`` closes them."""
    known: dict[str, Checkpoint] = {}

    def open_model(part: Base | Model, base: Checkpoint | None) -> Checkpoint:
        key = repr((part.model, part.adapter, part.rename))
        if recipe.slices and key in known:  # a model in several slices is opened once
            return known[key]
        reference, folder = recipe.merged_folders.get(part.model, part.model), recipe.folder
        model = open_checkpoint(
            reference, relative_to=folder, adapter_base=base, allow_pickle=allow_pickle, dequantize=dequantize
        )
        opened.enter_context(model)
        model.label = part.model
        if part.adapter is not None:
            model = apply_adapter(part.adapter, model, relative_to=folder, allow_pickle=allow_pickle)
            opened.enter_context(model)
        if part.rename:
            model = RenamedCheckpoint(model, part.rename, f"{part.model}: rename")
        known[key] = model
        return model

    def open_curvature(
        source: CurvatureSource | None, model: Checkpoint, key: str, dataset_size: int | None = None
    ) -> CurvatureInput:
        default = default_curvature(model.folder)
        if source is not None:
            curvature = CurvatureInput.open(source, key, model, recipe.folder)
        elif default is not None:
            curvature = CurvatureInput.open(str(default), key, model, Path())
            curvature.label = f"{model.label}/{default.name}"
        else:
            raise InputError(
                f"{key}: {needed_by} needs the curvature of {model.label}, the recipe names none, and the model folder "
                "has no curvature/ folder. Estimate it with `gradmerge curvature estimate`, name a curvature folder or "
                "file, or give {identity: 1.0} in a recipe (identity:1.0 on the command line) for the same number "
                "everywhere."
            )
        opened.callback(curvature.close)
        curvature.reduce(recipe.reduction, dataset_size)
        return curvature

    base = open_model(recipe.base, None) if recipe.base else None
    models = [(model.model, open_model(model, base)) for model in recipe.sources]
    views, files = with_one_vocabulary(recipe, base, models)
    base, tuned = None if base is None else views[base], [views[model] for _, model in models]
    if recipe.slices:
        base, tuned = stacked_models(recipe, base, tuned, needs)
    inputs = inputs_of(recipe, base, tuned)
    inputs.result_files = files
    if base is not None and recipe.base is not None:
        if "prior" in needs:
            inputs.prior = open_curvature(recipe.base.curvature, base, "base.curvature", recipe.base.examples)
        if "penalty" in needs and recipe.base.penalty is not None:
            penalty = open_curvature(zero_if_none(recipe.base.penalty), base, "base.penalty")
            inputs.penalty = [penalty] * len(inputs.tuned)
        elif "penalty" in needs:
            recorded = [recorded_penalty(model) for model in inputs.tuned]
            for source in filter(None, recorded):
                opened.callback(source.close)
            inputs.penalty = recorded if any(recorded) else []
    if needs & {"curvature", "grams"}:
        pairs = enumerate(zip(recipe.models, inputs.tuned, strict=True))
        inputs.curvature = [open_curvature(m.curvature, c, f"models[{i}].curvature") for i, (m, c) in pairs]
    return inputs


def inputs_of(recipe: Recipe, base: Checkpoint | None, tuned: list[Checkpoint]) -> Inputs:
    """Return the inputs of a merge without curvature: models, weights, options and damping."""
    options, template = recipe.resolved_options, base or tuned[0]
    range_ = LayerRange(recipe.weights, recipe.base.weight if recipe.base else None, options)
    settings = LayerSettings.over(template.tensors, range_)
    return Inputs(
        template=template,
        base=base,
        tuned=tuned,
        settings=settings_of_slices(recipe, template, tuned) if recipe.slices else settings,
        damping=CONSTANT_DAMPING if recipe.damping == "auto" else recipe.damping,
        damping_is_auto=recipe.damping == "auto",
        options=options,
    )


def make_plan(
    recipe: Recipe, inputs: Inputs, *, reads: frozenset[str] | None = None, allow_config: Sequence[str] = ()
) -> Plan:
    """Compare all inputs and lay out the work; raise one error that lists every incompatibility.

    With ``reads``, the plan is for comparing merges: it reads these inputs, which need not suit the recipe's rule.
    """
    rule, template, for_comparison = recipe.rule, inputs.template, reads is not None
    others = [checkpoint for checkpoint in inputs.tuned if checkpoint is not template]
    one_tokenizer = recipe.tokenizer is not None
    parts = compare_parts(inputs.checkpoints, recipe.exclude, allow_config, one_tokenizer)
    comparison = compare(
        template,
        others,
        recipe.include,
        recipe.exclude,
        allow_config=allow_config,
        first_is_base=inputs.base is not None,
        one_tokenizer=one_tokenizer,
    )
    views = {model: with_ties(model, ties) for model, ties in zip(others, comparison.aliases, strict=True)}
    inputs.tuned = [views.get(model, model) for model in inputs.tuned]
    layers, problems = match_curvature(
        inputs,
        rule,
        comparison.merged,
        missing=recipe.missing,
        penalty_is_recorded=recipe.base is not None and recipe.base.penalty is None,
        for_comparison=for_comparison,
    )
    problems = [*parts.problems, *comparison.problems, *scope_problems(inputs), *problems]
    if layers and not for_comparison and rule.layers is not None:
        problems += layer_option_problems(recipe.options, inputs, layers, recipe.output.curvature)
    if problems:
        raise InputError("these cannot be merged:\n" + "\n".join(f"• {problem}" for problem in problems))
    jobs = _jobs(recipe, inputs, set(comparison.merged), layers)
    plan = Plan(recipe, rule, inputs, jobs, _needs(rule, inputs) if reads is None else reads)
    if recipe.output.curvature:
        plan.precision_factor = 1.0 / reduction_factor(recipe.reduction, plan.examples)
    if plan.needs & RANDOM_INPUTS:
        inputs.tied_copies = tied_copies(template)
    plan.note(recipe.notes)
    plan.note([*comparison.notes, *parts.notes])
    plan.note(inputs.result_files.notes if inputs.result_files else ())
    plan.note(dict.fromkeys(note for checkpoint in inputs.checkpoints for note in checkpoint.notes))
    plan.note(penalty_notes(inputs))
    plan.note(inputs.settings.notes(list(plan.merged_tensors)))
    plan.note(_method_notes(recipe, for_comparison))
    if not for_comparison:
        check_rule_settings(plan)
    return plan


def _jobs(recipe: Recipe, inputs: Inputs, merged: set[str], layers: SolvedLayers) -> list[Job]:
    """Return a job for every tensor of the result, in the order of the template; a layer's job includes its bias."""
    rule, tensors = recipe.rule, inputs.template.tensors
    biases = {layer.bias for layer in layers.values()}

    def read_types(name: str) -> set[str]:
        models = [model for model in inputs.checkpoints if name not in model.absent]
        return {model.tensors[name].dtype for model in models}

    def result_info(name: str) -> TensorInfo:
        dtype, types = tensors[name].dtype, read_types(name)
        if recipe.output.dtype == "widest" and len(types) > 1:
            dtype = "F64" if "F64" in types else "F32"  # the narrowest type that holds the numbers of all types
        return TensorInfo(_STORED_TYPES.get(recipe.output.dtype, dtype), tensors[name].shape)

    jobs: list[Job] = []
    for name, info in tensors.items():
        if name not in merged:
            jobs.append(CopyJob(name, info))
        elif name in layers:
            transposed, bias = layers[name]
            bias_info = None if bias is None else (bias, result_info(bias))
            jobs.append(LayerJob(name, result_info(name), rule=rule, transposed=transposed, bias=bias_info))
        elif name not in biases:
            chosen = rule if rule.fallback is None else rule.fallback
            compute = torch.float64 if "F64" in read_types(name) else torch.float32
            granularity = chosen.granularity_of(inputs.settings.of(name).options)
            jobs.append(BlockJob(name, result_info(name), rule=chosen, compute=compute, granularity=granularity))
    return jobs


def with_ties(model: Checkpoint, ties: Mapping[str, str]) -> Checkpoint:
    """Return a view of a model that also has the tied tensors that it does not store."""
    if not ties:
        return model
    view = View(model, {**{name: name for name in model.tensors}, **ties})
    view.absent = model.absent
    return view


def scope_problems(inputs: Inputs) -> list[str]:
    """Return a problem if an option varies between tensors, but `scope: model` needs one threshold."""
    varying = [name for name in ("density", "gamma") if varies(inputs.options.get(name))]
    if inputs.options.get("scope") != "model" or not varying:
        return []
    return [f"options.{varying[0]}: differs between tensors; set `scope: tensor`, as `scope: model` has one threshold"]


def _method_notes(recipe: Recipe, for_comparison: bool) -> Iterator[Note]:
    if "positive-weights" in recipe.rule.checks and smallest(recipe.weights) < 0:
        yield Note(
            "a weight is negative: where H̄ = H_0 + Σ α_t H_t is not positive the merged loss has no minimum, and 0 is "
            "written as its curvature. To remove a task from the base, use the method removal."
        )
    if for_comparison:
        return
    # Curvature that the method does not read is fine when methods are compared, but worth a note.
    needs = recipe.rule.needs(recipe.resolved_options)
    unused = ["base.curvature"] if recipe.base and recipe.base.curvature is not None and "prior" not in needs else []
    if not needs & {"curvature", "grams"}:
        unused += [f"models[{i}].curvature" for i, model in enumerate(recipe.models) if model.curvature is not None]
    if unused:
        yield Note(f"{recipe.method} does not use {', '.join(unused)}", Kind.UNUSED, keys=unused)


def _needs(rule: Rule, inputs: Inputs) -> frozenset[str]:
    """Return the inputs that a merge reads: the rule's, without an optional base that has no weight."""
    needs = rule.needs(inputs.options)
    idle = inputs.base is None or ("base_weight" in needs and inputs.settings.of("").base_weight is None)
    return needs - (rule.optional & {"base"}) if idle else needs


def check_rule_settings(plan: Plan) -> None:
    """Run the rule once on a tensor of one element, so that invalid settings fail before any weight is read."""
    unit = torch.ones(1, 1)
    tensors: dict[str, Any] = dict.fromkeys(("base", "prior", "penalty"), unit) | {"damping": plan.inputs.damping}
    all_settings = plan.inputs.settings.distinct(plan.merged_tensors)
    for rule in filter(None, (plan.rule, plan.rule.fallback)):
        for settings in all_settings:
            models = len(settings.weights)
            tensors |= dict.fromkeys(("tuned", "curvature", "grams"), [unit] * models)
            tensors |= {"kept": [unit > 0] * models}
            tensors |= dict.fromkeys(("uniform", "normal"), [unit.double() / 2] * models)
            try:
                ranks = rule.ranks(1, models, settings.options) if rule.ranks is not None else []
                tensors["thresholds"] = [0.0 if len(some) == 1 else [0.0] * len(some) for some in ranks]
                arguments = rule_arguments(rule, plan, tensors, settings)
                measures = rule.measures_of(settings.options)
                measured = compute_measures(measures, [arguments].__iter__, arguments, 1, unit.dtype)
                rule(**rule_arguments(rule, plan, tensors | measured, settings))
            except ValueError as error:
                raise InputError(f"{rule.name}: {error}") from error
