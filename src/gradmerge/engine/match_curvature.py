"""Match curvature files with the tensors to merge: diagonals, Gram matrices, and Kronecker factors of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.tied_weights import same_values, tied_to
from ..curvature.format import INPUTS, OUTPUTS
from ..recipe import NONE
from ..rules import METHODS, Rule
from ..text import listed, some
from .inputs import CurvatureInput, Inputs


class SolvedLayer(NamedTuple):
    """A linear layer that is solved as a whole, and how its matrix is stored."""

    transposed: bool
    """The weight is stored as (in, out)."""
    bias: str | None
    """The bias that the curvature includes."""

    def parts(self, name: str) -> list[str]:
        """Return the tensors of the layer whose weight has this name."""
        return [name] if self.bias is None else [name, self.bias]


SolvedLayers = dict[str, SolvedLayer]
"""Weight → its layer, for layers that are solved as a whole."""


def match_curvature(
    inputs: Inputs,
    rule: Rule,
    names: Sequence[str],
    *,
    missing: str,
    penalty_is_recorded: bool,
    for_comparison: bool,
) -> tuple[SolvedLayers, list[str]]:
    """Return the layers that are solved as a whole, and all problems of the curvature.

    With ``for_comparison``, the curvature need not suit the recipe's rule. What a recorded penalty lacks counts as 0.
    """
    if "grams" in rule.inputs and not for_comparison:
        return _gram_layers(inputs, rule, names)
    _use_tied_curvature(inputs, names)
    layers, problems = _kronecker_layers(inputs, None if for_comparison else rule, names)
    for source in inputs.curvatures:
        recorded = penalty_is_recorded and source in inputs.penalty
        problems += _diagonal_problems(source, inputs, names, "zero" if recorded else missing)
    return layers, problems


def layer_option_problems(
    options: Mapping[str, Any], inputs: Inputs, layers: SolvedLayers, write_curvature: bool = False
) -> list[str]:
    """Return settings that do not work with Kronecker curvature."""
    problems = []
    if write_curvature:
        problems.append(
            "output.curvature: with Kronecker curvature H̄ is a sum of Kronecker products, which no file stores. "
            "Remove it, and estimate the curvature of the merged model instead"
        )
    if options.get("base_saw_removed"):
        problems.append(
            "options.base_saw_removed: a Kronecker product minus others is not a curvature. Estimate that of the base "
            "on the retain set, or use diagonals"
        )
    if options.get("cap", NONE) != NONE:
        problems.append(
            "options.cap: limits the step of single entries, which Kronecker curvature does not have. Use `damping`, "
            "and remove cap"
        )
    of = inputs.settings.of
    split = [weight for weight, layer in layers.items() if layer.bias is not None and of(weight) != of(layer.bias)]
    if split:
        problems.append(
            f"weight: filters give {split[0]} and its bias different values, but Kronecker curvature holds them "
            "together. Make the filters match both, or use diagonals"
        )
    return problems


def _use_tied_curvature(inputs: Inputs, names: Sequence[str]) -> None:
    """Use the curvature of an embedding for a tied head that a curvature file lacks.

    The template stores both tensors, with the same values.
    """
    template, stored = inputs.template, [(c, c.shapes) for c in inputs.curvatures if c.shapes is not None]
    lacking = {name for _, shapes in stored for name in names if name not in shapes}
    pairs = ((name, tied_to(name, template)) for name in lacking)
    ties = {name: tied for name, tied in pairs if tied is not None and same_values(template, name, tied)}
    for source, shapes in stored:
        fits = {name: shapes.get(tied) == template.tensors[name].shape for name, tied in ties.items()}
        source.aliases = {name: tied for name, tied in ties.items() if fits[name] and name not in shapes}


def _diagonal_problems(source: CurvatureInput, inputs: Inputs, names: Sequence[str], missing: str) -> list[str]:
    """Return what is wrong with the diagonals of a source."""
    shapes, tensors = source.shapes, inputs.template.tensors
    if shapes is None:
        return []
    if source.kind == "gram":
        return [f"{source.label}: holds gram matrices, where a diagonal is needed"]
    problems = []
    misfits = [n for n in names if n in shapes and shapes[n] != tensors[n].shape]
    if misfits:
        wrong = [f"{n}: {list(shapes[n])}, but the weight is {list(tensors[n].shape)}" for n in misfits]
        problems.append(f"{source.label}: curvature of another model, its shapes do not match\n{listed(wrong)}")
    layers = {name: _layer_of(source, name, inputs.template) for name in source.tokens}
    in_factors = {part for name, layer in layers.items() for part in (layer.parts(name) if layer else [name])}
    absent = [n for n in names if n not in in_factors and source.aliases.get(n, n) not in shapes]
    if absent and len(absent) == len(names):
        problems.append(
            f"{source.label}: curvature of another model: it has none of the tensors to merge\n{listed(absent, 3)}"
        )
    elif absent and missing != "zero":
        problems.append(
            f"{source.label}: no curvature for {len(absent)} of {len(names)} tensors\n{listed(absent)}\n"
            "  Exclude them, or set `missing: zero` to use 0."
        )
    return problems


def _gram_layers(inputs: Inputs, rule: Rule, names: Sequence[str]) -> tuple[SolvedLayers, list[str]]:
    """Return the weights for which every model has a Gram matrix, and what is wrong with the others."""
    layers: SolvedLayers = {}
    sources = inputs.curvature
    problems = [
        f"{source.label}: {rule.name} needs Gram matrices (XᵀX of the inputs of linear layers), not a diagonal"
        for source in sources
        if source.shapes is None or (source.file is not None and source.kind != "gram")
    ]
    if problems:
        return layers, problems
    shapes = [source.shapes or {} for source in sources]
    for name in names:
        shape = inputs.template.tensors[name].shape
        grams = [some[name] for some in shapes if name in some]
        if not grams:
            continue
        size = grams[0][0] if grams[0] else 0
        if len(grams) < len(shapes):
            problems.append(f"{name}: some models have a Gram matrix for it and some do not")
        elif len(shape) != 2 or size not in shape or any(gram != (size, size) for gram in grams):
            problems.append(f"{name}: its Gram matrices {list(map(list, grams))} do not match the weight {list(shape)}")
        else:
            # The size of its Gram matrix tells how a weight is stored; if the weight is square, its file does.
            is_square = shape[0] == shape[1]
            layers[name] = SolvedLayer(name in sources[0].transposed if is_square else size == shape[0], None)
    if not layers and not problems:
        problems.append(f"{sources[0].label}: has no Gram matrix for any tensor to merge; is it of another model?")
    return layers, problems


def _kronecker_layers(inputs: Inputs, rule: Rule | None, names: Sequence[str]) -> tuple[SolvedLayers, list[str]]:
    """Return the layers with Kronecker factors among the tensors to merge, and what is wrong with the factors."""
    sources = [source for source in inputs.curvatures if source.tokens]
    if not sources:
        return {}, []
    if rule is not None and rule.layers is None:
        supported = [name for name, other in METHODS.items() if other.layers is not None]
        why = f"which {rule.name} does not support; {some(supported)} do. Estimate it with kind=diagonal"
        return {}, [f"{source.label}: holds Kronecker factors, {why}" for source in sources]
    problems = [
        f"{sources[0].label}: holds Kronecker factors, but {source.label} a diagonal; models of one recipe have "
        "curvature of one kind. Estimate all of them with kind=kronecker, or all with kind=diagonal"
        for source in inputs.curvature
        if source.kind not in ("kronecker", "constant")
    ]
    merged, layers, tensors = set(names), SolvedLayers(), inputs.template.tensors
    for source in sources:
        wrong: list[str] = []
        for name in source.tokens:
            layer = _layer_of(source, name, inputs.template)
            parts = [name] if layer is None else layer.parts(name)
            if merged.isdisjoint(parts):
                continue
            if layer is None:
                factors = " and ".join(str(list((source.shapes or {})[name + part])) for part in (OUTPUTS, INPUTS))
                wrong.append(f"{name}: factors {factors}, but the weight is {list(tensors[name].shape)}")
            elif not merged.issuperset(parts):
                problems.append(
                    f"{source.label}: only one of {name} and {layer.bias} is merged, and Kronecker curvature holds the "
                    "weight and bias of a layer together: include both or exclude both"
                )
            elif layers.setdefault(name, layer) != layer:
                problems.append(f"{source.label}: {name} has factors of another shape than in the other files")
        if wrong:
            problems.append(f"{source.label}: curvature of another model, its factors do not match\n{listed(wrong)}")
    return layers, problems


def _layer_of(source: CurvatureInput, name: str, template: Checkpoint) -> SolvedLayer | None:
    """Return the layer of a weight with Kronecker factors; None if they do not fit the weight."""
    info = template.tensors.get(name)
    if info is None or source.shapes is None:
        return None
    first = info.shape[0] if info.shape else 0
    outputs, inputs = first, info.numel // max(1, first)  # a convolution's kernel counts as inputs
    transposed = name in source.transposed
    if transposed:
        outputs, inputs = inputs, outputs
    sides = source.shapes[name + OUTPUTS], source.shapes[name + INPUTS]
    if sides == ((outputs, outputs), (inputs, inputs)):
        return SolvedLayer(transposed, None)
    bias = name.removesuffix("weight") + "bias"
    has_bias = bias in template.tensors and template.tensors[bias].shape == (outputs,)
    fits = sides == ((outputs, outputs), (inputs + 1, inputs + 1))
    return SolvedLayer(transposed, bias) if fits and has_bias else None
