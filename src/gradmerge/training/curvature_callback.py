"""Curvature as a by-product of training with transformers' Trainer."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ..arguments import check, check_known
from ..curvature.batches import IndexedBatches, examples_in
from ..curvature.checkpoint_names import adapter_names, is_adapted, stored_shapes, stored_tensors
from ..curvature.curvature import Curvature
from ..curvature.estimate import LIKELIHOODS, estimate_curvature, trainable
from ..curvature.format import PRECISIONS, STEM
from ..curvature.from_optimizer import second_moment, token_note
from ..curvature.kernels import sum_type
from ..curvature.losses import unwrapped
from ..distributed import initialized
from ..errors import GradmergeError, InputError
from ..io.atomic_dir import AtomicDir
from ..text import listed

_log = logging.getLogger(__name__)
SOURCES = ("adam", "pass")
#: Optimizers whose `exp_avg_sq` is a running mean of squared gradients.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
#: Keyword arguments that the Trainer adds to a batch.
_NOT_INPUTS = ("num_items_in_batch", "return_dict")


class CurvatureCallback(TrainerCallback):
    """Writes a `curvature/` folder into every checkpoint of a Trainer, and into its output folder when training ends.

    A merge finds it there by itself. Values are sums over the N training examples of squared per-example gradients,
    Σ_i [∇ℓ_i]², or an estimate of that sum, with the names and shapes of the model's files. The callback does not
    change training: weights, gradients and random numbers stay the same, bit for bit.

    ``source`` selects how curvature is obtained:

    - `adam`: N·B·v̂, with Adam's bias-corrected second moments v̂ and B examples per step. It is free. It squares the
      mean gradient of a step: it is too large by up to a factor B, unless the examples' gradients vary much more than
      their mean, as near the end of fine-tuning. Gradient clipping distorts its scale: train with `max_grad_norm=0`.
      It needs an Adam of PyTorch or `gm.PriorAdamW`.
    - `pass`: Σ_i [∇ℓ_i]² at the final weights, over the first ``limit`` training examples. It costs a pass over them.
      Only the checkpoint with the final weights gets it.

    `pass` uses the model's log-likelihood of `labels`, summed over an example's tokens, without dropout. `adam` uses
    the training loss, which for language models is a mean over tokens.

    - **Gradient accumulation, several processes** (DDP): count as one large batch. If the Trainer repeats examples to
      give all processes equally many, `adam` counts them twice. Sharded parameters (FSDP, DeepSpeed, tensor
      parallelism) are refused.
    - **Mixed precision**: gradients are those of the model as it is trained; sums are float32.
    - **Adapters** (PEFT): curvature of the adapter's own tensors, with the names of `adapter_model.safetensors`. For
      the full weights, which a merge needs, run `gradmerge curvature estimate` on the saved adapter.
    - **Frozen parameters** get no curvature; a recipe then needs `missing: zero`.
    - **`load_best_model_at_end`**: the output folder gets the curvature of the best checkpoint.
    - **Streamed datasets**: N is the number of examples seen. `pass` needs a length.

    The callback replaces an existing curvature folder atomically. Invalid settings raise when training begins. Later
    failures are logged as errors, and training continues.

    Args:
        source: `adam` or `pass`.
        likelihood: With `pass`: `empirical`, `sampled` or `exact` labels, as in `gm.estimate_curvature`.
        limit: With `pass`, the number of examples, from the first; default: all.
        batch_size: With `pass`, examples per forward pass; default: that of training.
        precision: `float32`, `bfloat16` or `log8`: how values are stored.
        seed: For sampled labels, and for random numbers in the collator during `pass`.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[gm.CurvatureCallback("pass")])
        >>> trainer.train()
        >>> trainer.save_model()  # into arguments.output_dir, which already has curvature/
    """

    def __init__(
        self,
        source: str = "adam",
        *,
        likelihood: str = "empirical",
        limit: int | None = None,
        batch_size: int | None = None,
        precision: str = "float32",
        seed: int = 0,
    ) -> None:
        check_known(f"source {source!r}", str(source), SOURCES)
        check_known(f"likelihood {likelihood!r}", str(likelihood), LIKELIHOODS)
        check_known(f"precision {precision!r}", str(precision), PRECISIONS)
        check("seed", seed, int)
        for option, number in (("limit", limit), ("batch_size", batch_size)):
            check(option, number, int | None)
            if number is not None and number < 1:
                raise InputError(f"{option}={number}: must be at least 1")
        if source == "adam" and (limit is not None or batch_size is not None or likelihood != "empirical"):
            raise InputError("limit, batch_size and likelihood need source='pass'. Adam sees the data's labels.")
        self.source, self.likelihood, self.precision = source, likelihood, precision
        self.limit, self.batch_size, self.seed = limit, batch_size, seed
        self._hook: Any = None
        self._first_batch: dict[str, Any] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check everything that can be checked before hours of training."""
        self._args, self._first_step = args, state.global_step
        self._saved_step = state.global_step or None
        self._model, self._optimizer = kwargs["model"], kwargs["optimizer"]
        self._loader = kwargs["train_dataloader"]
        if kind := sharding(args, self._model):
            raise InputError(
                f"CurvatureCallback: parameters are sharded ({kind}). Use data-parallel training (DDP), or run "
                "`gradmerge curvature estimate` on the trained model."
            )
        if args.should_save:
            with AtomicDir(Path(str(args.output_dir)) / STEM, "curvature", force=True) as staging:
                staging.temporary = True  # only checks that the folder can be replaced
        self._find_parameters()
        if self.source == "adam":
            self._check_adam(state)
        else:
            data = self._loader.dataset
            if isinstance(data, IterableDataset) or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
                raise InputError("source='pass' needs a dataset with a length and an index")
            with evaluation_mode(self._model):  # collators may draw random numbers
                _model_inputs(self._loader.collate_fn([data[0]]))

    def _find_parameters(self) -> None:
        """Find the trained parameters, and their names in files."""
        self._file_names = adapter_names(self._model) if is_adapted(self._model) else None
        self._parameters = trainable(self._model)
        if self._file_names is not None:  # those that the adapter's file holds
            self._parameters = {name: p for name, p in self._parameters.items() if name in self._file_names}
            self._warn(
                "this is the curvature of the adapter's own tensors. To merge the full weights, run `gradmerge "
                "curvature estimate` on the saved adapter."
            )
        # Raises before training, not after it, if the names of files cannot be determined.
        stored = self._to_stored({n: torch.empty(p.shape, device="meta") for n, p in self._parameters.items()})
        missing = [name for name in stored_shapes(self._model) if name not in stored]
        if missing and self._file_names is None:
            self._warn(
                f"{len(missing)} parameters are not trained and get no curvature. A recipe that uses it needs "
                f"`missing: zero`, or must exclude them:\n{listed(missing, 4)}"
            )

    def _check_adam(self, state: TrainerState) -> None:
        """Check what second moments need, and find B."""
        args = self._args
        while not isinstance(self._optimizer, _ADAMS) and hasattr(self._optimizer, "optimizer"):
            self._optimizer = self._optimizer.optimizer
        if not isinstance(self._optimizer, _ADAMS):
            raise InputError(
                "source='adam' needs PyTorch's Adam or AdamW (optim='adamw_torch' or 'adamw_torch_fused', or "
                f"gm.PriorAdamW), not {type(self._optimizer).__name__}. Use source='pass'."
            )
        batch_size = (state.train_batch_size if args.auto_find_batch_size else None) or args.train_batch_size
        # B: examples per optimizer step, over all processes and accumulated batches.
        self._step_size = int(batch_size * args.gradient_accumulation_steps * args.world_size)
        self._scale = 1
        self._remove_hook()  # of a training that raised an error
        if args.gradient_accumulation_steps > 1 or initialized().world_size > 1:
            if args.torch_compile:
                raise InputError("source='adam' excludes torch_compile=True with several batches per step; use 'pass'")
            self._hook = self._model.register_forward_pre_hook(self._record, with_kwargs=True)
        if args.max_grad_norm:
            self._warn(
                f"max_grad_norm={args.max_grad_norm:g}: where gradients are clipped, Adam's second moments are too "
                "small. Train with max_grad_norm=0, or use source='pass'."
            )
        for note in token_note(unwrapped(self._model)):
            self._warn(note)

    def _record(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._first_batch is None and model.training:
            self._first_batch = dict(kwargs)

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._first_batch = None

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Find s from the first batch: the optimizer's gradient is s times the mean gradient of a step's examples."""
        if self._first_batch is not None:
            batch = self._first_batch
            self._remove_hook()
            self._scale = loss_scale(args, self._model, batch)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._saved_step = state.global_step
        if self.source == "adam":
            self._write(state.global_step, [_checkpoint(args, state.global_step)])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._remove_hook()
        out, step = Path(str(args.output_dir)), state.global_step
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        checkpoint = Path(best) if best else _checkpoint(args, step)
        if self.source == "pass":
            self._write(step, [out, checkpoint] if best or self._saved_step == step else [out])
        elif (best and state.best_global_step != step) or step == self._first_step:
            # The weights are those of a checkpoint, which has its curvature.
            if args.should_save:
                _replace(out / STEM, lambda folder: shutil.copytree(checkpoint / STEM, folder, dirs_exist_ok=True))
        else:
            self._write(step, [out])

    def _write(self, step: int, folders: list[Path]) -> None:
        """Compute the curvature, in which all processes take part, and write it into model folders."""
        try:
            curvature = self._adam_curvature(step) if self.source == "adam" else self._pass_curvature()
        except GradmergeError as error:
            _log.error("CurvatureCallback: no curvature is written: %s", error)
            return
        for folder in folders if self._args.should_save else ():
            _replace(folder / STEM, lambda staging: curvature.write(staging, self.precision))

    def _warn(self, text: str) -> None:
        if self._args.should_save:
            _log.warning("CurvatureCallback: %s", text)

    def _named(self, sums: Mapping[str, Tensor], examples: int) -> Curvature:
        """Return the curvature with the names of files."""
        likelihood = "adam" if self.source == "adam" else self.likelihood
        return Curvature(self._to_stored(sums), examples, likelihood, Path(str(self._args.output_dir)).resolve().name)

    def _to_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._file_names is None:
            return stored_tensors(self._model, tensors)
        return {self._file_names[name]: value for name, value in tensors.items()}

    def _adam_curvature(self, step: int) -> Curvature:
        """Return N·B·v̂ / s², with N examples, B examples per step, and v̂ from Adam's state."""
        try:
            examples = len(self._loader.dataset)
        except TypeError:  # a streamed dataset
            examples = step * self._step_size
        factor = float(examples) * self._step_size / self._scale**2
        betas = {p: group["betas"][1] for group in self._optimizer.param_groups for p in group["params"]}
        sums = {}
        for name, p in self._parameters.items():
            moment = second_moment(self._optimizer.state.get(p), betas.get(p), factor)
            sums[name] = torch.zeros(p.shape) if moment is None else moment.cpu()  # None if it never had a gradient
        return self._named(sums, examples)

    def _pass_curvature(self) -> Curvature:
        """Return Σ_i g_i² over the first ``limit`` training examples, at the final weights."""
        data, processes = self._loader.dataset, initialized()
        total = len(data) if self.limit is None else min(self.limit, len(data))
        rows = processes.share(total)
        sums = {n: torch.zeros_like(p, dtype=sum_type(p)).detach() for n, p in self._parameters.items()}
        problem: GradmergeError | None = None
        try:
            if rows:
                sums |= self._sums_over(data, rows)
        except GradmergeError as error:
            problem = error
        if any(processes.all_gather(problem is not None)):  # if one process fails, all of them raise
            raise problem or InputError("another process failed on its examples")
        processes.all_reduce(sums.values())
        return self._named(sums, total)

    def _sums_over(self, data: Any, rows: range) -> dict[str, Tensor]:
        """Return Σ_i g_i² over these rows of the data, by names in memory."""
        with evaluation_mode(self._model):
            torch.manual_seed(self.seed)  # collators that draw random numbers draw the same every time
            loader: Any = DataLoader(
                Subset(data, rows),
                batch_size=self.batch_size or self._args.per_device_train_batch_size,
                collate_fn=self._loader.collate_fn,
                num_workers=self._args.dataloader_num_workers,
            )

            def indexed_inputs() -> Iterator[tuple[int, Any]]:
                index = rows.start  # sampled labels depend on it
                for batch in loader:
                    yield index, _model_inputs(batch)
                    index += examples_in(batch)

            device = next(iter(self._parameters.values())).device
            batches = IndexedBatches(indexed_inputs)
            estimate = estimate_curvature(self._model, batches, self.likelihood, seed=self.seed, device=device)
        return {name: value for name, value in estimate.sum().items() if name in self._parameters}


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{step}"


def _replace(folder: Path, write: Callable[[Path], Any]) -> None:
    """Replace a curvature folder atomically. Log an error instead of raising it: training continues."""
    try:
        with AtomicDir(folder, "curvature", force=True) as staging:
            write(staging.folder)
    except (GradmergeError, OSError) as error:
        _log.error("CurvatureCallback: cannot write %s: %s", folder, error)


def _model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's inputs in a batch. Raise InputError if it has no labels for the model's own loss."""
    inputs = {name: value for name, value in batch.items() if name not in _NOT_INPUTS}
    if not isinstance(inputs.get("labels"), Tensor):
        raise InputError(
            f"CurvatureCallback: the model gets {', '.join(inputs)} but no 'labels', so the loss of an example is "
            "unknown. Name the label column `labels`, and do not use label smoothing or compute_loss_func, or use "
            "source='adam'."
        )
    return inputs


def loss_scale(args: Any, model: nn.Module, batch: dict[str, Any]) -> int:
    """Return s: the optimizer's gradient is s times the mean gradient of a step's examples.

    The Trainer adds up the losses of accumulated batches and of processes. It expects the model to divide each loss by
    `num_items_in_batch`, the number of labels in the whole step. A model that divides by the number in its own batch
    makes the sum too large by the number of batches; such a model returns the same loss for any `num_items_in_batch`.
    """
    items = batch.get("num_items_in_batch")
    if items is None or "labels" not in batch:
        return 1
    with evaluation_mode(model), torch.no_grad():
        one, two = (_loss(model(**batch | {"num_items_in_batch": n})) for n in (items, 2 * items))
    if one is None or two is None or abs(one - two) > 1e-3 * abs(one):
        return 1
    world_size = initialized().world_size if args.average_tokens_across_devices else 1
    return int(args.gradient_accumulation_steps) * world_size


def _loss(output: Any) -> float | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode. Restore modes and all random number generators at the end."""
    device = next(model.parameters()).device
    devices = [] if device.type == "cpu" else [device]
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        yield


def sharding(args: Any, model: nn.Module) -> str | None:
    """Return what shards the parameters of a Trainer (FSDP, DEEPSPEED, …), or None if each process holds them whole."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
    from torch.distributed.tensor import DTensor

    state = AcceleratorState()  # also knows what `accelerate launch` set up
    uses_fsdp = args.fsdp or getattr(state, "fsdp_plugin", None) is not None
    kind = "FSDP" if uses_fsdp else str(state.distributed_type.value)
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP"):
        return kind
    return "DTensor" if any(isinstance(p, DTensor) for p in model.parameters()) else None
