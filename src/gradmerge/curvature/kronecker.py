"""Kronecker curvature: of every linear layer two factors, of every other parameter the diagonal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from ..arguments import checked
from ..display import View
from ..errors import InputError
from .checkpoint_names import for_files, stored_shapes, stored_sources
from .curvature import SHARD_SIZE, NamedSums, require_finite, write_sums
from .format import INPUTS, OUTPUTS, metadata, open_curvature
from .kfac import KroneckerSums
from .parameter_sum import ParameterSum
from .per_example_gradients import is_conv1d
from .sum_storage import SumStorage

#: Layers with more inputs or outputs get a diagonal: their factors would be of a gigabyte or more each.
MAX_KRONECKER_DIM = 16384


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

    Args:
        layers: Name of a weight → its :class:`LayerFactors`.
        diagonal: Name of any other parameter → Σ_i [∇ℓ_i]².
        examples, likelihood, model: As of :class:`Curvature`.
        transposed: Weights whose first axis is the input's, as of GPT-2's Conv1D.
        wide: Weights of layers that have a diagonal because they are wider than they were allowed to be.
        stored: Turns names in memory into those of the model's files when the curvature is saved.
    """

    def __init__(
        self,
        layers: Mapping[str, LayerFactors],
        diagonal: Mapping[str, Tensor],
        examples: int,
        likelihood: str = "empirical",
        model: str = "",
        transposed: Iterable[str] = (),
        wide: Iterable[str] = (),
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
        self.wide = tuple(wide)
        self._stored = stored

    def _line(self) -> list[str]:
        parts = [f"{len(self.layers)} layers", f"{len(self.diagonal)} diagonals"]
        return [*parts, f"{self.examples} examples", self.likelihood]

    def _view(self) -> View:
        columns = ["layer", "tokens", "inputs", "trace of A/T", "outputs", "trace of G (sum over examples)"]
        rows = [
            [name, tokens, len(a), float(a.trace()) / tokens, len(g), float(g.trace())]
            for name, (a, g, tokens) in self.layers.items()
        ]
        return columns, rows, ()

    def set_tokens(self, tokens: Mapping[str, int]) -> None:
        """Replace T of layers."""
        self.layers |= {name: self.layers[name]._replace(tokens=count) for name, count in tokens.items()}

    def write(self, folder: Path, precision: str = "float32", shard_size: int = SHARD_SIZE) -> None:
        """Write the files into a folder that is there; ``precision`` is ``float32``, the only one of factors."""
        if precision != "float32":
            raise InputError(f"precision {precision!r}: Kronecker factors are stored as float32 only")
        named = self._stored(self) if self._stored is not None else self
        require_finite(named)
        write_sums(folder, named, named.header(), shard_size)

    def header(self) -> Mapping[str, str]:
        """The header metadata of its file."""
        tokens = {name: layer.tokens for name, layer in self.layers.items()}
        more = {"tokens": json.dumps(tokens), "fan_in_fan_out": json.dumps(sorted(self.transposed))}
        return metadata(self.examples, self.likelihood, self.model, kind="kronecker", **more)

    @classmethod
    @checked()
    def load(cls, path: str | Path) -> KroneckerCurvature:
        """Read a curvature folder or file of kind `kronecker` whole.

        Args:
            path: The folder or file.

        Returns:
            The factors and diagonals, as sums over examples.

        >>> KroneckerCurvature.load("./yelp/kronecker").layers["classifier.weight"].tokens  # doctest: +SKIP
        560000
        """
        with open_curvature(str(path)) as file:
            if file.kind != "kronecker":
                raise InputError(f"{path}: holds {file.holds}, where Kronecker factors are needed (--kind kronecker)")
            parts = {name + suffix for name in file.tokens for suffix in (INPUTS, OUTPUTS)}
            layers = {
                name: LayerFactors(file.read_whole(name + INPUTS), file.read_whole(name + OUTPUTS), tokens)
                for name, tokens in file.tokens.items()
            }
            diagonal = {name: file.read_whole(name) for name in file.shapes if name not in parts}
            model = file.metadata.get("model", "")
            return cls(layers, diagonal, file.examples, file.likelihood, model, file.transposed)


def factors_for(
    model: nn.Module,
    parameters: Collection[nn.Parameter],
    stored: Collection[str],
    max_kronecker_dim: int = MAX_KRONECKER_DIM,
    storage: SumStorage | None = None,
) -> tuple[dict[nn.Parameter, KroneckerSums], list[str]]:
    """Empty factors for the weight of every linear layer and convolution that one module alone holds.

    And that files hold as it is, as of those in ``stored``: a weight that is stored together with others, or in parts,
    has a diagonal. So have layers that are too wide, whose names come second.
    """
    uses: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((f"{path}.{name}".lstrip("."), module))
    known = {parameter for parameter in parameters if len(uses[parameter]) == 1}
    found, wide = {}, []
    for parameter in parameters:
        name, module = uses[parameter][0]
        transposed = is_conv1d(module)
        linear = isinstance(module, nn.Linear) or transposed
        convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
        own = parameter in known and name in stored and module._parameters.get("weight") is parameter
        if not own or not (linear or convolution):
            continue
        if max(parameter.shape[0], parameter.shape[1:].numel()) > max_kronecker_dim:
            wide.append(name)
            continue
        bias = module._parameters.get("bias")
        found[parameter] = KroneckerSums(name, parameter, bias if bias in known else None, transposed, storage)
    return found, wide


def kronecker_of(
    sums: Mapping[str, ParameterSum],
    examples: int,
    likelihood: str,
    model: str,
    wide: Iterable[str],
    stored: Callable[[KroneckerCurvature], KroneckerCurvature],
) -> KroneckerCurvature:
    """Return the sums as Kronecker curvature, by the names of ``model.named_parameters()``."""
    factors = {name: one.factors for name, one in sums.items() if one.has_factors and one.factors is not None}
    layers = {name: LayerFactors(one.inputs, one.outputs, one.tokens) for name, one in factors.items()}
    biases = {one.bias for one in factors.values()}
    diagonal = {n: one.total for n, one in sums.items() if n not in factors and one.parameter not in biases}
    transposed = [name for name, one in factors.items() if one.transposed]
    return KroneckerCurvature(layers, diagonal, examples, likelihood, model, transposed, wide, stored)


def for_kronecker_files(
    model: nn.Module, alone: Mapping[str, str]
) -> Callable[[KroneckerCurvature], KroneckerCurvature]:
    """What turns names in memory into names in files; ``alone`` is as of :func:`stored_alone`."""
    convert = for_files(model)

    def stored(curvature: KroneckerCurvature) -> KroneckerCurvature:
        return KroneckerCurvature(
            {alone[key]: layer for key, layer in curvature.layers.items()},
            convert(curvature.diagonal) if convert is not None else curvature.diagonal,
            curvature.examples,
            curvature.likelihood,
            curvature.model,
            [alone[key] for key in curvature.transposed],
        )

    return stored


def stored_alone(model: nn.Module) -> dict[str, str]:
    """Name in memory → name in a checkpoint, of parameters that are one tensor of the same shape there."""
    shapes, sources = stored_shapes(model), stored_sources(model)
    parts = Counter(sources.values())
    own = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {source: file for file, source in sources.items() if parts[source] == 1 and shapes[file] == own[source]}
