"""From a recipe to a plan: every model and curvature file that it names, opened and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.compat.compare import compare
from ...checkpoints.compat.rename import RenamedCheckpoint
from ...checkpoints.compat.tied_weights import same_values, tied_to
from ...checkpoints.open import open_checkpoint, put_adapter
from ...curvature.format import default_curvature, open_curvature
from ...errors import InputError
from ...io.reader import FLOATS, TensorInfo
from ...notes import Kind, Note
from ...recipe import NONE, Base, CurvatureSource, Identity, Model, Recipe
from ...rules import Rule
from ...text import listed
from ..run.reduce import measured
from .inputs import USUAL_DAMPING, CurvatureInput, Inputs
from .kronecker_layers import Layers, find_layers, held_by_factors
from .penalties import follow_rename, incomplete, mismatched, recorded_penalty
from .per_layer import LayerSettings, Stretch, smallest, varies
from .plan import Job, Layer, Plan, rule_arguments
from .slices import compared_parts, opened_once, settings_of_slices, stacked_models, stacked_notes
from .vocabularies import follow_rows, with_one_vocabulary

_STORED = {word: code for code, word in FLOATS.items()}


def open_plan(
    recipe: Recipe,
    *,
    reads: frozenset[str] | None = None,
    wanted_by: str | None = None,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    dequantize: bool = False,
) -> Plan:
    """Open what a recipe names and plan its merge. Close ``plan.inputs`` when done.

    ``reads`` are the inputs to read, by their names in :data:`gradmerge.rules.spec.INPUTS`: by default those that the
    recipe's method needs, or others for those who only look at merges; ``wanted_by`` is who that is, in messages.
    ``allow_config`` are keys in which the configs of the models may differ; with ``dequantize``, codes of fp8 and
    bitsandbytes are read as the numbers that they stand for.
    """
    needs = recipe.rule.needs(recipe.resolved_options) if reads is None else reads
    inputs = open_inputs(recipe, needs, wanted_by or recipe.method, allow_pickle=allow_pickle, dequantize=dequantize)
    try:
        return make_plan(recipe, inputs, reads=reads, allow_config=allow_config)
    except BaseException:
        inputs.close()
        raise


def open_inputs(
    recipe: Recipe, needs: frozenset[str], wanted_by: str, *, allow_pickle: bool = False, dequantize: bool = False
) -> Inputs:
    """Open the models of a recipe, and those of its curvature files that ``needs`` asks for."""
    with ExitStack() as opened:
        allowed: dict[str, Any] = {"allow_pickle": allow_pickle, "dequantize": dequantize}

        def checkpoint(part: Base | Model, base: Checkpoint | None) -> Checkpoint:
            place = recipe.made.get(part.model, part.model)
            found = open_checkpoint(place, relative_to=recipe.folder, adapter_base=base, **allowed)
            opened.enter_context(found)
            found.label = part.model
            if part.adapter is not None:
                found = put_adapter(part.adapter, found, relative_to=recipe.folder, allow_pickle=allow_pickle)
                opened.enter_context(found)
            return RenamedCheckpoint(found, part.rename, f"{_key(recipe, part)}.rename") if part.rename else found

        def curvature(source: CurvatureSource | None, model: Checkpoint, key: str) -> CurvatureInput:
            found = _open_curvature(source, model, key, recipe, wanted_by)
            opened.callback(found.close)
            follow_rows(found, model)
            return found

        base = checkpoint(recipe.base, None) if recipe.base else None
        tuned = [checkpoint(model, base) for model in recipe.models]
        parts = opened_once(recipe, base, lambda model: checkpoint(model, base)) if recipe.slices else []
        names = [model.model for model in recipe.sources]
        views, files = with_one_vocabulary(recipe, base, list(zip(names, [*tuned, *parts], strict=True)))
        base, tuned = None if base is None else views[base], [views[model] for model in tuned]
        if recipe.slices:
            base, tuned = stacked_models(recipe, base, [views[found] for found in parts], needs)
        inputs = inputs_of(recipe, base, tuned)
        inputs.result_files = files
        if base is not None and recipe.base is not None:
            if "prior" in needs:
                inputs.prior = curvature(recipe.base.curvature, base, "base.curvature")
            if "penalty" in needs and recipe.base.penalty is not None:
                inputs.penalty = [curvature(recipe.base.penalty, base, "base.penalty")] * len(inputs.tuned)
            elif "penalty" in needs:
                for model in inputs.tuned:
                    inputs.penalty.append(found := recorded_penalty(model))
                    follow_rows(found, model)
                    opened.callback(found.close if found is not None else lambda: None)
                inputs.penalty = inputs.penalty if any(inputs.penalty) else []
        if needs & {"curvature", "grams"}:
            pairs = enumerate(zip(recipe.models, inputs.tuned, strict=True))
            every = [curvature(m.curvature, c, f"models[{i}].curvature") for i, (m, c) in pairs]
            inputs.curvature, inputs.grams = ([], every) if "grams" in needs else (every, [])
        opened.pop_all()
        return inputs


def _key(recipe: Recipe, part: Base | Model) -> str:
    """Where a recipe names a model."""
    models = {f"models[{i}]": model for i, model in enumerate(recipe.models)}
    for number, slice_ in enumerate(recipe.slices):
        models |= {f"slices[{number}].models[{i}]": model for i, model in enumerate(slice_.models)}
    return next((key for key, model in models.items() if model is part), "base")


def inputs_of(recipe: Recipe, base: Checkpoint | None, tuned: list[Checkpoint]) -> Inputs:
    """The models of a recipe with its numbers, still without curvature."""
    options, template = recipe.resolved_options, base or tuned[0]
    stretch = Stretch(recipe.weights, recipe.base.weight if recipe.base else None, options)
    settings = LayerSettings.over(template.tensors, stretch)
    return Inputs(
        template=template,
        base=base,
        tuned=tuned,
        settings=settings_of_slices(recipe, template, tuned) if recipe.slices else settings,
        damping=USUAL_DAMPING if recipe.damping == "auto" else recipe.damping,
        damping_is_open=recipe.damping == "auto",
        options=options,
    )


def _open_curvature(
    source: CurvatureSource | None, model: Checkpoint, key: str, recipe: Recipe, wanted_by: str
) -> CurvatureInput:
    if isinstance(source, Identity):
        return CurvatureInput(label=f"{key} (identity)", constant=source.identity)
    if source == NONE and key == "base.penalty":
        return CurvatureInput(label=f"{key} (none)", constant=0.0)
    if source is not None:
        file = open_curvature(source, relative_to=recipe.folder)
    else:
        inside = default_curvature(model.folder)
        if inside is None:
            raise InputError(
                f"{key}: {wanted_by} needs the curvature of {model.label}, the recipe names none, and the model folder "
                "has no curvature/ folder. Estimate it with `gradmerge curvature estimate`, name a curvature folder or "
                "file, or give {identity: 1.0} in a recipe (identity:1.0 on the command line) for the same number "
                "everywhere."
            )
        file = open_curvature(str(inside), relative_to=Path())
        file.label = f"{model.label}/{inside.name}"
    follow_rename(file, model)
    scaled = recipe.base.examples if recipe.base is not None and key == "base.curvature" else None
    return CurvatureInput.of_file(file, recipe.reduction, scaled)


def make_plan(
    recipe: Recipe, inputs: Inputs, *, reads: frozenset[str] | None = None, allow_config: Sequence[str] = ()
) -> Plan:
    """Compare all inputs of a recipe and lay out the work; raises with every difference if they do not fit together.

    With ``reads``, the plan is for looking at merges: it reads those inputs, which need not suit the rule.
    """
    rule, template, has_base = recipe.rule, inputs.template, inputs.base is not None
    others = [c for c in inputs.tuned if c is not template]
    settled = inputs.result_files.settled if inputs.result_files else ()
    notes = compared_parts(inputs.checkpoints, recipe.exclude, allow_config, settled)
    comparison = compare(
        template,
        others,
        recipe.include,
        recipe.exclude,
        allow_config=allow_config,
        first_is_base=has_base,
        settled=settled,
    )
    inputs.aliases = dict(zip(others, comparison.aliases, strict=True))
    diagonals = [source for source in inputs.curvatures if source not in inputs.grams]
    _tie(diagonals, template, comparison.merged)
    gram_names, gram_problems = _gram_names(inputs, comparison.merged)
    layers, layer_problems = find_layers(inputs, rule, comparison.merged, looking=reads is not None)
    problems = [*comparison.problems, *layer_problems, *problems_of_scope(inputs)]
    for source in diagonals:
        # What a recorded penalty does not name was not held by it.
        recorded = source in inputs.penalty and recipe.base is not None and recipe.base.penalty is None
        held, missing = held_by_factors(source, layers), "zero" if recorded else recipe.missing
        problems += _problems_of(source, inputs, comparison.merged, held, missing)
    problems += gram_problems
    problems += (
        problems_of_layers(recipe.options, inputs, layers, recipe.output.curvature) if layers and reads is None else []
    )
    if problems:
        raise InputError("these cannot be merged:\n" + "\n".join(f"• {p}" for p in problems))

    wanted, biases = set(comparison.merged), {bias for _, bias in layers.values()}
    jobs = []
    for name, info in template.tensors.items():
        if name not in wanted:
            jobs.append(Job(name, info, None))
            continue
        chosen = rule if rule.fallback is None or name in gram_names else rule.fallback
        read = [c for c in inputs.checkpoints if name not in c.absent]
        types = {c.tensors[inputs.stored_name(c, name)].dtype for c in read}
        widest = _widest_type(types) if recipe.output.dtype == "widest" else info.dtype
        stored = _STORED.get(recipe.output.dtype, widest)
        wide = "F64" in types or chosen.fallback is not None or name in layers or name in biases
        compute = torch.float64 if wide else torch.float32
        grain = chosen.granularity_of(inputs.settings.of(name).options)
        jobs.append(Job(name, TensorInfo(stored, info.shape), chosen, compute, inside=name in biases, grain=grain))
    own = {job.name: job for job in jobs}
    for place, job in enumerate(jobs):
        if job.name in layers:
            turned, bias = layers[job.name]
            jobs[place] = replace(job, layer=Layer(turned, own[bias] if bias is not None else None))
    plan = Plan(rule, inputs, jobs, _needs(rule, inputs) if reads is None else reads, recipe.output.curvature)
    plan.note(recipe.notes)
    plan.note(comparison.notes if not recipe.slices else stacked_notes(comparison.notes, notes))
    plan.note(inputs.result_files.notes if inputs.result_files else ())
    plan.note(dict.fromkeys(note for checkpoint in inputs.checkpoints for note in checkpoint.notes))
    plan.note(incomplete(inputs))
    plan.note(mismatched(recipe, inputs))
    plan.note(inputs.settings.notes([job.name for job in plan.merged]))
    plan.note(_method_notes(recipe, looking=reads is not None))
    if reads is None:
        rehearse(plan)
    return plan


def problems_of_scope(inputs: Inputs) -> list[str]:
    """One threshold for the whole model knows no layers."""
    varying = [name for name in ("density", "gamma") if varies(inputs.options.get(name))]
    if inputs.options.get("scope") != "model" or not varying:
        return []
    why = "differs between tensors, which `scope: tensor` allows; `scope: model` cuts all alike"
    return [f"options.{varying[0]}: {why}"]


def _widest_type(types: set[str]) -> str:
    """The narrowest type that holds all numbers of some."""
    found = next(iter(types)) if len(types) == 1 else "F32"
    return "F64" if "F64" in types else found


def _method_notes(recipe: Recipe, looking: bool) -> Iterator[Note]:
    if "positive-weights" in recipe.rule.checks and smallest(recipe.weights) < 0:
        yield Note(
            "a weight is negative: where H̄ = H_0 + Σ α_t H_t is not positive the merged loss has no minimum, and 0 is "
            "written as its curvature. To take a task out of the base, use removal."
        )
    if looking:
        return
    # Curvature that the recipe names and the method does not read is fine when methods are compared, but worth a note.
    needs = recipe.rule.needs(recipe.resolved_options)
    unused = ["base.curvature"] if recipe.base and recipe.base.curvature is not None and "prior" not in needs else []
    if not needs & {"curvature", "grams"}:
        unused += [f"models[{i}].curvature" for i, model in enumerate(recipe.models) if model.curvature is not None]
    if unused:
        yield Note(f"{recipe.method} does not use {', '.join(unused)}", Kind.UNUSED, keys=unused)


def _needs(rule: Rule, inputs: Inputs) -> frozenset[str]:
    """The inputs that a merge reads: the rule's, without the base if it is optional and has no weight."""
    needs = rule.needs(inputs.options)
    idle = inputs.base is None or ("base_weight" in needs and inputs.settings.of("").base_weight is None)
    return needs - (rule.optional & {"base"}) if idle else needs


def problems_of_layers(
    options: Mapping[str, Any], inputs: Inputs, layers: Layers, write_curvature: bool = False
) -> list[str]:
    """Settings that single entries know and layers with Kronecker curvature do not."""
    problems = []
    if write_curvature:
        problems.append(
            "output.curvature: with Kronecker curvature H̄ is a sum of Kronecker products, which no file holds. "
            "Leave it out, and estimate the curvature of the merged model instead"
        )
    if options.get("base_saw_removed"):
        problems.append(
            "options.base_saw_removed: a Kronecker product minus others is no curvature. Estimate that of the base on "
            "the data that stays, or take diagonals"
        )
    if options.get("cap", NONE) != NONE:
        problems.append(
            "options.cap: limits the step of single entries, which Kronecker curvature does not have. Bound it with "
            "`damping`, and leave cap out"
        )
    of = inputs.settings.of
    parted = [weight for weight, (_, bias) in layers.items() if bias is not None and of(weight) != of(bias)]
    if parted:
        problems.append(
            f"weight: filters give {parted[0]} and its bias different values, but Kronecker curvature holds them "
            "together. Let filters fit both, or take diagonals"
        )
    return problems


def _tie(diagonals: Sequence[CurvatureInput], template: Checkpoint, names: Sequence[str]) -> None:
    """Use the curvature of an embedding for a tied head that a curvature file lacks.

    Both tensors are stored in the template, with the same values.
    """
    lacking = {n for source in diagonals if source.shapes is not None for n in names if n not in source.shapes}
    pairs = ((name, tied_to(name, template)) for name in lacking)
    ties = {name: tied for name, tied in pairs if tied is not None and same_values(template, name, tied)}
    for source in diagonals:
        source.aliases = ties


def _problems_of(
    source: CurvatureInput, inputs: Inputs, names: Sequence[str], held: set[str], missing: str
) -> list[str]:
    """What is wrong with the diagonals of a source; those ``held`` in Kronecker factors need none."""
    shapes = source.shapes
    if shapes is None:
        return []
    tensors = inputs.template.tensors
    if source.file is not None and source.kind != "diagonal" and source.tokens is None:
        return [f"{source.label}: holds {source.file.kind} matrices, where a diagonal is needed"]
    problems = []
    misfits = [n for n in names if n in shapes and shapes[n] != tensors[n].shape]
    if misfits:
        wrong = [f"{n}: {list(shapes[n])}, but the weight is {list(tensors[n].shape)}" for n in misfits]
        problems.append(f"{source.label}: curvature of another model, its shapes do not fit\n{listed(wrong)}")
    absent = [n for n in names if n not in held and source.stored_name(n, tensors[n].shape) is None]
    if absent and len(absent) == len(names):
        problems.append(
            f"{source.label}: curvature of another model: it has none of the tensors to merge\n{listed(absent, 3)}"
        )
    elif absent and missing != "zero":
        problems.append(
            f"{source.label}: no curvature for {len(absent)} of {len(names)} tensors\n{listed(absent)}\n"
            "  Exclude them, or set `missing: zero` to take it as 0."
        )
    return problems


def _gram_names(inputs: Inputs, names: Sequence[str]) -> tuple[set[str], list[str]]:
    """Weights that every model has a Gram matrix for, and what is wrong with those that do not."""
    found: set[str] = set()
    problems = [
        f"{source.label}: regmean needs Gram matrices (XᵀX of the inputs of linear layers), not a diagonal"
        for source in inputs.grams
        if source.shapes is None or (source.file is not None and source.file.kind != "gram")
    ]
    if problems or not inputs.grams:
        return found, problems
    every = [source.shapes or {} for source in inputs.grams]
    for name in names:
        shape = inputs.template.tensors[name].shape
        having = [s[name] for s in every if name in s]
        if not having:
            continue
        size = having[0][0] if having[0] else 0
        if len(having) < len(every):
            problems.append(f"{name}: some models have a Gram matrix for it and some do not")
        elif len(shape) != 2 or size not in shape or any(own != (size, size) for own in having):
            problems.append(f"{name}: its Gram matrices {list(map(list, having))} do not fit the weight {list(shape)}")
        else:
            found.add(name)
    if not found and not problems:
        problems.append(f"{inputs.grams[0].label}: has no Gram matrix for any tensor to merge; is it of another model?")
    return found, problems


def rehearse(plan: Plan) -> None:
    """Run the rule once on single numbers, so that a setting which cannot work fails before any file is read."""
    one = torch.ones(1, 1)
    stand_ins: dict[str, Any] = dict.fromkeys(("base", "prior", "penalty"), one) | {"damping": plan.inputs.damping}
    every = plan.inputs.settings.every(job.name for job in plan.merged)
    for rule in (plan.rule, plan.rule.fallback):
        for numbers in every if rule is not None else ():
            assert rule is not None
            models = len(numbers.weights)
            stand_ins |= dict.fromkeys(("tuned", "curvature", "grams"), [one] * models)
            stand_ins |= {"kept": [one > 0] * models, "uniform": [one.double() / 2] * models}
            try:
                ranks = rule.ranks(1, models, numbers.options) if rule.ranks is not None else []
                stand_ins["thresholds"] = [0.0 if len(own) == 1 else [0.0] * len(own) for own in ranks]
                arguments = rule_arguments(rule, plan, stand_ins, numbers)
                found = measured(rule.measures_of(numbers.options), [arguments].__iter__, arguments, 1, one.dtype)
                rule(**rule_arguments(rule, plan, {**stand_ins, **found}, numbers))
            except ValueError as error:
                raise InputError(f"{rule.name}: {error}") from error
