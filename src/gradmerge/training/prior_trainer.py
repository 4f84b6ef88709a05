"""transformers' Trainer with the quadratic penalty, and the curvature of the trained model beside it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from ..curvature.checkpoint_names import is_adapted
from ..curvature.losses import loss_of
from ..errors import GradmergeError, InputError
from .curvature_callback import CurvatureCallback, loss_scale, sharding
from .penalty import AnchorTensors, Reduction
from .prior_adamw import Coupling, Missing, Prior, PriorAdamW

_log = logging.getLogger(__name__)
#: Values of ``optim`` in the TrainingArguments that work with a penalty.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


class PriorTrainer(Trainer):
    """A Trainer with a quadratic penalty: θ_t = argmin ℓ_t(θ) + ½ strength · ‖θ − anchor‖²_{H_0}.

    Learning rate, betas, epsilon, weight decay and the parameters exempt from it come from the TrainingArguments. With
    ``strength=0`` the weights equal those of the Trainer with the same ``optim``, bit for bit. ``optim`` must be
    `adamw_torch` or `adamw_torch_fused`. `PriorAdamW` describes a step. The trainer refuses sharded parameters (FSDP,
    DeepSpeed, tensor parallelism).

    The anchor is the model when training starts. The optimizer's state stores it: a run that resumes from a checkpoint
    keeps the first anchor, and ends with the same bytes as an uninterrupted run. The trainer refuses to resume from a
    checkpoint without that state (`save_only_model=True`), unless you pass ``anchor``.

    The saved model and every checkpoint get a **record of the penalty** (`gradmerge_penalty.json`), which merges read:
    P for the sum of the losses of all training examples (see `PriorAdamW.record_penalty`). It does not include gradient
    clipping, label smoothing or weight decay. Adapters get no record: their penalty is on A and B, but merges use W.

    **Adapters** (PEFT): the trainer trains and penalizes the adapter's parameters. The anchor of a LoRA adapter is its
    initial state, a random A and B = 0. ``prior="identity"`` keeps the change s·BA small. The trainer refuses the
    base's curvature, which is about W. Curvature of the adapter's own tensors (`CurvatureCallback`) works, to train
    this adapter further.

    Args:
        model: As in the Trainer, like ``args`` and all arguments that are not listed here.
        prior: H_0: a curvature folder or file, a `Curvature`, a mapping from names to tensors, `"identity"`, or a
            number c for c·I.
        strength: Factor of the penalty.
        anchor: A checkpoint, or a mapping from names to tensors, if not the initial model.
        coupling: `decoupled` or `adam`, as in `PriorAdamW`.
        reduction: `mean` or `sum`: how to read a curvature file or a `Curvature`. The default fits the Trainer's
            losses, which are means over examples; the default of a recipe is `sum`. See `PriorAdamW`.
        damping: Added to H_0.
        missing: If prior or anchor lack a parameter: `error`, or `zero`, as in `PriorAdamW`.
        keep_on: Device of anchor and H_0, as in `PriorAdamW`.
        curvature: Also write the trained model's curvature: a `CurvatureCallback`, or its ``source`` (`adam`
            or `pass`).

    Example:
        >>> trainer = gm.PriorTrainer(
        ...     model, arguments, train_dataset=data, prior="base/curvature", strength=1.0, curvature="pass"
        ... )
        >>> trainer.train()
        >>> trainer.save_model()  # into arguments.output_dir, which already has curvature/
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *trainer_args: Any,
        prior: Prior = "identity",
        strength: float = 1.0,
        anchor: AnchorTensors | None = None,
        coupling: Coupling = "decoupled",
        reduction: Reduction = "mean",
        damping: float = 0.0,
        missing: Missing = "error",
        keep_on: str | torch.device | None = None,
        curvature: CurvatureCallback | str | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        self._penalty: dict[str, Any] = {
            "prior": prior,
            "strength": strength,
            "anchor": anchor,
            "coupling": coupling,
            "reduction": reduction,
            "damping": damping,
            "missing": missing,
            "keep_on": keep_on,
        }
        callback = CurvatureCallback(curvature) if isinstance(curvature, str) else curvature
        # What the training loss is a mean of: examples of this process, terms of their losses, and their scale.
        self._examples_seen, self._terms_seen, self._loss_scale = 0, 0, cast(int | None, None)
        super().__init__(model, args, *trainer_args, **trainer_kwargs)
        if self.optimizer is not None or getattr(self, "optimizer_cls_and_kwargs", None) is not None:
            raise InputError(
                "PriorTrainer creates its optimizer. Leave `optimizers` out, or pass a gm.PriorAdamW to the Trainer."
            )
        if self.args.optim not in OPTIMIZERS:
            name = str(getattr(self.args.optim, "value", self.args.optim))
            raise InputError(f"optim={name!r}: PriorTrainer needs {' or '.join(OPTIMIZERS)}")
        if callback is not None:
            self.add_callback(callback)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the Trainer's AdamW with the penalty added."""
        if self.optimizer is None:
            model: Any = next((m for m in (*args, *kwargs.values()) if m is not None), self.model)
            if kind := sharding(self.args, model):
                raise InputError(f"PriorTrainer: parameters are sharded ({kind}). Use data-parallel training (DDP).")
            adamw = super().create_optimizer(*args, **kwargs)
            names = {parameter: name for name, parameter in model.named_parameters()}
            groups = [
                group | {"params": [(names[parameter], parameter) for parameter in group["params"]]}
                for group in adamw.param_groups
                if group["params"]
            ]
            settings = {key: adamw.defaults[key] for key in ("lr", "betas", "eps", "weight_decay", "foreach", "fused")}
            self.optimizer = PriorAdamW(groups, model=model, **settings, **self._penalty)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train as the Trainer does, and count what the loss is a mean of, for the record of the penalty."""
        labels, whole = inputs.get("labels"), cast(nn.Module, self.model)
        if isinstance(labels, Tensor) and labels.dim():
            self._examples_seen += len(labels)
            self._terms_seen += loss_of(whole, labels).terms(labels)
            several = self.args.gradient_accumulation_steps * self.args.world_size > 1
            if self._loss_scale is None and several and num_items_in_batch is not None:
                batch = {**self._prepare_inputs(inputs), "num_items_in_batch": num_items_in_batch}
                self._loss_scale = loss_scale(self.args, whole, batch)
        result: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model and the record of its penalty."""
        super().save_model(output_dir, _internal_call)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        whole = cast(nn.Module, self.model)
        if not self.args.should_save or not self._examples_seen or not isinstance(optimizer, PriorAdamW):
            return
        if is_adapted(whole):  # the penalty is on A and B, but a merge needs one on W
            return
        try:
            examples = len(cast(Any, self.train_dataset))
        except TypeError:  # a streamed dataset
            examples = self._examples_seen * self.args.world_size
        try:
            mean_over = examples * self._terms_seen / self._examples_seen / (self._loss_scale or 1)
            optimizer.record_penalty(output_dir or str(self.args.output_dir), mean_over, whole)
        except (GradmergeError, OSError) as error:
            _log.error("PriorTrainer: cannot record the penalty: %s", error)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load as the Trainer does. Refuse a checkpoint without state, whose weights would become the anchor."""
        if checkpoint is not None and self._penalty["anchor"] is None and self._penalty["strength"] != 0:
            missing = [name for name in ("optimizer.pt", "scheduler.pt") if not (Path(checkpoint) / name).is_file()]
            if missing:
                raise InputError(
                    f"{checkpoint}: no {' and no '.join(missing)} (save_only_model=True?), so the anchor is unknown. "
                    "Pass anchor=…, or resume from a complete checkpoint."
                )
        super()._load_optimizer_and_scheduler(checkpoint)
