"""transformers' Trainer with the quadratic prior in its optimizer, and curvature of the trained model beside it."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from ..curvature.checkpoint_names import is_adapted
from ..curvature.losses import loss_of
from ..errors import GradmergeError, InputError
from ..text import listed, nearest
from .callback import CurvatureCallback
from .curvature_sources import loss_scale
from .curvature_targets import AdapterTensors
from .named_tensors import AnchorTensors, NamedTensors, Reduction, find, open_anchor, open_prior, trainable
from .prior_adamw import PriorAdamW
from .prior_options import CURVATURE, Coupling, Prior, check_options
from .trainer_processes import sharding

_log = logging.getLogger(__name__)
#: The ``optim`` of TrainingArguments that a prior can be added to.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


class PriorTrainer(Trainer):
    """A Trainer that fine-tunes under a quadratic prior: θ_t = argmin ℓ_t(θ) + ½ strength · ‖θ − anchor‖²_{H_0}.

    All else is as in the Trainer: learning rate, betas, epsilon, weight decay and the parameters that are exempt from
    it come from the TrainingArguments. With ``strength=0`` the weights are those of the Trainer with the same
    ``optim``, bit for bit. ``optim`` must be `adamw_torch` or `adamw_torch_fused`. `PriorAdamW` says what the prior
    does to a step. Sharded parameters (FSDP, DeepSpeed, tensor parallelism) are refused.

    The anchor is the model as training finds it, and is kept in the optimizer's state: a run that resumes from a
    checkpoint is pulled to where the first one began, and ends with the same bytes as one that was never stopped. A
    checkpoint without that state (`save_only_model=True`) is refused, unless ``anchor`` is given.

    A model that is saved, and every checkpoint, gets a **record of the penalty** beside it (`gradmerge_penalty.json`),
    which merges read: P of the formula, for the sum of the losses of all training examples. `PriorAdamW.record_penalty`
    says what is in it. Gradient clipping, label smoothing and weight decay are not part of it. Adapters get none: their
    penalty is on A and B, and merges deal with W.

    **Adapters** (PEFT): trained parameters and prior are the adapter's. The anchor of a LoRA adapter is where it
    starts, A as it was drawn and B = 0. ``prior="identity"`` gives the penalty ½ strength · (‖A − A_start‖² + ‖B‖²):
    it keeps the change s·BA small, whatever the base's weights are worth. The base's curvature is about W, and refused;
    that of an adapter's own tensors (`CurvatureCallback` without ``adapted``) serves to train this adapter further.

    Args:
        model: As in the Trainer; so are ``args`` and all arguments that are not named below.
        prior: H_0: a curvature folder or file, a `Curvature`, a mapping from names to tensors, `"identity"`, or
            a number c for c·I. None is AdamW's own decay, around the anchor instead of zero.
        strength: How much the prior counts.
        anchor: Where it pulls to, if not to the model as it is: a checkpoint, or a mapping from names to tensors.
        coupling: `decoupled` or `adam`, as in `PriorAdamW`.
        reduction: `mean` or `sum`: how a curvature file or `Curvature` is read. The default fits the Trainer's
            losses, which are means over examples; a recipe's is `sum`. `PriorAdamW` says how they relate.
        damping: Added to H_0.
        missing: If the prior lacks a parameter: `error`, or `zero` for H_0 = 0, as for a new head. With
            `zero`, a parameter that ``anchor`` lacks is anchored where it is.
        keep_on: Device of anchor and H_0, as in `PriorAdamW`.
        keep_dtype: Their type.
        curvature: Also write the trained model's curvature: a `CurvatureCallback`, or its ``source`` (`adam`,
            `online`, `pass`).

    Example:
        >>> trainer = gm.PriorTrainer(
        ...     model, arguments, train_dataset=data, prior="base/curvature", strength=1.0, curvature="online"
        ... )
        >>> trainer.train()
        >>> trainer.save_model()  # into arguments.output_dir, where curvature/ lies already
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *usual: Any,
        prior: Prior = "identity",
        strength: float = 1.0,
        anchor: AnchorTensors | None = None,
        coupling: Coupling = "decoupled",
        reduction: Reduction = "mean",
        damping: float = 0.0,
        missing: Literal["error", "zero"] = "error",
        keep_on: str | torch.device | None = None,
        keep_dtype: torch.dtype | None = None,
        curvature: CurvatureCallback | str | None = None,
        **named: Any,
    ) -> None:
        if importlib.util.find_spec("accelerate") is None:
            raise InputError("PriorTrainer: the Trainer needs accelerate. Install it: pip install 'gradmerge[train]'")
        if missing not in ("error", "zero"):
            raise InputError(f"missing {missing!r}: known are error, zero{nearest(str(missing), ('error', 'zero'))}")
        callback = CurvatureCallback(curvature) if isinstance(curvature, str) else curvature
        if not isinstance(callback, CurvatureCallback | None):
            raise InputError(f"curvature: a CurvatureCallback, or its source, not {type(callback).__name__}")
        self._prior, self._anchor, self._missing = prior, anchor, missing
        #: Examples of this process, terms of their losses, and s as of `loss_scale`.
        self._rows, self._terms, self._scale = 0, 0, cast(int | None, None)
        self._options: dict[str, Any] = {"strength": strength, "coupling": coupling, "damping": damping}
        self._options |= {"reduction": reduction, "keep_on": keep_on, "keep_dtype": keep_dtype}
        self._prior_kind = check_options({"prior": prior, "anchor": anchor, **self._options})
        super().__init__(model, args, *usual, **named)
        if self.optimizer is not None or getattr(self, "optimizer_cls_and_kwargs", None) is not None:
            raise InputError(
                "PriorTrainer makes the optimizer itself, and was given one. Give the Trainer a gm.PriorAdamW in "
                "`optimizers` instead, or leave it out."
            )
        if self.args.optim not in OPTIMIZERS:
            name = str(getattr(self.args.optim, "value", self.args.optim))
            raise InputError(f"optim={name!r}: the prior goes with {' or '.join(OPTIMIZERS)}")
        if callback is not None:
            self.add_callback(callback)

    def create_optimizer(self, *given: Any, **also: Any) -> torch.optim.Optimizer:
        """The Trainer's own AdamW, its groups and settings, with the prior added."""
        if self.optimizer is None:
            model: Any = next((m for m in (*given, *also.values()) if m is not None), self.model)
            if kind := sharding(self.args, model):
                raise InputError(
                    f"PriorTrainer: parameters are spread over processes ({kind}), and the anchor belongs to whole "
                    "ones, as in data-parallel training (DDP)"
                )
            stock = super().create_optimizer(*given, **also)
            names = {parameter: name for name, parameter in model.named_parameters()}
            groups = [
                group | {"params": [(names[parameter], parameter) for parameter in group["params"]]}
                for group in stock.param_groups
                if group["params"]
            ]
            prior: Any = self._prior
            anchor: Any = self._anchor
            if self._prior_kind == CURVATURE:
                zeros = {n: torch.zeros(()).expand(p.shape) for n, p in trainable(model)}
                with open_prior(prior, self._options["reduction"]) as tensors:
                    prior = zeros | self._found(model, tensors)
            if anchor is not None:
                with open_anchor(anchor) as tensors:
                    anchor = {n: p.detach() for n, p in trainable(model)} | self._found(model, tensors)
            settings = {key: stock.defaults[key] for key in ("lr", "betas", "eps", "weight_decay", "foreach", "fused")}
            self.optimizer = PriorAdamW(groups, prior=prior, anchor=anchor, **settings, **self._options)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As the Trainer's; also counts what the training loss is a mean of, for the record of the penalty."""
        labels, whole = inputs.get("labels"), cast(nn.Module, self.model)
        if isinstance(labels, Tensor) and labels.dim():
            self._rows += len(labels)
            self._terms += loss_of(whole, labels).terms(labels)
            several = self.args.gradient_accumulation_steps * self.args.world_size > 1
            if self._scale is None and several and num_items_in_batch is not None:
                batch = {**self._prepare_inputs(inputs), "num_items_in_batch": num_items_in_batch}
                self._scale = loss_scale(self.args, whole, batch)
        result: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's; beside the model goes a record of the penalty that it was tuned under."""
        super().save_model(output_dir, _internal_call)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        if not self.args.should_save or not self._rows or not isinstance(optimizer, PriorAdamW):
            return
        if is_adapted(cast(nn.Module, self.model)):  # its penalty is on A and B, and a merge needs one on W
            return
        try:
            examples = len(cast(Any, self.train_dataset))
        except TypeError:  # streamed
            examples = self._rows * self.args.world_size
        try:
            mean_over = examples * self._terms / self._rows / (self._scale or 1)
            optimizer.record_penalty(output_dir or str(self.args.output_dir), mean_over, self.model)
        except (GradmergeError, OSError) as error:
            _log.error("PriorTrainer: the penalty is not recorded: %s", error)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As the Trainer, but refuses a checkpoint without state: the anchor would be the checkpoint's weights."""
        if checkpoint is not None and self._anchor is None and self._options["strength"] != 0:
            lacking = [name for name in ("optimizer.pt", "scheduler.pt") if not (Path(checkpoint) / name).is_file()]
            if lacking:
                raise InputError(
                    f"{checkpoint}: no {' and no '.join(lacking)} (save_only_model=True?), so that where training "
                    "began is not known. Say it, anchor=…, or resume from a checkpoint that was saved whole."
                )
        super()._load_optimizer_and_scheduler(checkpoint)

    def _found(self, model: nn.Module, tensors: NamedTensors) -> dict[str, Tensor]:
        """Tensors by names in memory; some may be missing with ``missing="zero"``."""
        if is_adapted(model):
            return _of_adapter(model, tensors)
        parameters = trainable(model)
        found = dict(find(tensors, parameters, model, optional=self._missing == "zero"))
        if not found:
            names = listed(name for name, _ in parameters)
            raise InputError(f"{tensors.label}: nothing for any of the {len(parameters)} parameters:\n{names}")
        return found


def _of_adapter(model: nn.Module, tensors: NamedTensors) -> dict[str, Tensor]:
    """Tensors for the parameters of an adapter, by their names in memory or those of the adapter's file."""
    measured = AdapterTensors(model)
    in_file = {id(p): name for name, p in measured.stored(dict(measured.parameters)).items()}
    places = {n: n if n in tensors.shapes else in_file.get(id(p), n) for n, p in trainable(model)}
    absent = [name for name, place in places.items() if place not in tensors.shapes]
    if absent:
        raise InputError(
            f"{tensors.label}: nothing for {len(absent)} of {len(places)} parameters of the adapter:\n"
            f"{listed(absent, 4)}\nWhat is known of the base's weights W says nothing of an adapter's factors A and B. "
            "prior='identity' (or a number) keeps them near where they start."
        )
    return {name: tensors.read(place) for name, place in places.items()}
