"""Estimate curvature: one pass over the data that adds up squared gradients of single examples.

The gradient of a linear layer's weight for example i is g_i = Σ_t y_it x_itᵀ, with the layer's input x_it at token t
and the gradient y_it of its output. One backward pass over a batch computes x and y of all examples, but autograd
would add up all g_i before anyone can square them. So hooks on the layers capture x and y, and kernels compute
Σ_i (Σ_t y_it x_itᵀ)² from them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..arguments import check_known
from ..errors import InputError
from ..text import listed
from .batches import enough_memory, examples_in, indexed, masks_of, moved, sees_decoder
from .checkpoint_names import for_files, stored_sources, stored_unchanged
from .curvature import Curvature, Entries, Entry, KroneckerFactors
from .format import KINDS
from .hooks import ParameterSum, Recorder, differentiable, for_each_example, gradient_handlers
from .kernels import (
    MAX_KRONECKER_DIM,
    BatchInputs,
    DirectGradient,
    KroneckerSums,
    OuterGradient,
    Term,
    add_many_direct,
    sum_type,
)
from .losses import BatchLosses, ExampleLoss, logits_of
from .offload import StoredSum, input_device, reachable
from .per_example_gradients import has_fused_experts, is_conv1d
from .verify import Formulas, choose_formulas, warn_slow

LIKELIHOODS = ("empirical", "sampled", "exact")
#: A term with at most this many elements, over all examples of a batch, waits to be added together with others.
_SMALL = 1 << 20


def estimate_curvature(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: str = "empirical",
    *,
    kind: str = "diagonal",
    output: str | ExampleLoss | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    each_batch: Callable[[Callable[[], Curvature]], None] | None = None,
    verify_on: Any = None,
    max_kronecker_dim: int = MAX_KRONECKER_DIM,
    accumulate_on: str = "device",
) -> Curvature:
    """Return Σ_i [∇ℓ_i(θ)]² over the examples of ``batches``; see :func:`gradmerge.estimate_curvature`.

    ``each_batch`` is called after every batch with a function that returns the curvature so far, whose tensors change
    with the next batch. Formulas are verified on the first two examples of ``verify_on``, or else of the first batch.
    With ``verify_on``, no batches give sums of zeros.
    """
    check_known(f"likelihood {likelihood!r}", likelihood, LIKELIHOODS)
    check_known(f"kind {kind!r}", kind, KINDS)
    with reachable(model):
        device = torch.device(device) if device is not None else input_device(model)
        parameters = {} if kind == "gram" else trainable(model)
        losses, examples = BatchLosses(model, likelihood, output, seed), 0
        rows = _batches_with_examples(batches, device)
        if verify_on is None:
            first = next(rows, None)
            if first is None:
                raise InputError("there are no examples to estimate curvature on")
            verify_on, rows = first[1], itertools.chain([first], rows)
        with prepared(model):
            sums: Accumulator | GramAccumulator
            if kind == "gram":
                sums = GramAccumulator(model, accumulate_on)
            else:
                formulas = choose_formulas(model, parameters.values(), moved(verify_on, device), losses.logits)
                max_dim = max_kronecker_dim if kind == "kronecker" else None
                sums = Accumulator(model, parameters, formulas, losses, accumulate_on, max_dim)

            def so_far() -> Curvature:
                losses.check()
                return sums.curvature(max(1, examples), likelihood)

            with sums.hooks():
                for first_row, batch in rows:
                    sums.add(batch, first_row)
                    examples += examples_in(batch)
                    if each_batch is not None:
                        each_batch(so_far)
            return so_far()


def estimate_gradient(
    model: nn.Module, batches: Iterable[Any], *, output: str | ExampleLoss | None = None
) -> dict[str, Tensor]:
    """Return Σ_i ∇ℓ_i(θ) over the examples of ``batches``, by parameter name.

    ℓ_i is the negative log-likelihood of example i with the data's label; for a sequence it is the sum over its tokens.
    Sums are float32, or float64 if the model is float64.
    """
    parameters, losses = trainable(model), BatchLosses(model, "empirical", output, 0)
    sums = {name: torch.zeros_like(p, dtype=sum_type(p), requires_grad=False) for name, p in parameters.items()}
    with prepared(model), gradient_handlers({p: sums[name].add_ for name, p in parameters.items()}):
        for row, batch in _batches_with_examples(batches, input_device(model)):
            total = losses.objectives(batch, row)[0]()
            if total.requires_grad:
                total.backward()
            losses.check()
    for name, value in sums.items():
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"the gradient of {name} has values that are not finite. Check the model's weights")
    if not any(bool(value.any()) for value in sums.values()):
        raise InputError(
            "the gradient of every parameter is 0: there are no examples, the loss does not depend on the model's "
            "weights, or no example has a label that counts"
        )
    return sums


def _batches_with_examples(batches: Iterable[Any], device: torch.device) -> Iterator[tuple[int, Any]]:
    """Yield the index of each batch's first example, and the batch on the device."""
    return ((row, moved(batch, device)) for row, batch in indexed(batches) if examples_in(batch))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not parameters:
        raise InputError("the model has no parameter with requires_grad=True: there is nothing to estimate")
    return parameters


class Accumulator(Recorder):
    """Adds up Σ_i g_i² of a model's parameters, or the factors of its layers, batch by batch.

    ``max_kronecker_dim`` is the largest layer with Kronecker factors; None for diagonals only.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        formulas: Formulas,
        losses: BatchLosses,
        accumulate_on: str,
        max_kronecker_dim: int | None,
    ) -> None:
        super().__init__(model, {p: ParameterSum(p, accumulate_on) for p in parameters.values()})
        for parameter in formulas.slow:
            self.sums[parameter].slow = True
        self._model, self._parameters, self._formulas, self._losses = model, parameters, formulas, losses
        self._accumulate_on = accumulate_on
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._kind = "diagonal" if max_kronecker_dim is None else "kronecker"
        self._to_files: Callable[[Any], Entries] | None = for_files(model)
        self._notes: list[str] = []
        self._inputs = BatchInputs({})
        self._first_pass = True
        if max_kronecker_dim is not None:
            self._make_factors(max_kronecker_dim)

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        """Register the hooks of the formulas inside."""
        return self.attached(self._formulas.chosen)

    def _make_factors(self, max_kronecker_dim: int) -> None:
        """Give layers Kronecker factors, if the two verified examples use their matrix in one product."""
        stored, kinds = stored_unchanged(self._model), self._formulas.kinds
        layers, wide = kronecker_layers(self._model, self._parameters.values(), stored, max_kronecker_dim)
        for weight, layer in layers.items():
            entry = self.sums[weight]
            if kinds.get(weight) == [OuterGradient] and not entry.slow:
                bias = layer.bias if layer.bias in self.sums else None
                if bias is not None:
                    self.sums[bias].weight = entry
                entry.factors = KroneckerSums(layer.name, weight, bias, is_conv1d(layer.module), self._accumulate_on)
        if wide:
            self._notes.append(
                f"layers with more than {max_kronecker_dim:,} inputs or outputs have a diagonal:\n{listed(wide)}"
            )
        if unused := [layer.name for p, layer in layers.items() if p not in kinds and not self.sums[p].slow]:
            self._notes.append(f"no gradient reaches these layers, which have a diagonal:\n{listed(unused)}")
        diagonal_to_files = self._to_files

        def to_files(entries: Entries) -> Entries:
            factors = {stored[name]: entry for name, entry in entries.items() if isinstance(entry, KroneckerFactors)}
            diagonal = {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}
            return {**factors, **(diagonal_to_files(diagonal) if diagonal_to_files is not None else diagonal)}

        self._to_files = to_files

    def curvature(self, examples: int, likelihood: str) -> Curvature:
        """Return the sums so far. Their tensors change with the next batch."""
        entries: dict[str, Entry] = {}
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
                objectives = lambda example, row: self._losses.objectives(example, first + row)  # noqa: E731
                for_each_example(batch, objectives, slow, ParameterSum.add_gradient)

    def _add_by_formulas(self, batch: Any, first: int) -> None:
        """Run the model, and each backward pass; the hooks call :meth:`add_term`."""
        fast = [entry.parameter for entry in self.sums.values() if not entry.slow]
        self._inputs = BatchInputs(masks_of(self._model, batch) if self._kind == "kronecker" else {})
        with self.recording(batch), differentiable(fast):
            objectives = self._losses.objectives(batch, first)
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

    def add_term(self, entry: ParameterSum, term: Term) -> None:
        """Add the square of a parameter's gradient as soon as it is complete. Small terms wait for the others."""
        if not entry.slow and not self._formulas.kinds.get(entry.parameter):
            self._make_slow({entry})  # no gradient reached it when formulas were verified
        if entry.slow:
            return
        if isinstance(term, OuterGradient) and entry.factors is not None:
            entry.factors.add(term, self._inputs, inputs=self._first_pass)
        elif isinstance(term, OuterGradient) and entry.is_tied_table:
            entry.add_head(term)
        else:
            entry.terms.append(term)
            if len(entry.terms) == len(entry.uses) and not all(map(_is_small, entry.terms)):
                entry.add_terms(self.examples)

    def _end_pass(self) -> None:
        """Add the squares of the terms that waited for the end of a backward pass."""
        small: dict[Any, list[ParameterSum]] = {}
        for entry in self.sums.values():
            if entry.terms and self._accumulate_on == "device" and all(map(_is_small, entry.terms)):
                small.setdefault((entry.dtype, entry.parameter.device), []).append(entry)
            elif entry.terms:
                entry.add_terms(self.examples)
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


def _is_small(term: Term) -> bool:
    return isinstance(term, DirectGradient) and term.gradient.numel() <= _SMALL


def _name_of(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", ""))


class KroneckerLayer(NamedTuple):
    """A layer whose weight may have Kronecker factors."""

    name: str
    """The name of the weight."""
    module: nn.Module
    bias: nn.Parameter | None
    """Its bias, unless other modules use it too."""


def kronecker_layers(
    model: nn.Module, parameters: Collection[nn.Parameter], stored: Collection[str], max_kronecker_dim: int
) -> tuple[dict[nn.Parameter, KroneckerLayer], list[str]]:
    """Return the weights that may have Kronecker factors, with their layers; and the names of too wide ones.

    These are weights of linear layers and convolutions that only one module uses, and that a checkpoint stores
    unchanged: its name is in ``stored``.
    """
    uses = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    known, layers, wide = set(parameters), {}, []
    for path, module in model.named_modules():
        name, weight = f"{path}.weight".lstrip("."), module._parameters.get("weight")
        linear = isinstance(module, nn.Linear) or is_conv1d(module)
        convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1
        if not (linear or convolution) or weight not in known or uses[weight] > 1 or name not in stored:
            continue
        if max(weight.shape[0], weight.shape[1:].numel()) > max_kronecker_dim:
            wide.append(name)
        else:
            bias = module._parameters.get("bias")
            layers[weight] = KroneckerLayer(name, module, bias if uses[bias] == 1 else None)
    return layers, wide


class GramAccumulator:
    """Adds up XᵀX of the inputs of every linear layer, without padding. A head tied to an embedding is left out."""

    def __init__(self, model: nn.Module, accumulate_on: str) -> None:
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        self._model = model
        self._layers: dict[str, Any] = {
            f"{path}.weight".lstrip("."): module
            for path, module in model.named_modules()
            if (isinstance(module, nn.Linear) or is_conv1d(module)) and id(module.weight) not in tables
        }
        if not self._layers:
            raise InputError("the model has no linear layer: there is no Gram matrix to estimate")
        self._sums: dict[str, StoredSum] = {}
        for name, module in self._layers.items():
            width = module.weight.shape[0 if is_conv1d(module) else 1]
            dtype, device = sum_type(module.weight), module.weight.device
            self._sums[name] = StoredSum((width, width), dtype, device, accumulate_on)
        self._masks: dict[bool, Tensor | None] = {}

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Register hooks inside that add the inputs of the layers."""
        with contextlib.ExitStack() as stack:
            for name, module in self._layers.items():
                hook = functools.partial(self._add_input, self._sums[name], sees_decoder(name))
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

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
        sources = [pair for pair in stored_sources(self._model).items() if pair[1] in self._layers]
        layers = dict(sorted(sources, key=lambda pair: list(self._layers).index(pair[1])))
        sums = {stored: self._sums[name].value for stored, name in layers.items()}
        transposed = [stored for stored, name in layers.items() if is_conv1d(self._layers[name])]
        return Curvature(sums, examples, "", _name_of(self._model), kind="gram", transposed=transposed)


def expert_notes(model: nn.Module, curvature: Curvature) -> list[str]:
    """Return notes on the experts of a model: those without tokens, and weights without Kronecker factors."""
    weights, experts, idle = [], 0, 0
    for path, module in model.named_modules():
        names = [f"{path}.{name}".lstrip(".") for name, p in module._parameters.items() if p is not None]
        sums = [curvature.diagonal[name] for name in names if "expert" in name and name in curvature.diagonal]
        if sums and has_fused_experts(module):
            weights += names
            experts += len(sums[0])
            idle += int((torch.stack([value.reshape(len(value), -1).amax(1) for value in sums]).amax(0) == 0).sum())
    notes = [f"{idle} of {experts} experts received no token and have zero curvature"] if idle else []
    if weights and curvature.kind == "kronecker":
        notes.append(f"fused weights of experts have a diagonal, not Kronecker factors:\n{listed(weights)}")
    return notes


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, with no parameter that requires a gradient; restore everything at the end."""
    _check_batch_norm(model)
    with contextlib.ExitStack() as stack, torch.enable_grad():
        modes = [(module, module.training) for module in model.modules()]
        for module, training in modes:
            stack.callback(setattr, module, "training", training)
        model.eval()
        for module, _ in modes:
            if getattr(module, "gradient_checkpointing", False):
                _keep_checkpointing(module, stack)
            if getattr(module, "inplace", False) is True:
                stack.callback(setattr, module, "inplace", True)
                module.inplace = False  # type: ignore[assignment]
        for parameter in model.parameters():
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        yield


def _keep_checkpointing(module: nn.Module, stack: contextlib.ExitStack) -> None:
    """Keep gradient checkpointing, which transformers does in training mode only, without dropout.

    The caller of the layer sees it in training mode; inside, it is in eval mode. Reentrant checkpoints do not give
    gradients of single parameters, which slow parameters need.
    """
    if hasattr(module, "_gradient_checkpointing_func"):
        stack.callback(setattr, module, "_gradient_checkpointing_func", module._gradient_checkpointing_func)
        function: Any = functools.partial(checkpoint, use_reentrant=False)
        module._gradient_checkpointing_func = function
    module.training = True
    inside = module.register_forward_pre_hook(lambda *_: setattr(module, "training", False))
    outside = module.register_forward_hook(lambda *_: setattr(module, "training", True), always_call=True)
    stack.callback(inside.remove)
    stack.callback(outside.remove)


def _check_batch_norm(model: nn.Module) -> None:
    mixing = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
    ]
    if mixing:
        raise InputError(
            "batch normalization uses the mean of the batch, so no example has its own gradient:\n"
            f"{listed(mixing)}\n  Call model.eval() first, which uses the running statistics."
        )
