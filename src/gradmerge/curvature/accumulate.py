"""Add up Σ_i g_i² of every parameter, from one forward and one backward pass per batch.

The gradient of a linear layer's weight for example i is g_i = Σ_t y_it x_itᵀ, with the layer's input x_it at token t
and the gradient y_it of its output. One backward pass over a batch computes x and y of all examples, but autograd
would add up all g_i before anyone can square them. So hooks on the layers capture x and y, and kernels compute
Σ_i (Σ_t y_it x_itᵀ)² from them. One batch passes through these files:

1. `estimate.py` calls :meth:`Accumulator.add`.
2. The model runs. The hooks of each layer (`hooks.py`) capture x. Parameters whose formula does not fit this batch
   become slow.
3. The backward pass passes y to the layer's formula (`per_example_gradients.py`), which computes a term of the gradient
   and calls :meth:`Accumulator.add_term`.
4. A parameter's only term is squared and added at once (`kernels.py`), or added to Kronecker factors (`kfac.py`). Small
   terms, and several terms of one parameter, wait for the end of the pass.
5. Parameters that no formula fits follow by autograd, one example at a time ("slow" parameters).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..text import listed
from .batches import enough_memory, masks_of, sees_decoder
from .checkpoint_names import for_files, stored_sources, stored_unchanged
from .curvature import Curvature, Entries, KroneckerFactors
from .hooks import Recorder
from .kernels import DirectGradient, OuterGradient, Term, add_many_direct, add_squares, sum_type
from .kfac import BatchInputs, KroneckerSums
from .losses import logits_of
from .offload import StoredSum
from .parameter_sum import ParameterSum, differentiable, for_each_example
from .per_example_gradients import is_conv1d
from .verify import Formulas, warn_slow

Objectives = Callable[[Any, int], list[Callable[[], Tensor]]]
"""(batch, index of its first example) → one function per backward pass, which returns the sum to differentiate."""

#: A term with at most this many elements, over all examples of a batch, waits to be added together with others.
_SMALL = 1 << 20


class Accumulator(Recorder):
    """Adds up Σ_i g_i² of a model's parameters, or the factors of its layers, batch by batch.

    ``max_kronecker_dim`` is the largest layer with Kronecker factors; None for diagonals only.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        formulas: Formulas,
        objectives: Objectives,
        accumulate_on: str = "device",
        max_kronecker_dim: int | None = None,
    ) -> None:
        super().__init__(model, {p: ParameterSum(p, accumulate_on) for p in parameters.values()})
        for parameter in formulas.slow:
            self.sums[parameter].slow = True
        self._model, self._objectives, self._kinds = model, objectives, formulas.kinds
        self._parameters, self._accumulate_on = parameters, accumulate_on
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._kind = "diagonal" if max_kronecker_dim is None else "kronecker"
        self._to_files: Callable[[Any], Entries] | None = for_files(model)
        self._notes: list[str] = []
        self._inputs = BatchInputs({})
        self._first_pass = True
        if max_kronecker_dim is not None:
            self._make_factors(max_kronecker_dim)
        self.attach(formulas.attached(self.sums))

    def _make_factors(self, max_kronecker_dim: int) -> None:
        """Give layers Kronecker factors, if the two verified examples use their matrix in one product."""
        stored = stored_unchanged(self._model)
        layers, wide = kronecker_layers(self._model, self._parameters.values(), stored, max_kronecker_dim)
        holders = [p for module in self._model.modules() for p in module._parameters.values()]
        for parameter, (name, module) in layers.items():
            if self._kinds.get(parameter) == [OuterGradient] and not self.sums[parameter].slow:
                bias, entry = module._parameters.get("bias"), self.sums[parameter]
                if bias is not None and bias in self.sums and sum(other is bias for other in holders) == 1:
                    self.sums[bias].weight = entry
                else:
                    bias = None
                entry.factors = KroneckerSums(name, parameter, bias, is_conv1d(module), self._accumulate_on)
        if wide:
            self._notes.append(
                f"layers with more than {max_kronecker_dim:,} inputs or outputs have a diagonal:\n{listed(wide)}"
            )
        if unused := [name for p, (name, _) in layers.items() if p not in self._kinds and not self.sums[p].slow]:
            self._notes.append(f"no gradient reaches these layers, which have a diagonal:\n{listed(unused)}")
        convert = self._to_files

        def to_files(entries: Entries) -> Entries:
            factors = {stored[name]: entry for name, entry in entries.items() if isinstance(entry, KroneckerFactors)}
            diagonal = {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}
            return {**factors, **(convert(diagonal) if convert is not None else diagonal)}

        self._to_files = to_files

    def curvature(self, examples: int, likelihood: str) -> Curvature:
        """Return the sums so far. Their tensors change with the next batch."""
        entries: dict[str, Tensor | KroneckerFactors] = {}
        for name, parameter in self._parameters.items():
            entry = self.sums[parameter]
            if entry.weight is None:
                entries[name] = entry.stored.value if entry.factors is None else entry.factors.result()
        name = _name_of(self._model) or type(self._model).__name__
        return Curvature(entries, examples, likelihood, name, kind=self._kind, stored=self._to_files, notes=self._notes)

    def add(self, batch: Any, first: int) -> None:
        """Add the squares of every example of a batch; ``first`` is the index of its first example."""
        with enough_memory():
            if not all(entry.slow for entry in self.sums.values()):
                self._add_by_formulas(batch, first)
            if slow := [entry for entry in self.sums.values() if entry.slow]:
                objectives = lambda example, row: self._objectives(example, first + row)  # noqa: E731
                for_each_example(batch, objectives, slow, ParameterSum.add_gradient)

    def _add_by_formulas(self, batch: Any, first: int) -> None:
        """Run the model, and each backward pass; the hooks call :meth:`add_term`."""
        fast = [entry.parameter for entry in self.sums.values() if not entry.slow]
        has_factors = any(entry.factors is not None for entry in self.sums.values())
        self._inputs = BatchInputs(masks_of(self._model, batch) if has_factors else {})
        with self.recording(batch), differentiable(fast):
            objectives = self._objectives(batch, first)
            for number, make_objective in enumerate(objectives):
                objective, self._first_pass = make_objective(), number == 0
                if self._first_pass:
                    self._make_slow({entry for formula in self.check_shapes() for entry in formula.sums.values()})
                if objective.requires_grad:  # otherwise no parameter with a formula is used
                    objective.backward(retain_graph=number + 1 < len(objectives))
                self._end_pass()
            # Formulas hide parameters in their modules, so a gradient that reached one is of a use elsewhere.
            if outside := [self._names[p] for p in fast if p.grad is not None and not self.sums[p].slow]:
                raise InputError(
                    f"the batch that begins with example {first} uses parameters outside of their module, unlike the "
                    f"first examples:\n{listed(outside)}\n  Freeze them (requires_grad_(False))."
                )
        self._inputs = BatchInputs({})

    def needs_term(self, entry: ParameterSum) -> bool:
        return entry.weight is None

    def add_term(self, entry: ParameterSum, term: Term) -> None:
        if not entry.slow and not self._kinds.get(entry.parameter):
            self._make_slow({entry})  # no gradient reached it when formulas were verified
        if entry.slow:
            return
        if entry.factors is not None and isinstance(term, OuterGradient):
            entry.factors.add(term, self._inputs, inputs=self._first_pass)
        elif len(entry.uses) == 1 and not _is_small(term):
            entry.stored.add(lambda total: add_squares(total, [term]))
        elif isinstance(term, OuterGradient) and entry.is_tied_table:
            entry.add_head(term)
        else:
            entry.terms.append(term)

    def _end_pass(self) -> None:
        """Add the squares of the terms that waited for the end of a backward pass."""
        small: dict[Any, list[ParameterSum]] = {}
        for entry in self.sums.values():
            if entry.terms and self._accumulate_on == "device" and all(map(_is_small, entry.terms)):
                small.setdefault((entry.dtype, entry.parameter.device), []).append(entry)
            elif entry.terms:
                entry.add_terms()
        for group in small.values():
            add_many_direct([entry.stored.value for entry in group], [entry.terms for entry in group])  # type: ignore[misc]
        for entry in self.sums.values():
            entry.end_pass()

    def _make_slow(self, unfit: set[ParameterSum]) -> None:
        """Make parameters slow from this batch on, which has added nothing to them yet."""
        unfit = {entry for entry in unfit if not entry.slow}
        for entry in self.sums.values():
            if entry.factors is not None and (entry in unfit or entry.uses not in ([], [OuterGradient])):
                raise InputError(
                    f"{self._names[entry.parameter]}: this batch does not use the layer once per example, as the first "
                    "examples do, so it has no Kronecker factors. Freeze it (requires_grad_(False)), or estimate a "
                    "diagonal."
                )
        if unfit:
            warn_slow(self._names[entry.parameter] for entry in unfit)
        for entry in unfit:
            entry.slow = True


def kronecker_layers(
    model: nn.Module, parameters: Collection[nn.Parameter], stored: Collection[str], max_kronecker_dim: int
) -> tuple[dict[nn.Parameter, tuple[str, nn.Module]], list[str]]:
    """Return the weights that may have Kronecker factors, with their names and modules; and names of too wide ones.

    These are weights of linear layers and convolutions that only one module uses, and that a checkpoint stores
    unchanged: its name is in ``stored``.
    """
    uses: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append((f"{path}.{name}".lstrip("."), module))
    layers, wide = {}, []
    for parameter in parameters:
        name, module = uses[parameter][0]
        linear = isinstance(module, nn.Linear) or is_conv1d(module)
        convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
        is_weight = len(uses[parameter]) == 1 and name in stored and module._parameters.get("weight") is parameter
        if not is_weight or not (linear or convolution):
            continue
        if max(parameter.shape[0], parameter.shape[1:].numel()) > max_kronecker_dim:
            wide.append(name)
        else:
            layers[parameter] = name, module
    return layers, wide


def _is_small(term: Term) -> bool:
    return isinstance(term, DirectGradient) and term.gradient.numel() <= _SMALL


def _name_of(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", ""))


class GramAccumulator:
    """Adds up XᵀX of the inputs of every linear layer, without padding. A head tied to an embedding is left out."""

    def __init__(self, model: nn.Module, accumulate_on: str = "device") -> None:
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        self._model = model
        self._layers: dict[str, nn.Module] = {}
        self._sums: dict[str, StoredSum] = {}
        self._masks: dict[bool, Tensor | None] = {}
        self._hooks = contextlib.ExitStack()
        for path, module in model.named_modules():
            if not (isinstance(module, nn.Linear) or is_conv1d(module)) or id(module.weight) in tables:
                continue
            name, weight = f"{path}.weight".lstrip("."), module.weight
            width = weight.shape[0] if is_conv1d(module) else weight.shape[1]
            self._layers[name] = module
            self._sums[name] = StoredSum((width, width), sum_type(weight), weight.device, accumulate_on)
            hook = functools.partial(self._add_input, self._sums[name], sees_decoder(name))
            self._hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if not self._layers:
            raise InputError("the model has no linear layer: there is no Gram matrix to estimate")

    def __enter__(self) -> GramAccumulator:
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def add(self, batch: Any, first: int) -> None:
        """Run the model on a batch; the hooks add the inputs of its layers."""
        self._masks = masks_of(self._model, batch)
        with enough_memory(), torch.no_grad():
            logits_of(self._model, batch)

    def _add_input(
        self, total: StoredSum, decoder: bool, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        x: Tensor = next(iter((*args, *kwargs.values()))).detach()
        mask = self._masks.get(decoder)
        folded = x.dim() == 2 and mask is not None and mask.numel() == len(x)
        if mask is not None and (mask.shape == x.shape[:-1] or folded):
            x = x[mask.to(x.device).bool().reshape(x.shape[:-1])]
        x = x.reshape(-1, x.shape[-1]).to(total.value.dtype)
        total.add(lambda value: value.addmm_(x.T, x))

    def curvature(self, examples: int, likelihood: str) -> Curvature:
        """Return the sums so far, with the names of the model's files."""
        order = {source: number for number, source in enumerate(self._layers)}
        named = [(stored, source) for stored, source in stored_sources(self._model).items() if source in order]
        named.sort(key=lambda pair: order[pair[1]])
        sums = {stored: self._sums[source].value for stored, source in named}
        transposed = [stored for stored, source in named if is_conv1d(self._layers[source])]
        return Curvature(sums, examples, "", _name_of(self._model), kind="gram", transposed=transposed)
