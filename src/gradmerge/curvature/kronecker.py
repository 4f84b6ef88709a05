"""Kronecker curvature: of every linear layer two factors, of every other parameter the diagonal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError
from .curvature import SHARD_SIZE, NamedSums, write_sums
from .factors import KroneckerSums
from .files import metadata, open_curvature
from .formulas import is_conv1d
from .stored_names import for_files, stored_shapes, stored_sources
from .sums import ParameterSum

#: Suffixes of a weight's factors in files.
INPUTS, OUTPUTS = ".A", ".G"
#: Layers with more inputs or outputs get a diagonal: their factors would be larger than the layer.
WIDEST = 16384


class LayerFactors(NamedTuple):
    """The curvature G ⊗ A / T of one layer's [W b]."""

    inputs: Tensor
    """A = Σ x̃x̃ᵀ over tokens, x̃ = [x; 1]: (in + 1, in + 1), or (in, in) for a layer without bias."""
    outputs: Tensor
    """G = Σ yyᵀ over tokens, y the gradient of the loss with respect to the output: (out, out)."""
    tokens: int
    """T, how many tokens were added up; padding does not count."""


class KroneckerCurvature(NamedSums):
    """The curvature of one model on one data set, with two factors per linear layer or convolution.

    A mapping from names to **sums** over examples, as its file has them: ``NAME.A`` and ``NAME.G`` of a weight NAME
    (the layer's bias is part of A), and under a parameter's own name the diagonal where there are no factors.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerFactors],
        diagonal: Mapping[str, Tensor],
        examples: int,
        likelihood: str = "sampled",
        model: str = "",
        transposed: Iterable[str] = (),
        stored: Callable[[KroneckerCurvature], KroneckerCurvature] | None = None,
    ) -> None:
        sums: dict[str, Tensor] = {}
        for name, layer in layers.items():
            sums |= {name + INPUTS: layer.inputs, name + OUTPUTS: layer.outputs}
        super().__init__({**sums, **diagonal}, examples, model)
        self.layers = dict(layers)
        self.diagonal = dict(diagonal)
        self.likelihood = likelihood
        self.transposed = frozenset(transposed)
        """Weights whose first axis is the input's, as of GPT-2's Conv1D."""
        self._stored = stored

    def __repr__(self) -> str:
        parts = f"{len(self.layers)} layers, {len(self.diagonal)} diagonals"
        return f"KroneckerCurvature({parts}, {self.examples} examples, {self.likelihood})"

    def write(self, folder: Path, precision: str = "float32", shard_size: int = SHARD_SIZE) -> None:
        """Write the files into a folder that is there; ``precision`` is ``float32``, the only one of factors."""
        if precision != "float32":
            raise InputError(f"precision {precision!r}: Kronecker factors are stored as float32 only")
        named = self._stored(self) if self._stored is not None else self
        for name, value in named.items():
            if not bool(torch.isfinite(value).all()):
                raise InputError(f"curvature of {name} has values that are not finite; it is not saved")
        tokens = {name: layer.tokens for name, layer in named.layers.items()}
        more = {"tokens": json.dumps(tokens), "fan_in_fan_out": json.dumps(sorted(named.transposed))}
        header = metadata(self.examples, self.likelihood, self.model, kind="kronecker", **more)
        write_sums(folder, named, header, shard_size)

    @classmethod
    def load(cls, path: str | Path) -> KroneckerCurvature:
        """Read a curvature folder or file of this kind whole."""
        with open_curvature(str(path)) as file:
            if file.kind != "kronecker":
                raise InputError(f"{path}: holds {file.kind} curvature, not Kronecker factors")
            parts = {name + suffix for name in file.tokens for suffix in (INPUTS, OUTPUTS)}
            layers = {
                name: LayerFactors(file.read_whole(name + INPUTS), file.read_whole(name + OUTPUTS), tokens)
                for name, tokens in file.tokens.items()
            }
            diagonal = {name: file.read_whole(name) for name in file.shapes if name not in parts}
            model = file.metadata.get("model", "")
            return cls(layers, diagonal, file.examples, file.likelihood, model, file.transposed)


def factors_for(
    model: nn.Module, parameters: Collection[nn.Parameter], widest: int = WIDEST
) -> dict[nn.Parameter, KroneckerSums]:
    """Empty factors for the weight of every linear layer and convolution that one module alone holds, if narrow enough.

    And that files hold as it is: a weight that is stored together with others, or in parts, has a diagonal.
    """
    uses: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((f"{path}.{name}".lstrip("."), module))
    stored, known = _stored_alone(model), set(parameters)
    found = {}
    for parameter in parameters:
        (name, module), *others = uses[parameter]
        turned = is_conv1d(module)
        linear = isinstance(module, nn.Linear) or turned
        convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
        if others or name not in stored or module._parameters.get("weight") is not parameter:
            continue
        if (linear or convolution) and max(parameter.shape[0], parameter[0].numel()) < widest:
            bias = module._parameters.get("bias")
            found[parameter] = KroneckerSums(name, parameter, bias if bias in known else None, turned)
    return found


def kronecker_of(
    model: nn.Module, sums: Mapping[str, ParameterSum], examples: int, likelihood: str, name: str
) -> KroneckerCurvature:
    """What was added up, by the names of ``model.named_parameters()``."""
    factors = {name: one.factors for name, one in sums.items() if one.has_factors and one.factors is not None}
    inside = {one.bias for one in factors.values()}
    layers = {name: LayerFactors(one.inputs, one.outputs, one.tokens) for name, one in factors.items()}
    rest = {key: one for key, one in sums.items() if key not in factors and one.parameter not in inside}
    diagonal = {key: one.total for key, one in rest.items()}
    turned = [key for key, one in factors.items() if one.turned]
    files, convert = _stored_alone(model), for_files(model)

    def stored(curvature: KroneckerCurvature) -> KroneckerCurvature:
        return KroneckerCurvature(
            {files[key]: layer for key, layer in curvature.layers.items()},
            convert(curvature.diagonal) if convert is not None else curvature.diagonal,
            curvature.examples,
            curvature.likelihood,
            curvature.model,
            [files[key] for key in curvature.transposed],
        )

    return KroneckerCurvature(layers, diagonal, examples, likelihood, name, turned, stored)


def _stored_alone(model: nn.Module) -> dict[str, str]:
    """Name in memory → name in a checkpoint, of parameters that are one tensor of the same shape there."""
    shapes, sources = stored_shapes(model), stored_sources(model)
    parts = Counter(sources.values())
    own = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {source: file for file, source in sources.items() if parts[source] == 1 and shapes[file] == own[source]}
